"""What `torch.compile` makes of graphs: in most tests nothing but the traced graph, which shows semantics sooner."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from exportable_cache.backends.live.ops import NATIVE_OPERATORS
from exportable_cache.common.devices import cpp_compiler

#: Traced, functionalised and guarded as for Inductor; no code is generated.
FUNCTIONALIZED = "aot_eager"
#: Traced and guarded, in half the time. Tests that name another backend check that writes in place survive
#: functionalisation, and with `--full` all tests do.
TRACED = "eager"


def set_default_backend(full: bool) -> None:
    """Choose what graphs become in tests that name no backend."""
    # torch 2.11 has no default backend to set; graphs are then compiled by Inductor.
    if hasattr(torch.compiler, "set_default_backend"):
        torch.compiler.set_default_backend(FUNCTIONALIZED if full else TRACED)


def require_compiler() -> None:
    """Skip the test where what Inductor writes cannot be compiled."""
    if not cpp_compiler():
        pytest.skip("there is no C++ compiler")


def cmake_compiler(standard: int) -> str:
    """The C++ compiler for CMake, which the variable CXX may name; skips the test where it compiles no such C++."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        pytest.skip("there is no C++ compiler")
    headers = "#include <span>\n#include <version>\n" if standard >= 20 else "#include <vector>\n"
    if not compiles(compiler, standard, headers):
        pytest.skip(f"the C++ compiler {compiler!r} does not compile C++{standard} (g++ 10 or clang 13 on)")
    return compiler


def compiles(compiler: str, standard: int, source: str) -> bool:
    """True if a compiler exists and finds nothing wrong with a source."""
    command = [*compiler.split(), f"-std=c++{standard}", "-fsyntax-only", "-x", "c++", "-"]
    try:
        return subprocess.run(command, input=source, text=True, capture_output=True).returncode == 0
    except OSError:
        return False


@contextmanager
def compiling_with(backend: str) -> Iterator[None]:
    """Make a backend the default one of `torch.compile` in a block; what was compiled before and in it is forgotten."""
    if backend == "inductor":
        require_compiler()
    torch._dynamo.reset()
    if not hasattr(torch.compiler, "set_default_backend"):
        # torch 2.11, where Inductor is the only default.
        if backend != "inductor":
            pytest.skip("this torch has no default backend to set")
        yield
        torch._dynamo.reset()
        return
    before = torch.compiler.get_default_backend()
    torch.compiler.set_default_backend(backend)
    try:
        yield
    finally:
        torch.compiler.set_default_backend(before)
        torch._dynamo.reset()


@pytest.fixture
def inductor() -> Iterator[None]:
    """Graphs become machine code."""
    with compiling_with("inductor"):
        yield


@pytest.fixture
def loaded() -> None:
    """The operators that are compiled for the processor are there."""
    for operators in NATIVE_OPERATORS:
        assert operators.load(), operators.code.reason
