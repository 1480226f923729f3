"""BigBird, BioGPT, Megatron-BERT, OPT, Pix2Struct, RemBERT and RoFormer: they make a mask as long as what was seen.

No runtime can plan memory for a tensor of such a size, and a GPU is waited for. Of OPT's nothing is used where
positions are given; https://github.com/huggingface/transformers/pull/49002 says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers.masking_utils import create_causal_mask

from ....common.patch import Patch
from ..conditions import only_traced

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask
    from transformers import PreTrainedModel


def _masked_by_slots(
    self: PreTrainedModel,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | BlockMask | None = None,
    *args: Any,
    inputs_embeds: torch.Tensor | None = None,
    past_key_values: Any = None,
    original: Callable,
    **kwargs: Any,
) -> Any:
    """A mask [batch, 1, length, slots] from the cache, which models take as it is."""
    if attention_mask is None and past_key_values is not None:
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        assert tokens is not None
        # Of embeddings the mask has the first two sizes, the dtype and the device.
        like = torch.empty(*tokens.shape[:2], 0, dtype=self.dtype, device=tokens.device)
        cache = getattr(past_key_values, "self_attention_cache", past_key_values)
        attention_mask = create_causal_mask(self.config, like, None, cache)
    return original(
        self, input_ids, attention_mask, *args, inputs_embeds=inputs_embeds, past_key_values=past_key_values, **kwargs
    )


def _opt_by_slots(
    self: PreTrainedModel,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    *,
    position_ids: torch.Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: torch.Tensor | None = None,
    original: Callable,
    **kwargs: Any,
) -> Any:
    """The same, with positions, which it would count by its own mask."""
    if attention_mask is None and position_ids is None and past_key_values is not None:
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        assert tokens is not None
        positions = past_key_values.get_seq_length() + torch.arange(tokens.shape[1], device=tokens.device)
        position_ids = positions[None].expand(tokens.shape[:2])
    caches = {"inputs_embeds": inputs_embeds, "past_key_values": past_key_values}
    return _masked_by_slots(
        self, input_ids, attention_mask, position_ids=position_ids, original=original, **caches, **kwargs
    )


_REASON = "it makes a mask as long as what was seen"


def _of_class(model: str, name: str, *digests: str) -> tuple[Patch, ...]:
    return (Patch(f"{model}.modeling_{model}", f"{name}.forward", only_traced(_masked_by_slots), _REASON, digests),)


_PIX2STRUCT = _of_class("pix2struct", "Pix2StructTextModel", "45cc7360d8ca6df6", "94a21c26fbad9c18")

PATCHES = {
    "big_bird": _of_class("big_bird", "BigBirdModel", "3b2d700041772ed9", "87c436a64c8424d3"),
    "biogpt": _of_class("biogpt", "BioGptModel", "fad64a70caa3d5a5", "cdca3c4f2e215352"),
    "megatron-bert": _of_class("megatron_bert", "MegatronBertModel", "08aaaa04d39b7bdf", "3b58f74cdb2aa20e"),
    "opt": (
        Patch("opt.modeling_opt", "OPTDecoder.forward", only_traced(_opt_by_slots), _REASON, ("a60e8286d39616ff",)),
    ),
    "pix2struct": _PIX2STRUCT,
    "pix2struct_text_model": _PIX2STRUCT,
    "rembert": _of_class("rembert", "RemBertModel", "6a1e8ec9f8cae378", "bc856660417c7e51"),
    "roformer": _of_class("roformer", "RoFormerModel", "e04b5f14baeefbcc", "10ce5af282bd3239"),
}
