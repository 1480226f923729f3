"""The Java class over the C interface, compiled and run where there is a Java compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from .conftest import SOURCES, ids
from .test_c_api import PROMPT, QUESTION, shared_library  # noqa: F401  a fixture

pytestmark = pytest.mark.full

JAVA = SOURCES.parent / "java"


@pytest.fixture(scope="module")
def classes(shared_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    compiler = shutil.which("javac")
    home = compiler and Path(compiler).resolve().parent.parent
    if home is None or not (home / "include" / "jni.h").is_file():
        pytest.skip("there is no Java development kit")
    folder = tmp_path_factory.mktemp("java")
    sources = [JAVA / "exportablecache" / "Session.java", Path(__file__).parent / "SessionCalls.java"]
    for command in (
        [compiler, "-Xlint:all", "-Werror", "-d", folder, *sources],
        ["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", f"-I{home}/include",
         f"-I{home}/include/linux", f"-I{SOURCES}/include", JAVA / "exportable_cache_jni.c",
         f"-L{shared_library.parent}", "-lexportable_cache", f"-Wl,-rpath,{shared_library.parent}",
         "-Wl,--allow-shlib-undefined", "-o", folder / "libexportable_cache_jni.so"],
    ):  # fmt: skip
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_java_answers_as_the_session_in_python(classes: Path, demo_bundle: Path, tmp_path: Path) -> None:
    java = ["java", "-Xcheck:jni", f"-Djava.library.path={classes}", "-cp", classes, "SessionCalls"]
    done = subprocess.run(
        [*java, demo_bundle, tmp_path / "java.state", ids(PROMPT), QUESTION],
        capture_output=True, text=True, timeout=120, env={**os.environ, "LC_ALL": "C.UTF-8"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if "WARNING" in line] == []  # of -Xcheck:jni
