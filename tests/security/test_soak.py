"""Short forms of `make soak`, and what they would see."""

from __future__ import annotations

import os

import pytest
import torch

from exportable_cache.cache.policies import RingPolicy

from . import soak


def test_a_ring_of_some_thousand_steps() -> None:
    assert soak.ring_drift(3000) == 0


def test_it_would_see_a_ring_that_drifts(monkeypatch: pytest.MonkeyPatch) -> None:
    real = RingPolicy.next_slot
    monkeypatch.setattr(RingPolicy, "next_slot", lambda self, length: real(self, length + (length > 150).long()))
    assert soak.ring_drift(160) > 0


def test_it_would_see_positions_that_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    real = RingPolicy.positions
    monkeypatch.setattr(RingPolicy, "positions", lambda self, length: real(self, length) + (length > 150).long())
    assert soak.ring_drift(160) > 0


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads the memory of a process from /proc")
@pytest.mark.parametrize("targets", [["eager"], pytest.param(["eager", "pt2"], marks=pytest.mark.full)])
def test_sessions_in_threads(targets: list[str]) -> None:
    threads = torch.get_num_threads()
    try:
        found = soak.soak(1, sessions=4, threads=2, targets=targets)
    finally:
        torch.set_num_threads(threads)
    assert found.errors == []
    assert found.wrong == 0
    assert found.answers > 5
    assert found.memory


def test_growth_is_that_of_a_line() -> None:
    found = soak.Soaked(memory=[(float(second), 100 + second / 30) for second in range(100)])
    assert found.growth == pytest.approx(2.0)
