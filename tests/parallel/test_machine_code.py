"""Machine code for each of two processes, of families whose weights are split in ways of their own.

A Llama's is in test_programs.py, with its files, states and the command line.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from exportable_cache import export

from .checks import CAPACITY
from .test_families import family

pytestmark = pytest.mark.full


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gemma3_text", "qwen3_next"])
def test_logits_past_the_window(name: str, tmp_path: Path) -> None:
    options = {"max_cache_len": CAPACITY, "prefill_chunk": 16, "tensor_parallel": 2}
    bundle = export(family(name), target="aoti", output_dir=tmp_path / "bundle", **options)
    assert bundle.manifest.verification["max_difference"] < 1e-4
