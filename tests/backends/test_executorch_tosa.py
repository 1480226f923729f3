"""Programs for TOSA, verified by Arm's reference model where its package is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from exportable_cache import export, load
from exportable_cache.errors import BundleError, InputError

from ..support.models import tiny_model

pytest.importorskip("executorch", reason="the executorch extra is not installed")

from exportable_cache.backends.executorch.options import ExecutorchOptions

needs_tosa = pytest.mark.skipif(
    importlib.util.find_spec("tosa_reference_model") is None, reason="the tosa extra is not installed"
)


def test_the_static_form_is_required() -> None:
    with pytest.raises(InputError, match="form must be 'static' for delegate 'tosa', got 'resident'"):
        ExecutorchOptions(delegate="tosa")


@needs_tosa
def test_a_ring_is_right_past_its_window_and_runs_nowhere(tmp_path: Path) -> None:
    options: dict[str, Any] = {"delegate": "tosa", "form": "static", "prefill_chunk": 5}
    bundle = export(tiny_model("mistral", num_hidden_layers=1), "executorch", 32, tmp_path / "b", **options)
    found = bundle.manifest.verification
    assert found["passed"] and found["max_difference"] < 1e-5
    assert max(prompt["length"] for prompt in found["prompts"]) > 8
    with pytest.raises(BundleError, match="TOSABackend, which the ExecuTorch runtime of this machine lacks"):
        load(bundle.path)
