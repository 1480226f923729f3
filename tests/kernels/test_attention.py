"""Attention against double precision, in C++: shapes, dtypes, masks, threads, every instruction set of this machine."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from .conftest import Build


def run(program: Path) -> str:
    done = subprocess.run([program], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_attention_is_exact_on_every_instruction_set(kernels_build: Build) -> None:
    said = run(kernels_build("-DEC_KERNELS_TESTS=ON") / "attention_test")
    assert "0 failures" in said.splitlines()[-1]


@pytest.mark.slow
def test_attention_under_the_sanitizers(kernels_build: Build) -> None:
    options = ("-DEC_KERNELS_LIBRARY=OFF", "-DEC_KERNELS_TESTS=ON", "-DEC_KERNELS_SANITIZE=address,undefined")
    run(kernels_build(*options) / "attention_test")
