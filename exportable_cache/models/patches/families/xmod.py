"""X-MOD: its adapters select the rows of each language, whose number depends on data."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ....common.patch import Patch
from ..conditions import only_traced

if TYPE_CHECKING:
    from transformers.models.xmod.modeling_xmod import XmodOutput


def _language_adapter(
    self: XmodOutput,
    hidden_states: torch.Tensor,
    input_tensor: torch.Tensor,
    lang_ids: torch.Tensor,
    *,
    original: Callable,
) -> torch.Tensor:
    summed = self.dropout(self.dense(hidden_states)) + input_tensor
    normed = summed
    if self.adapter_layer_norm is not None:
        normed = self.adapter_layer_norm(summed)
    elif self.adapter_reuse_layer_norm:
        normed = self.LayerNorm(summed)
    adapted = torch.zeros_like(normed)
    for index, adapter in enumerate(self.adapter_modules.values()):
        adapted = torch.where((lang_ids == index).view(-1, 1, 1), adapter(normed), adapted)
    return self.dropout(adapted) + (normed if self.ln_before_adapter else summed)


PATCHES = {
    "xmod": (
        Patch(
            "xmod.modeling_xmod",
            "XmodOutput.forward",
            only_traced(_language_adapter),
            "it selects the rows of each language",
            digests=("a10dccd5877e4eb2",),
            source="XmodOutput",
        ),
    )
}
