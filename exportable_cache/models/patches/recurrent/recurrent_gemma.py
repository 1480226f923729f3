"""RecurrentGemma: its recurrent blocks keep states on the module, and each prompt starts from zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from ....common.patch import Patch
from ...scans import linear_recurrence
from ..conditions import over_our_cache

if TYPE_CHECKING:
    from torch import nn
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import (
        RecurrentGemmaModel,
        RecurrentGemmaRecurrentBlock,
        RecurrentGemmaRglru,
    )


def _recurrent_block(
    self: RecurrentGemmaRecurrentBlock,
    input_states: torch.Tensor,
    position_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    cache: Any = None,
    *,
    original: Callable,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Run the recurrent block of Griffin (arXiv:2402.19427) with its states in the cache."""
    assert self.lru_width is not None
    gate = self.act_fn(self.linear_y(input_states))
    branch = self.linear_x(input_states).transpose(1, 2)
    branch = cache.update_conv_state(branch, self.layer_idx, conv_kernel_size=self.conv1d_width - 1)
    # Padded with zeros, because a probe cache returns only the new tokens.
    branch = F.pad(branch, (self.conv1d_width - 1 + input_states.shape[1] - branch.shape[2], 0))
    branch = F.conv1d(branch, self.conv_1d.weight, self.conv_1d.bias, groups=self.lru_width).transpose(1, 2)
    initial = cache.get_recurrent_state(self.layer_idx)
    if initial is None:
        initial = torch.zeros(branch.shape[0], self.lru_width, dtype=torch.float32, device=branch.device)
    decay, inputs = _gated(self.rg_lru, branch, position_ids)
    states = linear_recurrence(decay, inputs, initial)
    cache.update_recurrent_state(states[:, -1], self.layer_idx)
    return self.linear_out(states.to(branch.dtype) * gate), None


def _gated(
    self: RecurrentGemmaRglru, branch: torch.Tensor, position_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return decays and inputs of the recurrence in float32, [batch, length, width] (section 2.4 of the paper).

    The first token of a sequence has decay 0, and is not scaled.
    """
    batch_size, length, width = branch.shape
    heads = branch.reshape(batch_size * length, self.num_attention_heads, self.block_width).transpose(0, 1)
    input_gate, recurrent_gate = (
        torch.sigmoid(torch.baddbmm(bias[:, None], heads, weight)).transpose(0, 1).reshape(batch_size, length, width)
        for weight, bias in (
            (self.input_gate_weight, self.input_gate_bias),
            (self.recurrent_gate_weight, self.recurrent_gate_bias),
        )
    )
    log_decay = -8.0 * recurrent_gate * F.softplus(self.recurrent_param)
    is_first = (position_ids == 0)[..., None]
    scale = torch.where(is_first, 1.0, torch.sqrt(1 - torch.exp(2 * log_decay)))
    decay = torch.where(is_first, 0.0, torch.exp(log_decay))
    return decay.float(), (branch * input_gate * scale.to(branch.dtype)).float()


def _set_layer_indices(model: nn.Module) -> None:
    """Set the layer index of each block, because upstream sets only that of attention blocks."""
    blocks: list[Any] = [module.temporal_block for module in model.modules() if hasattr(module, "temporal_block")]
    for index, block in enumerate(blocks):
        block.layer_idx = index


def _with_layer_indices(self: RecurrentGemmaModel, *args: Any, original: Callable, **kwargs: Any) -> Any:
    """Set layer indices of a model that did not pass `patch_model`, because its cache was loaded."""
    if not all(hasattr(layer.temporal_block, "layer_idx") for layer in self.layers):
        _set_layer_indices(self)
    return original(self, *args, **kwargs)


#: Model type -> label, and a function that prepares the modules of a model.
PREPARATIONS = {"recurrent_gemma": ("RecurrentGemmaRecurrentBlock", _set_layer_indices)}

PATCHES = {
    "recurrent_gemma": (
        Patch(
            "recurrent_gemma.modeling_recurrent_gemma",
            "RecurrentGemmaModel.forward",
            over_our_cache(_with_layer_indices),
            "its recurrent blocks have no layer index",
            digests=("02ab8dca9f32dca8", "c4f52fc6f6ef8018", "fcfa02323a6126af"),
        ),
        Patch(
            "recurrent_gemma.modeling_recurrent_gemma",
            "RecurrentGemmaRecurrentBlock.forward",
            over_our_cache(_recurrent_block),
            "it keeps its states on the module, and each prompt starts from zeros",
            digests=("92ab2ec1de7732a8",),
            source="RecurrentGemmaRecurrentBlock",
        ),
    )
}
