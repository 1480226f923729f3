"""The Java class over the C interface, compiled and run where there is a Java compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from exportable_cache import load

from .conftest import SOURCES, ids
from .test_c_api import PROMPT, QUESTION, shared_library  # noqa: F401  a fixture
from .test_cpp import CAPACITY, VOCAB
from .test_cpp_settings import with_settings

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
    sampling = with_settings(demo_bundle, tmp_path / "sampling", {"do_sample": True, "temperature": 4.0})
    done = subprocess.run(
        [*java, demo_bundle, tmp_path / "java.state", ids(PROMPT), QUESTION, sampling],
        capture_output=True, text=True, timeout=120, env={**os.environ, "LC_ALL": "C.UTF-8"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if "WARNING" in line] == []  # of -Xcheck:jni
    assert lines.pop(0).startswith("1 threads is 0")
    assert lines.pop(0).startswith("1 threads is 2, but sessions of this process are open that compute in 1")
    session = load(demo_bundle)
    tokens = list(session.generate(torch.tensor([PROMPT]), 8))
    session.reset()
    text = "".join(session.generate_text(QUESTION))
    encoded = session.text_tokenizer(QUESTION, add_special_tokens=True)["input_ids"]
    greedy, drawn, expected = lines[8:11]
    del lines[8:11]
    assert greedy == ids(tokens) != drawn == expected
    stop = "MAX_NEW_TOKENS" if len(tokens) == 8 else "END_TOKEN"
    assert lines[:9] == [
        ids(tokens),
        f"{len(PROMPT)} {len(tokens)} {stop}",
        f"{len(PROMPT)} {CAPACITY} true",
        f"{len(PROMPT)} {VOCAB}",
        text,
        ids(encoded),
        text,
        "2 CANCELLED",
        "from the callback",
    ]
    assert lines[9] == "true 3 WHOLE" and lines[11] == "from the mask"
    assert lines[10].startswith(f"1 allowed_tokens allows none of {VOCAB} tokens after 0 new ones")
    del lines[9:12]
    assert lines[9].startswith("1 tokens[0] is token id 1000000")
    assert lines[10] == lines[11] == "1 this model has no encoder; pass the tokens to prefill"
    assert lines[12].startswith("1 ") and lines[13].startswith("3 ")
    zero = "must have no zero character, where C takes it to end, got one at"
    half = "must be whole characters, got half of a surrogate pair; leave it out"
    assert lines[14:] == [
        "1 tokens must be given, got null",
        f"1 text {zero} 2; leave it out",
        f"1 text {half}",
        f"1 text {half}",
        "1 text must be given, got null",
        "true",
        f"1 prompt {zero} 1; leave it out",
        "1 system must be given, got null",
        "1 options must be given, got null",
        "1 onText must be given, got null",
        "1 prompt must be given, got null",
        "1 onToken must be given, got null",
        f"1 options.stopStrings[1] {half}",
        "1 options.stopStrings[0] must be given, got null",
        "1 options.stopStrings must be given, got null",
        "1 options.stopTokens must be given, got null",
        f"1 path {zero} {len(str(tmp_path / 'java.state'))}; leave it out",
        "1 folder must be given, got null",
        lines[-2],
        "the session is closed",
    ]
