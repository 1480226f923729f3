"""Whether a model has positions for all tokens that its cache can hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ..errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_positions(model: PreTrainedModel, max_length: int | None) -> None:
    """Refuse a cache that holds more tokens than the model has positions for, where it looks them up in a table.

    Models with computed positions (rotary, ALiBi) pass: they run past what they were trained for.

    Args:
        max_length: Tokens a row can hold in all, None for any number.

    Raises:
        InputError: If a step would read past the table.
    """
    config = model.config.get_text_config(decoder=True)
    # The last is LED's.
    names = ("max_position_embeddings", "max_target_positions", "max_decoder_position_embeddings")
    limit = next((found for found in (getattr(config, name, None) for name in names) if found), None)
    if not isinstance(limit, int) or (max_length is not None and max_length <= limit):
        return
    for name, rows in _position_tables(model):
        # Some tables have up to two extra rows in front, for padding.
        if limit <= rows <= limit + 2:
            held = "any number of" if max_length is None else max_length
            raise InputError(
                f"the cache can hold {held} tokens, but {type(model).__name__} has positions for {limit} ({name}); "
                f"use a max_cache_len of at most {limit}"
            )


def _position_tables(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    """Name and rows of what may be a table of positions: embeddings, and 2-D tensors that are no parameters (GPT-J,
    CTRL).
    """
    try:
        tokens = model.get_input_embeddings()
    except NotImplementedError:  # see `layout.vocab_size_of`
        tokens = None
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) and module is not tokens:
            yield name, module.num_embeddings
        plain = {key: value for key, value in vars(module).items() if isinstance(value, torch.Tensor)}
        for key, tensor in {**dict(module.named_buffers(recurse=False)), **plain}.items():
            if tensor.dim() == 2:
                yield f"{name}.{key}", tensor.shape[0]
