"""Whether a model has positions for all tokens that its cache can hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

import torch

from ...errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


#: Where configs say how many positions a model has; the last ones are LED's and MPT's.
_LIMITS = ("max_position_embeddings", "max_target_positions", "max_decoder_position_embeddings", "max_seq_len")
#: Models that compute a bias of a fixed number of positions in every step, and slice it: where their config has it.
_FIXED_BIAS = {"mpt": "max_seq_len"}


def check_positions(model: PreTrainedModel, max_length: int | None) -> None:
    """Refuse a cache that holds more tokens than the model has positions for, where it looks them up in a table.

    Models with computed positions (rotary, ALiBi) pass: they run past what they were trained for.

    Args:
        max_length: Tokens a row can hold in all, None for any number.

    Raises:
        InputError: If a step would read past the table.
    """
    config = model.config.get_text_config(decoder=True)
    biased = getattr(config, _FIXED_BIAS.get(config.model_type, ""), None)
    if biased is not None and (max_length is None or max_length > biased):
        _refuse(model, max_length, biased, "its position bias")
    limit = next((found for found in (getattr(config, name, None) for name in _LIMITS) if found), None)
    if not isinstance(limit, int) or (max_length is not None and max_length <= limit):
        return
    for name, rows in _position_tables(model):
        # Some tables have up to two extra rows in front, for padding.
        if limit <= rows <= limit + 2:
            _refuse(model, max_length, limit, name)


def _refuse(model: PreTrainedModel, max_length: int | None, limit: int, name: str) -> NoReturn:
    held = "any number of" if max_length is None else max_length
    raise InputError(
        f"the cache can hold {held} tokens, but {type(model).__name__} has positions for {limit} ({name}); "
        f"use a max_cache_len of at most {limit}"
    )


def beyond_positions(config: PreTrainedConfig, max_cache_len: int, goes_on: bool = False) -> str:
    """Return one line that says that a cache holds more tokens than a model was made for; empty if it does not.

    Args:
        config: Of the model.
        max_cache_len: Tokens that a full-attention layer holds.
        goes_on: Whether positions in the cache start again, as with attention sinks.
    """
    config = config.get_text_config(decoder=True)
    limit = next((getattr(config, name) for name in _LIMITS if isinstance(getattr(config, name, None), int)), None)
    if goes_on or not limit or max_cache_len <= limit:
        return ""
    return (
        f"max_cache_len is {max_cache_len}, but the model was made for {limit} positions (its config's "
        "max_position_embeddings); tokens behind these are computed, and their quality is unknown"
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
