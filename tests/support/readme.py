"""The Python example of docs/quickstart.md, run once as a new user runs it."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from exportable_cache.common.native.kernels import VARIABLE

from .store import REPOSITORY, stored


def example() -> str:
    """Return the Python block of docs/quickstart.md."""
    text = (REPOSITORY / "docs" / "quickstart.md").read_text(encoding="utf-8")
    return re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]


def bare(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python as a new user does, without the settings that silence it for tests, and without native operators."""
    kept = ("PATH", "HOME", "LANG", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "TMPDIR")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment.update(
        PYTHONPATH=str(REPOSITORY), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", EXPORTABLE_CACHE_HOME=str(cwd)
    )
    # Every runner opens what it exports so; with the runtime named, nothing depends on what is installed.
    environment |= {VARIABLE: "executorch", "EXPORTABLE_CACHE_RUNTIME": "torch"}
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done


@dataclass(frozen=True)
class Example:
    """What the example printed, and the folder of its bundle. Read it only."""

    stdout: str
    stderr: str
    bundle: Path


def run_example() -> Example:
    """Taken from the store if it ran before."""

    def run(folder: Path) -> None:
        folder.mkdir()
        done = bare("-c", example(), cwd=folder)
        (folder / "stdout").write_text(done.stdout, encoding="utf-8")
        (folder / "stderr").write_text(done.stderr, encoding="utf-8")

    folder = stored({"quickstart": hashlib.sha256(example().encode()).hexdigest()}, run)
    stdout, stderr = ((folder / name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
    return Example(stdout, stderr, folder / "artifacts" / "demo")
