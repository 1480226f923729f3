"""Our files, opened without this package by what they were made for: the lines that `inspect` prints do it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from exportable_cache import load
from exportable_cache.cli.app import app

from ..support.forked import run_python


def _printed(folder: Path) -> list[str]:
    shown = CliRunner().invoke(app, ["inspect", str(folder)]).stdout
    return [line.strip() for line in shown.partition("without this package, in Python:")[2].splitlines() if line]


def _run(folder: Path, *lines: str) -> str:
    script = "\n".join([*lines, "import sys", "assert 'exportable_cache' not in sys.modules"])
    ran = run_python(script, cwd=folder)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()[-1]


# The same lines, from inside the file: backends/test_pt2.py.
@pytest.mark.full
def test_torch_opens_a_pt2(pt2_bundle: Path) -> None:
    expected = load(pt2_bundle).prefill(torch.tensor([[5, 6, 7]])).argmax().item()
    found = _run(
        pt2_bundle,
        "import torch",
        *_printed(pt2_bundle),
        "run = {name: program.module() for name, program in programs.items()}",
        "run['prefill'](torch.tensor([[5, 6]]), torch.tensor([0]))",
        "print(run['decode'](torch.tensor([[7]]), torch.tensor([2])).argmax().item())",
    )
    assert int(found) == expected


# In the fast lane ExecuTorch's own runner opens one: backends/test_executorch_llm_runner.py.
@pytest.mark.full
def test_executorch_opens_a_pte(demo_bundle: Path) -> None:
    pytest.importorskip("executorch")
    expected = load(demo_bundle).prefill(torch.tensor([[5, 6, 7]])).argmax().item()
    found = _run(
        demo_bundle,
        "import torch, executorch.runtime",
        *_printed(demo_bundle),
        "print(methods['forward'].execute([torch.tensor([[5, 6, 7]]), torch.tensor([0])])[0].argmax().item())",
    )
    assert int(found) == expected
