"""Rows of different length in one batch, left-padded or each at its own position, equal each row alone."""

from typing import Any

import pytest
import torch

from exportable_cache import ExportableCache
from exportable_cache.common.compat.transformers import cache_argument
from exportable_cache.decoding import ContinuousBatch

from .support.models import tiny_model, tokens
from .support.oracle import reference_logits

TOLERANCE = 1e-4
LENGTHS = (4, 9, 14)
STEPS = 20
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "gemma3_text": {},
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
}


def rows_of(family: str) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
    """A model, three sequences of different prompt lengths, and the logits of each row alone after every step."""
    model = tiny_model(family, **FAMILIES[family])
    ids = [tokens(length + STEPS, seed=length) for length in LENGTHS]
    return model, ids, [reference_logits(model, row, length)[0] for row, length in zip(ids, LENGTHS, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_left_padded_rows_equal_each_row_alone(family: str) -> None:
    model, ids, references = rows_of(family)
    longest = max(LENGTHS)
    prompt = torch.zeros(3, longest, dtype=torch.int64)
    mask = torch.zeros(3, longest + STEPS, dtype=torch.int64)
    for row, length in enumerate(LENGTHS):
        prompt[row, longest - length :] = ids[row][0, :length]
        mask[row, longest - length :] = 1
    cache = ExportableCache.from_model(model, longest + STEPS, batch_size=3)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    takes = {"position_ids"} if family != "mamba2" else set()

    def feed(part: torch.Tensor, start: int) -> torch.Tensor:
        end = start + part.shape[1]
        options = {"position_ids": positions[:, start:end]} if takes else {}
        options[cache_argument(model)] = cache
        return model(part, attention_mask=mask[:, :end], use_cache=True, **options).logits[:, -1]

    logits = feed(prompt, 0)
    for step in range(STEPS):
        for row, reference in enumerate(references):
            assert (logits[row] - reference[step]).abs().max() <= TOLERANCE, (row, step)
        token = torch.stack([ids[row][0, length + step] for row, length in enumerate(LENGTHS)])
        logits = feed(token[:, None], longest + step)


@pytest.mark.parametrize(
    ("family", "compile"),
    [
        *((family, False) for family in FAMILIES),
        # In the fast lane rows are compiled in decoding/test_batching.py, and give the tokens of eager ones.
        pytest.param("gemma3_text", True, marks=pytest.mark.full),
        pytest.param("mamba2", True, marks=pytest.mark.full),
    ],
)
def test_ragged_rows_equal_each_row_alone(family: str, compile: bool) -> None:
    """Each row at a length of its own, teacher-forced through the decode session of a continuous batch."""
    model, ids, references = rows_of(family)
    batch = ContinuousBatch.from_model(model, 48, 3, prefill_chunk=16, compile=compile, buckets=False)
    # All prompts are fed in one step, on a slow machine too.
    batch.pacing.gap = 3600
    for row, length in enumerate(LENGTHS):
        batch.submit(ids[row][:, :length], STEPS)
    batch.step()
    assert batch.decode.length.tolist() == list(LENGTHS)
    for step in range(STEPS):
        token = torch.stack([ids[row][0, length + step] for row, length in enumerate(LENGTHS)])
        logits = batch.decode.decode(token)
        for row, reference in enumerate(references):
            assert (logits[row] - reference[step + 1]).abs().max() <= TOLERANCE, (row, step)
