"""Unlimited OCR: its mask reads the prompt's length from its cache layers as a Python int."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import create_causal_mask

from ....cache.layers import PromptLayer
from ....cache.policies import PromptPolicy
from ....common.patch import Patch
from ..conditions import CACHE


def _reference_mask(original: Callable) -> Callable:
    def create_reference_sliding_window_causal_mask(*args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get(CACHE)
        numbered = enumerate(getattr(cache, "layers", ()))
        index, layer = next((one for one in numbered if isinstance(one[1], PromptLayer)), (0, None))
        if layer is None:
            return original(*args, **kwargs)
        prompt, policy = layer.prompt_after(kwargs["inputs_embeds"].shape[1]), layer.policy
        assert isinstance(policy, PromptPolicy)

        def seen(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return (key < prompt[batch]) | (key > query - policy.window)

        return create_causal_mask(**kwargs, and_mask_function=seen, layer_idx=index)

    return create_reference_sliding_window_causal_mask


_PATCHES = (
    Patch(
        "unlimited_ocr.modeling_unlimited_ocr",
        "create_reference_sliding_window_causal_mask",
        _reference_mask,
        "its mask reads the prompt's length from its cache layers as a Python int",
        digests=("19288d3c8848cebb", "e1dc271d48cd751e"),
    ),
)
PATCHES = {"unlimited_ocr": _PATCHES, "unlimited_ocr_text": _PATCHES}
