"""Attention masks in which the tokens of an image see each other in both directions (Gemma 3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask, sliding_window_overlay

from ...common.compat.transformers import cache_name

if TYPE_CHECKING:
    import torch
    from torch.nn.attention.flex_attention import BlockMask
    from transformers import PreTrainedConfig

    from ...models.cache_factory import ExportableCache

    _Mask: TypeAlias = torch.Tensor | BlockMask | None


def image_masks(
    config: PreTrainedConfig,
    inputs_embeds: torch.Tensor,
    cache: ExportableCache,
    image_ids: torch.Tensor,
    input_pos: torch.Tensor,
    sees: str,
) -> dict[str, _Mask] | _Mask:
    """Return the masks of one step by layer type, for the decoder's `attention_mask` argument.

    The rules are those of transformers' `create_masks_for_vision_model` (gemma3/modeling_gemma3.py, 5.23): full
    attention sees what came before or is of the same image, sliding attention the same within its window, which ends at
    the query's past only. Transformers looks images up by absolute position in ids of the whole sequence; here by
    position in the step.

    Args:
        config: Config of the text decoder.
        inputs_embeds: [batch, length, hidden_size].
        cache: The cache before the step.
        image_ids: int64 [batch, length], an index per image, -1 on text. An image never spans two steps.
        input_pos: int64 [batch], the position of each row's first token.
        sees: See `ItemFacts.sees`; "sliding item" leaves full attention causal (gemma4/modeling_gemma4.py), and "whole
            item" applies the window to earlier tokens only (gemma4_unified/modeling_gemma4_unified.py).
    """
    arguments: dict[str, Any] = {
        "config": config,
        "inputs_embeds": inputs_embeds,
        "attention_mask": None,
        cache_name(): cache,
    }
    same = _of_same_image(image_ids, input_pos)
    full = None if sees == "sliding item" else same
    masks = {"full_attention": create_causal_mask(**arguments, position_ids=None, or_mask_function=full)}
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        index = config.layer_types.index("sliding_attention")
        if sees == "whole item":
            # Its window is part of the causal mask, so it does not limit `or_mask_function`.
            masks["sliding_attention"] = create_sliding_window_causal_mask(
                **arguments, position_ids=None, or_mask_function=same, layer_idx=index
            )
        else:
            masks["sliding_attention"] = create_causal_mask(
                **arguments,
                position_ids=None,
                or_mask_function=same,
                and_mask_function=sliding_window_overlay(config.sliding_window),
                layer_idx=index,
            )
    # Models with one layer type take a single mask.
    return masks if getattr(config, "layer_types", None) else masks["full_attention"]


def _of_same_image(image_ids: torch.Tensor, input_pos: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return a mask function over absolute positions: True if query and key are tokens of one image of this step."""
    length = image_ids.shape[1]
    start = input_pos[:, None, None, None]

    def mask_function(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        query, key = query - start, key - start
        of_query = image_ids[batch, query.clamp(0, length - 1)]
        of_key = image_ids[batch, key.clamp(0, length - 1)]
        # Excludes slots of earlier steps and empty slots.
        return (of_query >= 0) & (of_query == of_key) & (key >= 0) & (key < length)

    return mask_function
