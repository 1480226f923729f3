"""The samples for Android and iOS, which no test can build: what they name exists, what a desktop can check holds."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ..support.compiling import cmake_compiler
from .conftest import SOURCES, cmake_program, over_wheel

RUNNERS = SOURCES.parent
HEADER = (SOURCES / "include" / "exportable_cache.h").read_text()
JAVA = (RUNNERS / "java" / "exportablecache" / "Session.java").read_text()
JNI = (RUNNERS / "java" / "exportable_cache_jni.c").read_text()
SWIFT = (RUNNERS / "swift" / "Sources" / "ExportableCache" / "Session.swift").read_text()
ANDROID = RUNNERS / "android"
KOTLIN = {path.stem: path.read_text() for path in ANDROID.rglob("*.kt")}
SWIFT_SAMPLE = {path.stem: path.read_text() for path in (RUNNERS / "ios").rglob("*.swift")}


def test_every_native_method_of_java_has_its_function() -> None:
    native = set(re.findall(r"private static native [\w\[\]]+ (\w+)\(", JAVA))
    functions = set(re.findall(r"\bJava_exportablecache_Session_(\w+)\(", JNI))
    assert native == functions and len(native) > 5


@pytest.mark.parametrize("source", [JNI, SWIFT], ids=["JNI", "Swift"])
def test_every_name_of_c_is_in_the_header(source: str) -> None:
    named = set(re.findall(r"\b(?:ec|EC)_\w+", source))
    assert named <= set(re.findall(r"\b(?:ec|EC)_\w+", HEADER)) and len(named) > 10


@pytest.mark.parametrize("source", [JNI, SWIFT], ids=["JNI", "Swift"])
def test_every_function_and_option_of_c_is_used(source: str) -> None:
    """Check that a language has whatever the C interface has."""
    functions = set(re.findall(r"^EC_API [\w* ]+?(ec_\w+)\(", HEADER, re.MULTILINE)) - {"ec_abi_version"}
    unused = {name for name in functions if not re.search(rf"\b{name}\(", source)}
    assert unused == set() and len(functions) > 20
    structure = HEADER.split("typedef struct ec_options {")[1].split("} ec_options;")[0]
    structure = re.sub(r"/\*.*?\*/", "", structure, flags=re.DOTALL)
    fields = set(re.findall(r"(\w+);", structure)) - {"size", "reserved"}
    unset = {name for name in fields if not re.search(rf"(?:\.|->){name}\b", source)}
    assert unset == set() and len(fields) > 20


def test_what_the_samples_call_is_there() -> None:
    public = set(re.findall(r"public (?:[\w<>\[\]]+ )*(\w+)[(;]", JAVA)) | set(
        re.findall(r"\b(?:class|enum) (\w+)", JAVA)
    )
    counts = re.findall(r"public final (?:long|double|Stop) ([\w, ]+);", JAVA)
    public |= {name for names in counts for name in names.split(", ")}
    answers = KOTLIN["Answers"]
    called = set(re.findall(r"\b(?:session\??|open|Session)\.(\w+)", answers))
    shown = set(re.findall(r"\bit\.(\w+)", KOTLIN["MainActivity"]))
    assert called >= {"reset", "generateText", "cancel", "close"} and len(shown) == 2
    assert called | shown <= public, (called | shown) - public
    # Of `Answers`, which the screen calls.
    screen = set(re.findall(r"\banswers\.(\w+)", KOTLIN["MainActivity"]))
    assert screen <= set(re.findall(r"fun (\w+)\(", answers)) and len(screen) == 3

    public = set(re.findall(r"public (?:convenience )?(?:func|var) (\w+)", SWIFT))
    called = set(re.findall(r"\bsession\??\.(\w+)", SWIFT_SAMPLE["Answers"]))
    assert called >= {"reset", "generateText", "cancel"} and called <= public, called - public
    assert set(re.findall(r"\bfound\.(\w+)", SWIFT_SAMPLE["Answers"])) <= set(re.findall(r"int64_t (\w+);", HEADER))
    screen = set(re.findall(r"\banswers\.(\w+)", SWIFT_SAMPLE["SampleApp"]))
    assert screen <= set(re.findall(r"(?:func|var) (\w+)", SWIFT_SAMPLE["Answers"])) and len(screen) == 3


def test_what_the_android_project_names_is_there() -> None:
    gradle = (ANDROID / "build.gradle.kts").read_text()
    namespace = re.search(r'namespace = "([\w.]+)"', gradle)[1]
    activity = ElementTree.parse(ANDROID / "src" / "main" / "AndroidManifest.xml").find("application/activity")
    name = activity.get("{http://schemas.android.com/apk/res/android}name").removeprefix(".")
    assert f"package {namespace}\n" in KOTLIN[name] and f"class {name} :" in KOTLIN[name]
    for path in (re.search(r'path = file\("(.+)"\)', gradle)[1], re.search(r'java.directories \+= "(.+)"', gradle)[1]):
        assert (ANDROID / path).exists()
    cmake = "".join(path.read_text() for path in [SOURCES / "CMakeLists.txt", *(SOURCES / "cmake").glob("*.cmake")])
    options = set(re.findall(r"\bEC_[A-Z_]+", gradle + (ANDROID / "CMakeLists.txt").read_text()))
    assert options and all(re.search(rf"(?:option|set)\({option} ", cmake) for option in options)
    # Java loads the library by the name that CMake gives it.
    loaded = re.search(r'loadLibrary\("(\w+)"\)', JAVA)[1]
    assert f"add_library({loaded} SHARED" in (ANDROID / "CMakeLists.txt").read_text()


@pytest.mark.cpp
def test_cmake_configures_the_android_libraries(tmp_path: Path) -> None:
    """For this machine, over the wheel: there is no NDK."""
    cmake, _ = cmake_program(), cmake_compiler(20)
    command = [cmake, "-S", ANDROID, "-B", tmp_path, *over_wheel()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    built = subprocess.run([cmake, "--build", tmp_path, "--target", "help"], capture_output=True, text=True).stdout
    targets = {
        name
        for name in ("exportable_cache_jni", "exportable_cache", "exportable_cache_generate")
        if name in built.split()
    }
    assert targets == {"exportable_cache_jni", "exportable_cache"}, built


@pytest.mark.full
def test_what_needs_no_android_compiles_as_kotlin(tmp_path: Path) -> None:
    if shutil.which("kotlinc") is None or shutil.which("javac") is None:
        pytest.skip("there is no Kotlin compiler")
    java, kotlin = RUNNERS / "java" / "exportablecache" / "Session.java", next(ANDROID.rglob("Answers.kt"))
    for command in (
        ["javac", "-d", tmp_path / "java", java],
        ["kotlinc", "-cp", tmp_path / "java", "-d", tmp_path / "kotlin", kotlin],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
