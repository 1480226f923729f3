"""Models that create tensors on the CPU, or from Python lists, in every step; they create them on the device instead.

| function | models | tensor | upstream (v5.23.0, src/transformers/models) |
|---|---|---|---|
| `ChameleonForConditionalGeneration` | Chameleon | image tokens, from a list | chameleon/modeling_chameleon.py |
| `FalconAttention._split_heads` | Falcon | indices, from lists | falcon/modeling_falcon.py |
| `Gemma3nTextMLP._gaussian_topk` | Gemma 3n | a quantile, from a number | gemma3n/modeling_gemma3n.py |
| `_mask_local_attention_mask`, `_make_global_fixed_block_ids` | LongT5 | positions | longt5/modeling_longt5.py |
| `PhimoeRotaryEmbedding.forward` | PhiMoE | frequencies | phimoe/modeling_phimoe.py |
| `get_rel_pos` | SAM's vision towers | positions | sam/modeling_sam.py, ... |

On a GPU each is a copy in every step, which kernel launches wait for and which CUDA graphs cannot capture. On a CPU the
originals run, also under a tracer. No issue or pull request of transformers was found about them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from ....common.patch import Patch
from ..conditions import CACHE, kept_hidden_states
from .rope import phimoe_by_lengths

if TYPE_CHECKING:
    from torch import nn


def off_cpu(replacement: Callable) -> Callable[[Callable], Callable]:
    """Create a patch of a function that applies if its first tensor is not on the CPU.

    Args:
        replacement: Function with the same arguments, and the function itself as `original`.
    """

    def patch(original: Callable) -> Callable:
        def function(*args: Any, **kwargs: Any) -> Any:
            tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
            if tensors and tensors[0].device.type != "cpu":
                return replacement(*args, original=original, **kwargs)
            return original(*args, **kwargs)

        return function

    return patch


def _chameleon(
    self: Any,
    input_ids: torch.Tensor | None = None,
    *args: Any,
    labels: torch.Tensor | None = None,
    logits_to_keep: int | torch.Tensor = 0,
    original: Callable,
    **kwargs: Any,
) -> Any:
    if args or labels is not None or "return_dict" in kwargs:
        return original(self, input_ids, *args, labels=labels, logits_to_keep=logits_to_keep, **kwargs)
    outputs = self.model(input_ids=input_ids, **kwargs)
    logits = self.lm_head(kept_hidden_states(outputs.last_hidden_state, logits_to_keep))
    return CausalLMOutputWithPast(
        logits=logits.index_fill(-1, self.image_token_ids, torch.finfo(logits.dtype).min),
        **{CACHE: getattr(outputs, CACHE)},
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
    )


def _keep_image_tokens(model: nn.Module) -> None:
    """Register the image tokens as a buffer, because buffers move with the model."""
    for module in model.modules():
        if type(module).__name__ == "ChameleonForConditionalGeneration" and not hasattr(module, "image_token_ids"):
            chameleon: Any = module
            tokens = chameleon.model.vocabulary_mapping.image_tokens
            ids = torch.tensor(tokens, dtype=torch.int64, device=chameleon.device)
            chameleon.register_buffer("image_token_ids", ids, persistent=False)


def _falcon_heads(self: Any, fused_qkv: torch.Tensor, *, original: Callable) -> tuple[torch.Tensor, ...]:
    """Split queries, keys and values [batch, length, heads, head_dim]; multi-query keys and values have one head."""
    batch, length = fused_qkv.shape[:2]
    if self.new_decoder_architecture:
        fused = fused_qkv.view(batch, length, -1, self.num_heads // self.num_kv_heads + 2, self.head_dim)
        query = fused[:, :, :, :-2]
        key, value = (fused[:, :, :, at : at + 1].expand_as(query) for at in (query.shape[3], query.shape[3] + 1))
        return query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3)
    if not self.multi_query:
        return original(self, fused_qkv)
    fused = fused_qkv.view(batch, length, self.num_heads + 2, self.head_dim)
    return fused[..., :-2, :], fused[..., -2:-1, :], fused[..., -1:, :]


def _gaussian_topk(self: Any, inputs: torch.Tensor, *, original: Callable) -> torch.Tensor:
    sparsity = torch.full((), self.activation_sparsity, dtype=torch.float32, device=inputs.device)
    # As `torch.distributions.Normal(0, 1).icdf`, which reads values to check them.
    quantile = (torch.erfinv(2 * sparsity - 1) * math.sqrt(2)).type(inputs.dtype)
    mean = torch.mean(inputs, dim=-1, keepdim=True)
    deviation = torch.std(inputs, dim=-1, keepdim=True, unbiased=False)
    return torch.relu(inputs - (mean + deviation * quantile))


def _local_mask(local_attention_mask: torch.Tensor, block_len: int, *, original: Callable) -> torch.Tensor:
    """Restrict a mask [batch, blocks, block_len, 3 * block_len] to distances below `block_len`."""
    positions = torch.arange(3 * block_len, dtype=torch.int32, device=local_attention_mask.device)
    distances = positions[None] - positions[block_len:-block_len, None]
    return torch.logical_and(local_attention_mask, (distances.abs() < block_len)[None, None])


def _global_blocks(
    attention_mask: torch.Tensor, global_block_size: int, *, original: Callable
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the block of each token [batch, length], -1 for padding, and 1 for used blocks [batch, blocks]; int32.

    Tokens after the last whole block belong to that block.
    """
    batch_size, length = attention_mask.shape
    dtype, device = attention_mask.dtype, attention_mask.device
    share = torch.ones_like(attention_mask) / global_block_size
    before = torch.cumsum(share, dim=1) - share
    real = torch.where(attention_mask != 0.0, 1.0, -1000.0).type(dtype)
    blocks = torch.floor(real + before - 1.0).type(dtype).clamp(min=-1)
    blocks = blocks * attention_mask + (attention_mask - 1)
    ends = torch.arange(length, device=device) % global_block_size == global_block_size - 1
    last = torch.logical_and(ends, blocks >= 0).sum(-1, keepdim=True).type(dtype) - 1
    blocks = torch.where(blocks < last, blocks, last)
    count = length // global_block_size
    if count == 0:
        return blocks.type(torch.int), torch.zeros(batch_size, 0, dtype=torch.int, device=device)
    there = torch.arange(count, device=device) <= torch.max(blocks, dim=-1, keepdim=True).values
    return blocks.type(torch.int), there.type(torch.int)


