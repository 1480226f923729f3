"""Graphs from disk are loaded without what compiles graphs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor import config as inductor
from torch._inductor.select_algorithm import extern_kernels

from exportable_cache.backends.live.graph_cache import import_loader
from exportable_cache.common.compat import torch_loading
from exportable_cache.common.compat.torch_compile import compile_region, compiled_here, region_bytes, region_from_bytes
from exportable_cache.common.compat.torch_loading import IMPORTS, PLAIN_KERNELS, self_contained

from ..support.compiling import compiling_with

ALIGN, KERNELS = IMPORTS.values()


def test_generated_code_keeps_the_imports_that_it_needs() -> None:
    head = f"import torch\n{ALIGN}{KERNELS}"
    assert self_contained(f"{head}call = 1\n") == "import torch\ncall = 1\n"
    assert self_contained(f"{head}align(3)\n") == f"import torch\n{ALIGN}align(3)\n"
    code = "def call(a, b, out):\n    extern_kernels.mm(a, b, out=out)\n"
    scope: dict = {}
    lean = self_contained(head + code)
    assert "_inductor" not in lean
    exec(lean, scope)
    out = torch.empty(2, 2)
    scope["call"](2 * torch.eye(2), torch.ones(2, 2), out)
    torch.testing.assert_close(out, torch.full((2, 2), 2.0))
    assert self_contained(f"{head}extern_kernels.convolution(1)\n").count(KERNELS) == 1
    assert self_contained(f"{head}extern_kernels.mm(1)\nextern_kernels.bias_addmm(1)\n").count(KERNELS) == 1


def test_the_kernels_that_are_plain_are_functions_of_torch() -> None:
    for name in PLAIN_KERNELS:
        assert getattr(extern_kernels, name) is getattr(torch, name)


def test_a_region_is_loaded_from_code_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a process that has not imported the compiler: its products by torch, and the rest as one kernel."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    inputs, written = [torch.rand(3, 4), torch.rand(4, 5)], []

    def backend(module: torch.fx.GraphModule, examples: list[torch.Tensor]) -> torch.fx.GraphModule:
        fake = [node.meta["example_value"] for node in module.graph.find_nodes(op="placeholder")]
        written.append(region_bytes(compile_region(module, fake)))
        return module

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, y).cos() + 1

    # One kernel: to precompile headers takes longer.
    plain = inductor.patch(cpp_cache_precompile_headers=False)
    with compiling_with("inductor"), plain, torch.no_grad():
        expected = torch.compile(step, backend=backend)(*inputs)
        theirs = {*tmp_path.rglob("*.py")}
        assert KERNELS in "".join(path.read_text() for path in theirs)
        monkeypatch.setattr(torch_loading, "_COMPILER", "not imported")
        with compiled_here(plainly=False):
            loaded = region_from_bytes(written[0])
        (own,) = {*tmp_path.rglob("*.py")} - theirs
        assert not {KERNELS, ALIGN} & {*own.read_text().splitlines(keepends=True)}
        torch.testing.assert_close(loaded(*inputs)[0], expected)


def test_the_loader_imports_modules_that_exist() -> None:
    """Check the names, because the caller ignores errors and a wrong one only makes the first load slower."""
    import_loader()
    assert "exportable_cache.backends.live.clone_layers" in sys.modules


@pytest.mark.full
def test_a_process_that_only_loads_imports_no_compiler(tmp_path: Path) -> None:
    script = tmp_path / "steps.py"
    script.write_text(
        "import os, sys\n"
        "from exportable_cache.backends.live.graph_cache import GraphCache, import_loader\n"
        "from tests.support.background import model_of, session_of\n"
        "from tests.support.models import tokens\n"
        "import_loader()\n"
        "late, load = set(), GraphCache.load\n"
        "def told(*arguments):\n"
        "    known = {*sys.modules}\n"
        "    call = load(*arguments)\n"
        "    late.update({*sys.modules} - known)\n"
        "    return call\n"
        "GraphCache.load = told\n"
        "session = session_of(model_of(), 'wait', graph_cache='graphs')\n"
        "answer = list(session.generate(tokens(5), 5, temperature=0.9, seed=7))\n"
        "made = os.environ['TORCHINDUCTOR_CACHE_DIR']\n"
        "files = {name: getattr(sys.modules[name], '__file__', None) for name in late}\n"
        "late = {name for name, file in files.items() if not str(file).startswith((made, '/tmp/torch'))}\n"
        # zipfile asks for the one that old archives name their files in.
        "late = sorted(late - {'encodings.cp437'})\n"
        "print(session.runner.graph_cache.loaded, 'torch._inductor.graph' in sys.modules, *late, '|', answer)\n"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    said = [
        subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True).stdout
        for _ in range(2)
    ]
    first, second = (each.split(maxsplit=2) for each in said)
    assert first[:2] == ["0", "True"] and second[:2] == ["3", "False"] and first[2] == second[2]
