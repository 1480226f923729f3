"""Every family in half precision, by the evaluator alone: prompts around the window and 24 steps after each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("exportable_cache.backends.tensorrt.upstream", reason="no tensorrt extra is installed")

from ..programs import PREFILL

# All experts at once: which of two equal scores wins decides between other numbers, in eager bfloat16 already.
EVERY_EXPERT: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_experts_per_tok": 4},
    "mixtral": {"num_experts_per_tok": 4},
    "deepseek_v3": {"num_experts_per_tok": 4, "topk_group": 2},
}
FAMILIES = ("llama", "mistral", "gemma3_text", "qwen3", "gpt_oss", "deepseek_v3", "mixtral")
# Neither is a length that tracing used, and the second goes through in several chunks.
PROMPTS = (5, PREFILL + 4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_family_in_half_precision(family: str, dtype: torch.dtype) -> None:
    """As near to the model in float32 as the model in half precision is; to each other they may be twice as far."""
    from benchmarks.tensorrt_precision import logits_of

    network, eager, exact = logits_of(family, dtype, range(2))
    assert rms(network - exact) <= 1.25 * rms(eager - exact)
    assert rms(network - eager) <= 2 * rms(eager - exact)


def rms(difference: torch.Tensor) -> float:
    return difference.square().mean().sqrt().item()
