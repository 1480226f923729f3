"""Tests of a lane run if their path is named, in worker processes too, and are skipped otherwise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.project

ROOT = Path(__file__).parents[1]


# A worker asks the process that started it, which reads its command line as one without workers does.
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_named_path_runs_its_lane(workers: int) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(workers)]
    done = subprocess.run([*command, "tests/test_peer_turns.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, done.stdout
