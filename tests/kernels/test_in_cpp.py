"""The kernels by themselves, in C++: shapes, dtypes, masks, threads, every instruction set of this machine."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from .conftest import Build

#: Programs of `kernels/tests`.
PROGRAMS = ("attention_test", "linear_test", "float_linear_test", "experts_test", "quantize_test", "elementwise_test")


def run(program: Path) -> str:
    done = subprocess.run([program], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("program", PROGRAMS)
def test_kernels_are_exact_on_every_instruction_set(kernels_build: Build, program: str) -> None:
    said = run(kernels_build("-DEC_KERNELS_TESTS=ON") / program)
    assert "0 failures" in said.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_kernels_under_the_sanitizers(kernels_build: Build, program: str) -> None:
    options = ("-DEC_KERNELS_LIBRARY=OFF", "-DEC_KERNELS_TESTS=ON", "-DEC_KERNELS_SANITIZE=address,undefined")
    run(kernels_build(*options) / program)
