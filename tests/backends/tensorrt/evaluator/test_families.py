"""Every family in half precision, by the evaluator alone: prompts around the window and 24 steps after each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from exportable_cache.verify import verify_session

pytest.importorskip("exportable_cache.backends.tensorrt.upstream", reason="no tensorrt extra is installed")

from exportable_cache.backends.tensorrt.target import engine_networks

from ..models import engine_model
from ..programs import PREFILL, network_session, program_of

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
    model = engine_model(family, dtype, **EVERY_EXPERT.get(family, {}))
    program = program_of(model)
    session = network_session(model, program, engine_networks(program, {}))
    report = verify_session(session, model, prompts=PROMPTS)
    assert report.passed, str(report)
    assert all(prompt.decode_steps >= 24 for prompt in report.prompts)
