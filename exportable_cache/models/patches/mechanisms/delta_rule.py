"""The gated delta rule.

Per head it is of Qwen3-Next, Qwen3.5 and OLMo hybrid, per channel of Kimi Linear, GLM 5 Next and Bailing hybrid.
Their functions pad to whole chunks, which fixes the length of a traced step, and loop over every row of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ....common.patch import Patch
from ...scans import delta_rule


def _delta_rule(original: Callable) -> Callable:
    def chunk_delta_rule(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **kwargs: Any
    ) -> Any:
        if kwargs.get("initial_state") is None or not torch.compiler.is_compiling():
            return original(query, key, value, g=g, beta=beta, **kwargs)
        output, state = delta_rule(
            query, key, value, g, beta, kwargs["initial_state"], normalize=kwargs.get("use_qk_l2norm_in_kernel", False)
        )
        return output, state if kwargs.get("output_final_state") else None

    return chunk_delta_rule


#: Every modeling file with one of these functions has a copy of its own.
COPIED = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")

_REASON = (
    "its delta rule pads to whole chunks, which fixes the length of a traced step, and loops over the rows of each"
)


def _of_file(model: str, function: str, *digests: str) -> tuple[Patch, ...]:
    return (Patch(f"{model}.modeling_{model}", function, _delta_rule, _REASON, digests),)


PATCHES = {
    "bailing_hybrid": _of_file("bailing_hybrid", "chunk_kimi_delta_attention", "71d597c214685c9f"),
    "glm5_next": _of_file("glm5_next", "chunk_kimi_delta_attention", "71d597c214685c9f"),
    "glm5_next_text": _of_file("glm5_next", "chunk_kimi_delta_attention", "71d597c214685c9f"),
    "kimi_linear": _of_file("kimi_linear", "chunk_kimi_delta_attention", "71d597c214685c9f"),
    "olmo_hybrid": _of_file("olmo_hybrid", "torch_chunk_gated_delta_rule", "907bbba3ffc5bf47", "e4e4df965ab934a6"),
    "qwen3_5": _of_file("qwen3_5", "torch_chunk_gated_delta_rule", "907bbba3ffc5bf47", "e4e4df965ab934a6"),
    "qwen3_5_text": _of_file("qwen3_5", "torch_chunk_gated_delta_rule", "907bbba3ffc5bf47", "e4e4df965ab934a6"),
    "qwen3_5_moe": _of_file("qwen3_5_moe", "torch_chunk_gated_delta_rule", "907bbba3ffc5bf47", "e4e4df965ab934a6"),
    "qwen3_5_moe_text": _of_file("qwen3_5_moe", "torch_chunk_gated_delta_rule", "907bbba3ffc5bf47", "e4e4df965ab934a6"),
    "qwen3_next": _of_file("qwen3_next", "torch_chunk_gated_delta_rule", "907bbba3ffc5bf47", "e4e4df965ab934a6"),
    "qwen4_exp": _of_file("qwen4_exp", "torch_chunk_gated_delta_rule", "907bbba3ffc5bf47", "e4e4df965ab934a6"),
    "qwen4_exp_text": _of_file("qwen4_exp", "torch_chunk_gated_delta_rule", "907bbba3ffc5bf47", "e4e4df965ab934a6"),
}
