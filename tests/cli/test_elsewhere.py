"""The lines that open bundles without this package: those of `inspect`, and of docs/bundles.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from exportable_cache.bundle.bundle import Bundle
from exportable_cache.cli.inspect import opened_elsewhere
from exportable_cache.models.quantization.spec import Quantization

from ..support.forked import run_python
from ..support.models import tiny_model
from ..support.sessions import PREFILL, exported_bundle, folded_bundle, lowered, quantized_model, split_bundle

DOCUMENT = Path(__file__).parents[2] / "docs" / "bundles.md"


def of_document(word: str) -> list[str]:
    """Lines of the one block of the document that has this word in it."""
    found = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    (block,) = (block for block in found if word in block)
    return block.splitlines()


def run(lines_by_folder: list[tuple[Path, list[str]]], last: str) -> None:
    """Run each bundle's lines in its folder, in one process without this package."""
    code = ["import os, sys"]
    for folder, lines in lines_by_folder:
        code += [f"os.chdir({str(folder)!r})", *lines, last]
    code.append("assert 'exportable_cache' not in sys.modules")
    done = run_python("\n".join(code), cwd="/", timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


def test_executorch_programs_open_by_these_lines(run_inspect) -> None:
    pytest.importorskip("executorch", reason="the executorch extra is not installed")
    # As `test_executorch_quantized.py` lowers it: with operators that only the second line of imports registers.
    quantized = lowered(quantized_model(Quantization("8da4w", 32, "8w"), tied=True).model, "executorch", 64).folder
    lines = [(folder, run_inspect(folder)) for folder in (split_bundle()[1], folded_bundle(llm_runner=True)[1])]
    assert "'prefill'" in lines[0][1][-1] and "'decode'" in lines[0][1][-1]
    assert all(found[:2] == of_document("Runtime")[:2] for _, found in lines)
    run([(quantized, of_document("Runtime")), *lines], "assert methods and all(methods.values()), methods")


def test_exported_programs_open_by_these_lines(run_inspect) -> None:
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    options = {"prefill_chunk": 4, "verify": False}
    bundles = [
        exported_bundle(tiny_model("llama", **small), "pt2", **options, **more)
        for more in ({"quantize": "8w"}, {"form": "explicit"})
    ]
    # As other files export it.
    plain = exported_bundle(tiny_model("llama"), "pt2", prefill_chunk=PREFILL)
    lines = [(folder, run_inspect(folder)) for folder in bundles]
    run([*lines, (plain, of_document("load_pt2"))], "assert {'decode', 'prefill', 'model'} <= set(programs)")


def test_what_no_other_loader_opens_has_no_lines() -> None:
    def lines_of(target: str, options: dict) -> list[str]:
        manifest = Bundle.open(folded_bundle(llm_runner=True)[1]).manifest
        return opened_elsewhere(manifest.model_copy(update={"target": target, "options": options}))

    assert lines_of("executorch", {})
    for target, options in (("aoti", {}), ("tensorrt", {}), ("executorch", {"delegate": "vulkan"})):
        assert lines_of(target, options) == []


@pytest.fixture
def run_inspect():
    """`run_inspect(folder)` -> the lines that the command prints."""
    from typer.testing import CliRunner

    from exportable_cache.cli.app import app

    def lines(folder: Path) -> list[str]:
        done = CliRunner().invoke(app, ["inspect", str(folder)])
        assert done.exit_code == 0, done.stderr
        _, _, found = done.stdout.partition("\nwithout this package, in Python:\n")
        return [line.strip() for line in found.splitlines()]

    return lines
