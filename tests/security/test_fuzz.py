"""A small part of `make fuzz`, with seeds."""

from __future__ import annotations

import os

import pytest

from . import fuzz

pytestmark = pytest.mark.skipif(not hasattr(os, "fork") or not os.path.isdir("/proc/self"), reason="forks this process")


def test_mutations_are_refused_or_harmless() -> None:
    found: list[tuple[str, int, str, str]] = []
    counts = fuzz.fuzz(20, seed=3, targets=["pt2"], keep=lambda *what: found.append(what))
    bad = [what for what in found if what[2] in (fuzz.RAW, fuzz.CRASH, fuzz.CODE)]
    assert bad == []
    unsealed = counts["pt2, any file, unsealed"]
    assert unsealed[fuzz.DIFFERENT] == 0
    assert unsealed[fuzz.REFUSED] > 0


def test_it_would_see_code_that_runs(tmp_path) -> None:
    def evil(folder) -> None:
        os.mkdir(folder / "made")

    (tmp_path / "source").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "source" / "file").write_text("x")
    attack = fuzz.Attack("evil", tmp_path / "source", evil, lambda folder, choose: None, sealed=False)
    assert attack.outcome(0, tmp_path / "work", None)[0] == fuzz.CODE
    for error, outcome in ((KeyError("x"), fuzz.RAW), (None, fuzz.SAME)):

        def fails(folder, error=error) -> None:
            if error:
                raise error

        attack.use = fails
        assert attack.outcome(0, tmp_path / "work", None)[0] == outcome
    attack.use = lambda folder: os.abort()
    assert attack.outcome(0, tmp_path / "work", None)[0] == fuzz.CRASH
