"""A small part of `make fuzz`, with seeds."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from exportable_cache.errors import InputError

from . import fuzz

pytestmark = pytest.mark.skipif(not hasattr(os, "fork") or not os.path.isdir("/proc/self"), reason="forks this process")


def test_mutations_are_refused_or_harmless(pt2_bundle: Path, tmp_path: Path) -> None:
    found: list[tuple[str, int, str, str]] = []
    shutil.copytree(pt2_bundle, tmp_path / "pt2")
    counts = fuzz.fuzz(5, seed=3, targets=["pt2"], keep=lambda *what: found.append(what), bundles=tmp_path)
    bad = [what for what in found if what[2] in (fuzz.RAW, fuzz.CRASH, fuzz.CODE)]
    assert bad == []
    unsealed = counts["pt2, any file, unsealed"]
    assert unsealed[fuzz.DIFFERENT] == 0
    assert unsealed[fuzz.REFUSED] > 0


def test_random_operators_are_refused_or_run() -> None:
    found: list[tuple[str, int, str, str]] = []
    (counts,) = fuzz.fuzz(150, seed=5, targets=["operators"], keep=lambda *what: found.append(what)).values()
    assert [what for what in found if what[2] not in (fuzz.REFUSED, fuzz.SAME)] == []
    # Neither are all of them refused, nor do all of them run.
    assert min(counts[fuzz.REFUSED], counts[fuzz.SAME]) >= 20


def test_it_would_see_code_that_runs(tmp_path) -> None:
    def evil(folder) -> None:
        os.mkdir(folder / "made")

    (tmp_path / "source").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "source" / "file").write_text("x")

    def fails(folder) -> None:
        raise KeyError("x")

    def refuses(folder) -> None:
        raise InputError("x")

    def dies(folder) -> None:
        os.abort()

    does = {
        fuzz.CODE: evil,
        fuzz.RAW: fails,
        fuzz.REFUSED: refuses,
        fuzz.CRASH: dies,
        fuzz.SLOW: lambda folder: os.kill(os.getpid(), signal.SIGPROF),
        fuzz.DIFFERENT: lambda folder: 3,
        fuzz.SAME: lambda folder: None,
    }

    def use(folder) -> None:
        # The unharmed one first.
        return does[outcome](folder) if folder.name == "copy" else None

    for outcome in does:
        attack = fuzz.Attack(outcome, tmp_path / "source", use, lambda folder, choose: None)
        found = [what for _, what, _ in fuzz.tried(attack, range(3), 0, tmp_path / "work")]
        assert found == [outcome] * 3
