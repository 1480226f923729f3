"""Which kernels a process uses, and that programs answer the same with both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from exportable_cache.common.native import kernels
from exportable_cache.common.native.kernels import TARGET_VARIABLE, VARIABLE, chosen_path, load_native_kernels
from exportable_cache.errors import MissingDependencyError

from ..support.store import REPOSITORY

#: Prompts past the windows of the demo model in one chunk and in several, a token at a time after them, and again from
#: the start.
RUN = """
import json, sys, torch
from exportable_cache import load
from exportable_cache.common.native.kernels import load_native_kernels
session = load(sys.argv[1])
logits = []
for length in (3, 40, 200):
    session.reset()
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(3, 200, (length + 5,), generator=generator)
    logits.append(session.prefill(ids[None, :length]).flatten())
    logits += [session.decode(ids[at : at + 1]).flatten() for at in range(length, length + 5)]
kernels = load_native_kernels()
torch.save(torch.stack(logits), sys.argv[2])
print(json.dumps({"calls": kernels and kernels.attention_calls, "target": kernels and kernels.target}))
"""


def run(bundle: Path, output: Path, **environment: str) -> tuple[torch.Tensor, dict]:
    """Logits, and what the process says of its kernels."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, bundle, output],
        capture_output=True, text=True, timeout=300, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(output), json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch):
    """`load_native_kernels` as in a process that has not asked yet."""
    monkeypatch.delenv(TARGET_VARIABLE, raising=False)
    load_native_kernels.cache_clear()
    yield monkeypatch
    load_native_kernels.cache_clear()


def test_a_program_answers_the_same_with_both_kernels(native_library: Path, demo_bundle: Path, tmp_path: Path) -> None:
    theirs, said = run(demo_bundle, tmp_path / "theirs", **{VARIABLE: "executorch"})
    assert said == {"calls": None, "target": None}
    ours, said = run(demo_bundle, tmp_path / "ours", **{VARIABLE: str(native_library)})
    # Two of the demo's layers are rings and two are full: each step calls the operator for all.
    assert said["calls"] >= 4 * 18
    assert ours.shape == theirs.shape and (ours - theirs).abs().max() < 2e-5


@pytest.mark.full
def test_the_instruction_set_can_be_held_down(native_library: Path, demo_bundle: Path, tmp_path: Path) -> None:
    least = "NEON" if os.uname().machine == "aarch64" else "SSE4"
    _, said = run(demo_bundle, tmp_path / "logits", **{VARIABLE: str(native_library), TARGET_VARIABLE: least})
    assert said["target"] == least


def test_an_unknown_instruction_set_is_refused(native_library: Path, fresh: pytest.MonkeyPatch) -> None:
    code = "from exportable_cache.common.compat.executorch import runtime; runtime()"
    environment = {**os.environ, VARIABLE: str(native_library), TARGET_VARIABLE: "AVX9"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode != 0 and "no 'AVX9' here" in done.stderr


def test_the_wheels_kernels_serve_where_none_are_built(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh.delenv(VARIABLE, raising=False)
    fresh.setattr(kernels, "installed_path", lambda: tmp_path / "none.so")
    assert chosen_path() is None and load_native_kernels() is None
    (tmp_path / "none.so").touch()
    assert chosen_path() == tmp_path / "none.so"
    fresh.setenv(VARIABLE, "executorch")
    assert chosen_path() is None


def test_a_library_that_is_not_there_is_refused(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh.setenv(VARIABLE, str(tmp_path / "missing.so"))
    with pytest.raises(MissingDependencyError, match="missing.so.*exportable-cache native build"):
        load_native_kernels()


def test_a_library_that_does_not_load_is_passed_over_with_a_warning(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    fresh.delenv(VARIABLE, raising=False)
    fresh.setattr(kernels, "installed_path", lambda: broken)
    with pytest.warns(RuntimeWarning, match="broken.so cannot be loaded"):
        assert load_native_kernels() is None
    load_native_kernels.cache_clear()
    fresh.setenv(VARIABLE, str(broken))
    with pytest.raises(MissingDependencyError, match="broken.so cannot be loaded"):
        load_native_kernels()


def test_the_package_puts_the_library_where_it_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exportable_cache_runner.installed.executorch_release", lambda: "${EC_EXECUTORCH_RELEASE}")
    folder, name = kernels.installed_path().parts[-3:-1], kernels.installed_path().name
    project = REPOSITORY / "runners" / "python" / "CMakeLists.txt"
    assert f'set(_folder "{"/".join(folder)}")' in project.read_text("utf-8")
    assert name == "libexportable_cache_kernels.so"
