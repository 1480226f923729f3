"""Gemma 4 unified, Kosmos-2 and Moshi: they make masks that a static cache cannot use, or leave the window out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from ....common.patch import Patch
from ....errors import UnsupportedModelError
from ..conditions import over_our_cache


def _like(self: Any, input_ids: Any, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
    """[batch, length, 0]: of embeddings a mask has the first two sizes, the dtype and the device."""
    tokens = input_ids if inputs_embeds is None else inputs_embeds
    return torch.empty(*tokens.shape[:2], 0, dtype=self.dtype, device=tokens.device)


def _masks_of_text(
    self: Any,
    input_ids: torch.Tensor | None = None,
    *args: Any,
    attention_mask: Any = None,
    inputs_embeds: torch.Tensor | None = None,
    mm_token_type_ids: torch.Tensor | None = None,
    past_key_values: Any = None,
    original: Callable,
    **kwargs: Any,
) -> Any:
    """Masks by layer type of a step of text; those of pictures come prepared (`program.inputs.image_masks`)."""
    if mm_token_type_ids is not None:
        raise UnsupportedModelError(
            "mm_token_type_ids over a static cache: the model looks pictures up by an offset that it takes for a "
            "number; pass the masks by layer type as attention_mask, or use DynamicCache"
        )
    if not isinstance(attention_mask, dict):
        arguments = {
            "config": self.config.get_text_config(),
            "inputs_embeds": _like(self, input_ids, inputs_embeds),
            "attention_mask": attention_mask,
            "past_key_values": past_key_values,
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
        past_key_values=past_key_values,
        **kwargs,
    )


def _mask_with_window(
    self: Any,
    input_ids: torch.Tensor | None = None,
    attention_mask: Any = None,
    *args: Any,
    inputs_embeds: torch.Tensor | None = None,
    past_key_values: Any = None,
    original: Callable,
    **kwargs: Any,
) -> Any:
    """The mask of a ring, which the model takes as it is."""
    if attention_mask is None or attention_mask.dim() == 2:
        attention_mask = create_sliding_window_causal_mask(
            self.config, _like(self, input_ids, inputs_embeds), attention_mask, past_key_values
        )
    return original(
        self, input_ids, attention_mask, *args, inputs_embeds=inputs_embeds, past_key_values=past_key_values, **kwargs
    )


def _kosmos_text(
    self: Any,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    image_embeds: torch.Tensor | None = None,
    image_embeds_position_mask: torch.Tensor | None = None,
    *,
    past_key_values: Any,
    inputs_embeds: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    original: Callable,
    **kwargs: Any,
) -> BaseModelOutputWithPastAndCrossAttentions:
    """Positions count from behind the padding index, tokens of padding left out; the mask covers the slots."""
    table, past = self.embed_positions, past_key_values.get_seq_length()
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
    mask = create_causal_mask(self.config, hidden_states, attention_mask, past_key_values)
    for layer in self.layers:
        hidden_states = layer(hidden_states, mask, past_key_values=past_key_values, use_cache=True)
    return BaseModelOutputWithPastAndCrossAttentions(
        last_hidden_state=self.layer_norm(hidden_states), past_key_values=past_key_values
    )


PATCHES = {
    "gemma4_unified": (
        Patch(
            "gemma4_unified.modeling_gemma4_unified",
            "Gemma4UnifiedModel.forward",
            over_our_cache(_masks_of_text),
            "it looks up pictures in its mask by an offset that it takes for a number",
            digests=(
                "57d696e75d14b3cd",
                "726fdf5de4ce009d",
            ),
        ),
    ),
    "kosmos_2_text_model": (
        Patch(
            "kosmos2.modeling_kosmos2",
            "Kosmos2TextTransformer.forward",
            over_our_cache(_kosmos_text),
            "its attention mask covers the tokens of a step, not the cache's slots",
            digests=(
                "29ece5e06bfbf7e0",
                "2c332000029f17b9",
            ),
        ),
    ),
    "moshi": (
        Patch(
            "moshi.modeling_moshi",
            "MoshiModel.forward",
            over_our_cache(_mask_with_window),
            "its attention mask leaves out the sliding window",
            digests=(
                "f7fccb74c229ebd8",
                "f803dd08c01a124c",
            ),
        ),
    ),
    "kyutai_speech_to_text": (
        Patch(
            "kyutai_speech_to_text.modeling_kyutai_speech_to_text",
            "KyutaiSpeechToTextModel.forward",
            over_our_cache(_mask_with_window),
            "its attention mask leaves out the sliding window",
            digests=("f7fccb74c229ebd8", "f803dd08c01a124c"),
        ),
    ),
}
