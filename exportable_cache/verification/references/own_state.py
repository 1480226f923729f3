"""The reference of a model that takes no cache of transformers: with a state of its own, or with none."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ...cache.attention.implementation import attention_of
from ...errors import UnsupportedModelError
from ...models.support import WITHOUT_DYNAMIC_CACHE

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def takes_no_cache(model: PreTrainedModel) -> bool:
    """Whether a model leaves a cache of transformers alone, or refuses it."""
    return model.config.model_type in WITHOUT_DYNAMIC_CACHE


@torch.no_grad()
def logits_of_itself(model: PreTrainedModel, ids: torch.Tensor, prompt: int) -> Iterator[torch.Tensor]:
    """Logits [batch, vocab] after the prompt and after each later token of `ids` [batch, length].

    A model with a state of its own is fed token by token, one without takes all tokens at once.
    """
    name = WITHOUT_DYNAMIC_CACHE[model.config.model_type]
    options: dict[str, Any]
    with attention_of(model, "eager"):
        if name is None:
            # XLM takes a padding token anywhere for the end of the text, unless it is told.
            known = "lengths" in inspect.signature(model.forward).parameters
            options = {"lengths": torch.full(ids.shape[:1], ids.shape[1], device=ids.device)} if known else {}
            yield from model(ids, use_cache=False, **options).logits[:, prompt - 1 :].unbind(1)
            return
        options = {}
        for position in range(ids.shape[1]):
            output = model(ids[:, position : position + 1], use_cache=True, **options)
            options = {name: getattr(output, name)}
            if position >= prompt - 1:
                yield output.logits[:, -1].clone()


def check_plain_cache(model: PreTrainedModel, **asked: Any) -> None:
    """Refuse what its own code cannot be asked to do.

    Args:
        **asked: What is done to the cache, by the name of the option; None for nothing.

    Raises:
        UnsupportedModelError: If something is.
    """
    for name, value in asked.items():
        if value is not None:
            raise UnsupportedModelError(
                f"{model.config.model_type!r} takes no cache of transformers, so there is nothing to compare {name} "
                "with; leave it out, or do not verify (verify=False)"
            )
