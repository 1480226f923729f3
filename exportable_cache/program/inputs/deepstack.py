"""Features that a decoder takes beside the embeddings, such as those that Qwen3-VL adds behind its first layers.

They travel with the embeddings, in one tensor [batch, length, hidden_size + further sizes]: first the embedding, then what
goes beside it, zeros for text. So every chunk of a prompt has its own, and no size depends on data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .front import decoder_of

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from .probe import Travelling


class EveryToken:
    """Stands for the mask `visual_pos_masks`, by which the decoder picks tokens with a size that depends on data: picks
    all.
    """

    def to(self, *_: Any) -> slice:
        return slice(None)


@contextmanager
def travelling_beside(model: PreTrainedModel, travels: Sequence[Travelling], options: dict[str, Any]) -> Iterator[None]:
    """Run a block in which the decoder is handed what `options["inputs_embeds"]` holds behind the embeddings; they alone
    are left there.
    """
    if not travels:
        yield
        return
    embeds = options["inputs_embeds"]
    size = embeds.shape[-1] - sum(each.size for each in travels)
    options["inputs_embeds"], *further = embeds.split([size, *(each.size for each in travels)], dim=-1)
    beside: dict[str, Any] = {}
    for each, features in zip(travels, further, strict=True):
        if each.layers:
            beside[each.name] = list(features.chunk(each.layers, dim=-1))
            beside["visual_pos_masks"] = EveryToken()
        else:
            beside[each.name] = features

    def hand_over(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return arguments, {**keywords, **beside}

    handle = decoder_of(model).register_forward_pre_hook(hand_over, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