def _phimoe(
    self: Any, x: torch.Tensor, position_ids: torch.Tensor | None = None, *, original: Callable
) -> tuple[torch.Tensor, torch.Tensor]:
    if position_ids is None or self.config.rope_parameters["rope_type"] != "default":
        return original(self, x, position_ids)
    dim = getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads
    # Computed in float32 as upstream, because the buffer has the model's dtype.
    exponents = torch.arange(0, dim, 2, dtype=torch.float, device=x.device) / dim
    angles = position_ids[..., None].float() * (1.0 / (self.config.rope_parameters["rope_theta"] ** exponents))
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _relative_positions(
    self: Any, q_size: int, k_size: int, rel_pos: torch.Tensor, *, original: Callable
) -> torch.Tensor:
    """Return embeddings [q_size, k_size, dim] of the distances between positions, from a table [distances, dim]."""
    most = int(2 * max(q_size, k_size) - 1)
    table = rel_pos.reshape(1, rel_pos.shape[0], -1).transpose(1, 2)
    table = torch.nn.functional.interpolate(table, size=most, mode="linear").reshape(-1, most).permute(1, 0)
    wider, higher = max(k_size / q_size, 1.0), max(q_size / k_size, 1.0)
    query = torch.arange(q_size, device=rel_pos.device)[:, None] * wider
    key = torch.arange(k_size, device=rel_pos.device)[None, :] * higher
    return table[(query - key + (k_size - 1) * higher).long()]


def _phimoe_forward(original: Callable) -> Callable:
    return phimoe_by_lengths(off_cpu(_phimoe)(original))


_REASON = "it creates a tensor on the CPU, or from a list, in every step, and copies it to the GPU"


def _on_device(model: str, name: str, replacement: Callable, *digests: str) -> Patch:
    return Patch(f"{model}.modeling_{model}", name, off_cpu(replacement), _REASON, digests, needed=False)


def _tower(model: str, owner: str) -> tuple[Patch, ...]:
    return (_on_device(model, f"{owner}.get_rel_pos", _relative_positions, "e2f5b9984d407b64"),)


PREPARATIONS = {"chameleon": ("", _keep_image_tokens)}

PATCHES = {
    "chameleon": (
        _on_device(
            "chameleon",
            "ChameleonForConditionalGeneration.forward",
            _chameleon,
            "4139847aa06ee476",
            "b66091c0596a71c1",
            "6963a8c3718d2d78",
        ),
    ),
    "deepseek_ocr2": _tower("deepseek_ocr2", "DeepseekOcr2SamVisionAttention"),
    "falcon": (_on_device("falcon", "FalconAttention._split_heads", _falcon_heads, "cb157de061155926"),),
    "gemma3n_text": (_on_device("gemma3n", "Gemma3nTextMLP._gaussian_topk", _gaussian_topk, "3de73d43cd646f3f"),),
    "got_ocr2": _tower("got_ocr2", "GotOcr2VisionAttention"),
    "longt5": (
        _on_device("longt5", "_mask_local_attention_mask", _local_mask, "a6b9ada9da3d7cdc"),
        _on_device("longt5", "_make_global_fixed_block_ids", _global_blocks, "0481dacc1cf2b130"),
    ),
    "phimoe": (
        Patch(
            "phimoe.modeling_phimoe",
            "PhimoeRotaryEmbedding.forward",
            _phimoe_forward,
            _REASON,
            ("b9c85539c82b68e8", "abfb30d6df52d9eb"),
            needed=False,
        ),
    ),
    "pp_formulanet": _tower("pp_formulanet", "PPFormulaNetVisionAttention"),
    "unlimited_ocr": _tower("unlimited_ocr", "UnlimitedOcrSamVisionAttention"),
}
