"""Features that a decoder takes beside the embeddings, such as those that Qwen3-VL adds behind its first layers.

They travel with the embeddings, in one tensor [batch, length, hidden_size + further sizes]: first the embedding, then
what goes beside it, zeros for text. So every chunk of a prompt has its own, and no size depends on data.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ...errors import UnsupportedModelError
from .front import decoder_of

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from .probe import Travelling


class EveryToken:
    """Stands for a mask by which a decoder picks tokens with a size that depends on data: picks all.

    Args:
        stays: Whether it is used as a mask once more after it was moved.
    """

    def __init__(self, stays: bool) -> None:
        self.stays = stays

    def to(self, *_: Any) -> EveryToken | slice:
        return self if self.stays else slice(None)

    def squeeze(self, _: int) -> slice:
        return slice(None)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> torch.Tensor:
        if function.__name__ != "masked_scatter":
            raise UnsupportedModelError(f"a decoder uses the places of features in {function.__name__}; run it on text")
        target, _, source = args
        return source.view(target.shape)


@contextmanager
def travelling_beside(model: PreTrainedModel, travels: Sequence[Travelling], options: dict[str, Any]) -> Iterator[None]:
    """Run a block in which the decoder is handed what `options["inputs_embeds"]` holds behind the embeddings; they
    alone are left there.
    """
    if not travels:
        yield
        return
    embeds = options["inputs_embeds"]
    size = embeds.shape[-1] - sum(each.size for each in travels)
    options["inputs_embeds"], *further = embeds.split([size, *(each.size for each in travels)], dim=-1)
    beside: dict[str, Any] = {}
    for each, features in zip(travels, further, strict=True):
        if not each.keys:
            # Some models hand on what they are given, and would compute it of the embeddings otherwise (Gemma 4).
            target = options if each.name in inspect.signature(model.forward).parameters else beside
            target[each.name] = features.unflatten(-1, each.shape) if len(each.shape) > 1 else features
            continue
        parts = features.chunk(len(each.keys), dim=-1)
        is_list = each.keys == tuple(range(len(parts))) and each.places != "vision_mask"
        beside[each.name] = list(parts) if is_list else dict(zip(each.keys, parts, strict=True))
        beside[each.places] = EveryToken(stays=each.places == "vision_mask")

    def hand_over(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return arguments, {**keywords, **beside}

    handle = decoder_of(model).register_forward_pre_hook(hand_over, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
