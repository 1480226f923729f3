"""Masks of models that do not fit a static cache.

Gemma 4 unified, Kosmos-2 and Moshi make masks for the tokens of a step, or without their window. BigBird, BioGPT,
Megatron-BERT, OPT, Pix2Struct, RemBERT and RoFormer make a mask as long as the sequence, a size that depends on data,
for which no runtime can plan memory and a GPU has to wait. OPT does not use that mask if positions are given;
https://github.com/huggingface/transformers/pull/49002 removes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from ....common.patch import Patch
from ....errors import UnsupportedModelError
from ..conditions import CACHE, only_traced, over_our_cache

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask
    from transformers import PreTrainedModel


def _like(self: Any, input_ids: Any, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
    """Return a tensor [batch, length, 0], because masks need only shape, dtype and device of embeddings."""
    tokens = input_ids if inputs_embeds is None else inputs_embeds
    return torch.empty(*tokens.shape[:2], 0, dtype=self.dtype, device=tokens.device)


def _masks_of_text(
    self: Any,
    input_ids: torch.Tensor | None = None,
    *args: Any,
    attention_mask: Any = None,
    inputs_embeds: torch.Tensor | None = None,
    mm_token_type_ids: torch.Tensor | None = None,
    cache: Any = None,
    original: Callable,
    **kwargs: Any,
) -> Any:
    """Create masks by layer type for text; those of images are passed in by the program."""
    if mm_token_type_ids is not None:
        raise UnsupportedModelError(
            "mm_token_type_ids must be left out with a static cache, because the model needs the position of images "
            "as a Python int; pass the masks by layer type as attention_mask, or use DynamicCache"
        )
    if not isinstance(attention_mask, dict):
        arguments = {
            "config": self.config.get_text_config(),
            "inputs_embeds": _like(self, input_ids, inputs_embeds),
            "attention_mask": attention_mask,
            CACHE: cache,
            "position_ids": None,
        }
        attention_mask = {
            "full_attention": create_causal_mask(**arguments),
            "sliding_attention": create_sliding_window_causal_mask(**arguments),
        }
    return original(
        self,
        input_ids,
        *args,
        attention_mask=attention_mask,
        inputs_embeds=inputs_embeds,
        **{CACHE: cache},
        **kwargs,
    )


def _mask_with_window(
    self: Any,
    input_ids: torch.Tensor | None = None,
    attention_mask: Any = None,
    *args: Any,
    inputs_embeds: torch.Tensor | None = None,
    cache: Any = None,
    original: Callable,
    **kwargs: Any,
) -> Any:
    """Create the mask of a ring, which the model uses unchanged."""
    if attention_mask is None or attention_mask.dim() == 2:
        attention_mask = create_sliding_window_causal_mask(
            self.config, _like(self, input_ids, inputs_embeds), attention_mask, cache
        )
    return original(self, input_ids, attention_mask, *args, inputs_embeds=inputs_embeds, **{CACHE: cache}, **kwargs)


def _kosmos_text(
    self: Any,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    image_embeds: torch.Tensor | None = None,
    image_embeds_position_mask: torch.Tensor | None = None,
    *,
    cache: Any,
    inputs_embeds: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    original: Callable,
    **kwargs: Any,
) -> BaseModelOutputWithPastAndCrossAttentions:
    """Run the layers with a mask over slots; positions count from the padding index + 1, without padding."""
    table, past = self.embed_positions, cache.get_seq_length()
    if position_ids is None and inputs_embeds is None:
        position_ids = table.create_position_ids_from_input_ids(input_ids, table.padding_idx, past)
    elif position_ids is None:
        position_ids = table.create_position_ids_from_inputs_embeds(inputs_embeds, past, table.padding_idx)
    hidden_states = self.forward_embedding(
        input_ids=input_ids,
        inputs_embeds=inputs_embeds,
        image_embeds=image_embeds,
        img_input_mask=image_embeds_position_mask,
        position_ids=position_ids,
    )
    mask = create_causal_mask(self.config, hidden_states, attention_mask, cache)
    for layer in self.layers:
        hidden_states = layer(hidden_states, mask, **{CACHE: cache}, use_cache=True)
    return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.layer_norm(hidden_states), **{CACHE: cache})


def _masked_by_slots(
    self: PreTrainedModel,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | BlockMask | None = None,
    *args: Any,
    inputs_embeds: torch.Tensor | None = None,
    cache: Any = None,
    original: Callable,
    **kwargs: Any,
) -> Any:
    """Create a mask [batch, 1, length, slots] from the cache, which models use unchanged."""
    if attention_mask is None and cache is not None:
        like = _like(self, input_ids, inputs_embeds)
        own = getattr(cache, "self_attention_cache", cache)
        attention_mask = create_causal_mask(self.config, like, None, own)
    return original(self, input_ids, attention_mask, *args, inputs_embeds=inputs_embeds, **{CACHE: cache}, **kwargs)


def _opt_by_slots(
    self: PreTrainedModel,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    *,
    position_ids: torch.Tensor | None = None,
    cache: Any = None,
    inputs_embeds: torch.Tensor | None = None,
    original: Callable,
    **kwargs: Any,
) -> Any:
    """Create the mask and the positions, which OPT would count from its own mask."""
    if attention_mask is None and position_ids is None and cache is not None:
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        assert tokens is not None
        positions = cache.get_seq_length() + torch.arange(tokens.shape[1], device=tokens.device)
        position_ids = positions[None].expand(tokens.shape[:2])
    given = {"position_ids": position_ids, "inputs_embeds": inputs_embeds, "cache": cache}
    return _masked_by_slots(self, input_ids, attention_mask, original=original, **given, **kwargs)


_REASON = "it makes a mask as long as the sequence"


def _of_class(model: str, name: str, *digests: str) -> tuple[Patch, ...]:
    return (Patch(f"{model}.modeling_{model}", f"{name}.forward", only_traced(_masked_by_slots), _REASON, digests),)


_PIX2STRUCT = _of_class("pix2struct", "Pix2StructTextModel", "45cc7360d8ca6df6", "94a21c26fbad9c18", "ac4da68215c2d7af")


PATCHES = {
    "gemma4_unified": (
        Patch(
            "gemma4_unified.modeling_gemma4_unified",
            "Gemma4UnifiedModel.forward",
            over_our_cache(_masks_of_text),
            "it indexes images in its mask by the cache's length as a Python int",
            digests=("57d696e75d14b3cd", "726fdf5de4ce009d", "1c5f4ad1ee96792c"),
        ),
    ),
    "kosmos_2_text_model": (
        Patch(
            "kosmos2.modeling_kosmos2",
            "Kosmos2TextTransformer.forward",
            over_our_cache(_kosmos_text),
            "its attention mask covers the tokens of a step, not the cache's slots",
            digests=("29ece5e06bfbf7e0", "2c332000029f17b9", "ea7cae7e41b92b69"),
        ),
    ),
    "moshi": (
        Patch(
            "moshi.modeling_moshi",
            "MoshiModel.forward",
            over_our_cache(_mask_with_window),
            "its attention mask leaves out the sliding window",
            digests=("f7fccb74c229ebd8", "f803dd08c01a124c", "d86c88b43b7dae7a"),
        ),
    ),
    "kyutai_speech_to_text": (
        Patch(
            "kyutai_speech_to_text.modeling_kyutai_speech_to_text",
            "KyutaiSpeechToTextModel.forward",
            over_our_cache(_mask_with_window),
            "its attention mask leaves out the sliding window",
            digests=("f7fccb74c229ebd8", "f803dd08c01a124c", "d86c88b43b7dae7a"),
        ),
    ),
    "big_bird": _of_class("big_bird", "BigBirdModel", "3b2d700041772ed9", "87c436a64c8424d3", "e76a274ff0915c13"),
    "biogpt": _of_class("biogpt", "BioGptModel", "fad64a70caa3d5a5", "cdca3c4f2e215352", "a3728d00186c6d19"),
    "megatron-bert": _of_class(
        "megatron_bert", "MegatronBertModel", "08aaaa04d39b7bdf", "3b58f74cdb2aa20e", "7c0a90df27105274"
    ),
    "opt": (
        Patch(
            "opt.modeling_opt",
            "OPTDecoder.forward",
            only_traced(_opt_by_slots),
            _REASON,
            ("d43867d386c679c7", "a60e8286d39616ff", "282fd812a71e4c3b"),
        ),
    ),
    "pix2struct": _PIX2STRUCT,
    "pix2struct_text_model": _PIX2STRUCT,
    "rembert": _of_class("rembert", "RemBertModel", "6a1e8ec9f8cae378", "bc856660417c7e51", "9ed632a0eeb2ca5e"),
    "roformer": _of_class("roformer", "RoFormerModel", "e04b5f14baeefbcc", "10ce5af282bd3239", "d9e184bfced79f39"),
}
