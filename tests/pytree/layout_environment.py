"""Environments with older transformers releases, for the tests that run against the real thing.

Each is a virtual environment under `.envs/` with one transformers release and what that release pins
(huggingface_hub, tokenizers), plus optree, which the main environment does without. torch and pytest are too large and
too equal to install again: a `.pth` file appends the site-packages of the environment the tests run in, behind the
environment's own.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENTS = REPOSITORY / ".envs"
STAMP = "complete"


@dataclass(frozen=True)
class Layout:
    """A transformers release that stands for the form its caches have."""

    transformers: str
    form: str

    @property
    def path(self) -> Path:
        return ENVIRONMENTS / f"transformers-{self.transformers}"

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def requirements(self) -> tuple[str, ...]:
        return (f"transformers=={self.transformers}", "optree")


@dataclass(frozen=True)
class Report:
    """What a run of the tests in an environment gave."""

    passed: int
    failed: int
    skipped: list[str]
    output: str


def ensure(layout: Layout) -> None:
    """Make the environment unless a complete one for this Python and this torch is there.

    Raises:
        RuntimeError: a command failed; the message is its output.
    """
    ENVIRONMENTS.mkdir(exist_ok=True)
    parent = Path(torch.__file__).resolve().parents[1]
    wanted = "\n".join((sys.version, torch.__version__, str(parent), *layout.requirements))
    stamp = layout.path / STAMP
    with (ENVIRONMENTS / f"{layout.path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs in one checkout
        if stamp.exists() and stamp.read_text() == wanted:
            return
        shutil.rmtree(layout.path, ignore_errors=True)
        _run(sys.executable, "-m", "venv", "--without-pip", layout.path)
        # Before the .pth file exists, so pip sees an empty environment and installs every pin.
        pip = (sys.executable, "-m", "pip", "--python", layout.python)
        # No bytecode: the tests import a small part of the modules, and compiling all costs seconds.
        _run(*pip, "install", "--quiet", "--no-compile", "--disable-pip-version-check", *layout.requirements)
        (site_packages,) = layout.path.glob("lib/python3*/site-packages")
        (site_packages / "parent.pth").write_text(f"{parent}\n")
        stamp.write_text(wanted)


def run_tests(layout: Layout, *paths: Path) -> Report:
    """Run pytest on `paths` in the environment, without the tests that make environments."""
    results = layout.path / "results.xml"
    results.unlink(missing_ok=True)
    # Outer settings would leak in: PYTEST_ADDOPTS from the developer, -p plugins of the parent's entry points.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {"PYTHONPATH": str(REPOSITORY), "EXPORTABLE_CACHE_TRANSFORMERS": layout.transformers}
    command = [layout.python, "-m", "pytest", "-q", "-m", "not layouts", "-p", "no:cacheprovider"]
    options = ["-c", REPOSITORY / "pyproject.toml", "--confcutdir", Path(__file__).parent, f"--junitxml={results}"]
    process = subprocess.run(
        [str(part) for part in (*command, *options, *paths)], cwd=REPOSITORY, env=env, capture_output=True, text=True
    )
    output = process.stdout + process.stderr
    if process.returncode not in (0, 1) or not results.exists():
        raise RuntimeError(f"pytest ended with {process.returncode} in {layout.path.name}:\n{output}")
    cases = ElementTree.parse(results).getroot().findall(".//testcase")
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case.get("name", "") for case in cases if case.find("skipped") is not None]
    return Report(len(cases) - len(bad) - len(skipped), len(bad), skipped, output)


def _run(*command: object) -> None:
    process = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if process.returncode:
        shown = " ".join(str(part) for part in command)
        raise RuntimeError(f"{shown}\nended with {process.returncode}:\n{process.stdout}{process.stderr}")
