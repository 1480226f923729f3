"""A small part of `make kills`, with a seed, and what it would see."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from exportable_cache.common.fs import files

from . import kills

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills copies of this process")


def test_killed_exports_leave_a_whole_bundle_and_nothing_else() -> None:
    found = kills.kills(2, 0, seed=1)
    assert found[kills.KILLS] == 2
    assert not any(found[name] for name in (kills.HALF, kills.LOST, kills.LEFT))


@pytest.mark.parametrize("exchanges", [True, False])
def test_killed_at_the_last_calls(tmp_path: Path, exchanges: bool) -> None:
    exports = kills.Exports(tmp_path, exchanges)
    exports.finish()
    for number in range(25, 45, 5):
        exports.at_a_call(number, over=True)
    assert exports.counts[kills.KILLS] > 2
    assert not any(exports.counts[name] for name in (kills.HALF, kills.LOST, kills.LEFT))


def test_it_would_see_what_is_half_lost_or_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "clear_leftovers", lambda *arguments: None)
    monkeypatch.setattr("exportable_cache.bundle.builder.clear_leftovers", lambda *arguments: None)
    exports = kills.Exports(tmp_path, exchanges=True)
    exports.finish()
    exports.at_a_call(12, over=True)
    assert exports.counts[kills.LEFT] == 1
    (exports.place / "manifest.json").write_text("{}")
    exports.judge(_killed(), was_there=True)
    assert exports.counts[kills.HALF] == 1
    shutil.rmtree(exports.place)
    exports.judge(_killed(), was_there=True)
    assert exports.counts[kills.LOST] == 1


def _killed() -> int:
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), 9)
    return child
