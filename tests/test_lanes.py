"""Tests of a lane run if their path is named, in worker processes too; continuous integration chooses the C++ tests."""

from __future__ import annotations

import os
import shutil
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


@pytest.mark.skipif(not all(map(shutil.which, ("bash", "git"))), reason="bash or git is not installed")
def test_continuous_integration_runs_the_cpp_tests_if_their_sources_changed(tmp_path: Path) -> None:
    """The commands of `make` are recorded by a stand-in of its name."""
    repository, tools = tmp_path / "repository", tmp_path / "tools"
    for folder in (repository / ".ci", repository / "kernels", tools):
        folder.mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", repository / ".ci" / "run")
    (tools / "make").write_text("#!/bin/sh\necho make $*\n")
    (tools / "make").chmod(0o755)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    variables |= {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "GIT_CONFIG_GLOBAL": os.devnull}

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", *identity, *arguments], cwd=repository, env=variables, check=True, capture_output=True)

    def commit(name: str) -> None:
        (repository / name).write_text("changed")
        git("add", ".")
        git("commit", "-qm", "a change")

    def runs_cpp(base: str = "base") -> bool:
        command = ["bash", str(repository / ".ci" / "run")]
        done = subprocess.run(command, env={**variables, "BASE": base}, capture_output=True, text=True, check=True)
        last = done.stdout.splitlines()[-1]
        assert last in ("make test", "make test PYTEST_ARGS=--cpp")
        return last.endswith("--cpp")

    git("init", "-q")
    commit("first.md")
    assert runs_cpp("HEAD"), "there is no commit to compare with"
    git("branch", "base")
    commit("second.md")
    assert not runs_cpp()
    assert runs_cpp("unknown"), "the merge base is unknown"
    (repository / "kernels" / "new.cpp").touch()
    assert runs_cpp(), "a file is not committed"
    commit("kernels/new.cpp")
    commit("third.md")
    assert runs_cpp(), "a file changed in an earlier commit of the branch"
    git("branch", "-f", "base")
    commit("pyproject.toml")
    assert runs_cpp(), "the releases of other packages changed"
