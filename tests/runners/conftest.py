"""The C++ runner, built once for all tests, and its probe driven line by line."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..support.compiling import cmake_compiler
from ..support.store import stored

#: Of logits: kernels of attention that are linked in may add up in another order than the wheel's.
TOLERANCE = 5e-5

SOURCES = Path(__file__).parent.parent.parent / "runners" / "cpp"


def with_python_runner() -> dict[str, str]:
    """The environment, for a process that imports `exportable_cache_runner`."""
    return {**os.environ, "PYTHONPATH": str(SOURCES.parent.parent)}


@dataclass(frozen=True)
class Reply:
    """`ok` with its values, or not, with the kind of error and its message as values."""

    ok: bool
    values: list[str]

    def numbers(self, index: int = 0) -> list[float]:
        return [float(text) for text in self.values[index].split()]

    def tokens(self, index: int = 0) -> list[int]:
        return [int(text) for text in self.values[index].split()]

    def texts(self) -> list[str]:
        return [bytes.fromhex(text).decode("utf-8") for text in self.values]


Probe = Callable[..., list[Reply]]
Program = Callable[[str], list[str]]


@pytest.fixture(scope="session")
def installed_executorch(request: pytest.FixtureRequest) -> str:
    """What `--executorch` names, for tests of what only an installed ExecuTorch gives."""
    prefix = request.config.getoption("--executorch")
    if prefix is None:
        pytest.skip("no installed ExecuTorch is named: make test-device EXECUTORCH=PREFIX")
    return prefix


def cmake_program() -> str:
    """The cmake beside this interpreter, or on the path."""
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    cmake = shutil.which("cmake", path=beside)
    if cmake is None:
        pytest.skip("there is no cmake; the test extra installs one")
    return cmake


def over_wheel() -> list[str]:
    """CMake's options for the executorch wheel of this interpreter."""
    library = Path(sysconfig.get_config_var("LIBDIR") or "", sysconfig.get_config_var("INSTSONAME") or "")
    if not sysconfig.get_config_var("Py_ENABLE_SHARED") or not library.is_file():
        pytest.skip("this Python has no shared libpython, which the executorch wheel's libraries refer to")
    return [f"-DPython3_EXECUTABLE={sys.executable}"]


def over_installed(prefix: str, toolchain: str | None) -> list[str]:
    """CMake's options for an installed ExecuTorch."""
    options = ["-DEC_EXECUTORCH=installed", f"-DCMAKE_PREFIX_PATH={prefix}"]
    return options if toolchain is None else [*options, f"-DCMAKE_TOOLCHAIN_FILE={Path(toolchain).resolve()}"]


def template_options() -> list[str]:
    """CMake's options for chat templates, where the variable `EC_TEMPLATES_SOURCE` names a checkout of llama.cpp."""
    source = os.environ.get("EC_TEMPLATES_SOURCE")
    return [f"-DEC_TEMPLATES_SOURCE={source}"] if source else []


@pytest.fixture(scope="session")
def cpp_build(request: pytest.FixtureRequest) -> Path:
    """Folder with the programs, built against this interpreter's executorch wheel, or what `--executorch` names."""
    pytest.importorskip("executorch", reason="the executorch extra is not installed")
    prefix, toolchain = request.config.getoption("--executorch"), request.config.getoption("--toolchain")
    cmake, compiler = cmake_program(), cmake_compiler(20)
    # Headers are most of the work, and a token takes no time: read once, and not optimised.
    quick = ["-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_UNITY_BUILD_BATCH_SIZE=0", "-DCMAKE_CXX_FLAGS_RELEASE=-O0"]
    if request.config.getoption("--sanitize"):
        quick.append("-DCMAKE_CXX_FLAGS=-fsanitize=address,undefined -fno-sanitize-recover=all")
    options = [
        *(over_wheel() if prefix is None else over_installed(prefix, toolchain)),
        *([] if toolchain else [f"-DCMAKE_CXX_COMPILER={compiler}"]),
        "-DEC_BUILD_TESTS=ON",
        "-DEC_BUILD_SHARED=ON",
        *(["-DEC_TEMPLATES=ON", *template_options()] if template_options() else []),
        *quick,
    ]
    # A program holds the static libraries as they were.
    libraries = [path for place in (prefix or "").split(";") if place for path in Path(place, "lib").glob("*.a")]
    newest = max((path.stat().st_mtime_ns for path in libraries), default=0)

    def build(folder: Path) -> None:
        for command in (
            [cmake, "-S", SOURCES, "-B", folder, *options],
            [cmake, "--build", folder, "--parallel", str(os.cpu_count() or 1)],
        ):
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    return stored({"cpp": "executorch", "options": options, "libraries": newest}, build)


@pytest.fixture(scope="session")
def program(request: pytest.FixtureRequest, cpp_build: Path) -> Program:
    """`program("exportable_cache_generate")` -> the command that runs it."""
    emulator = shlex.split(request.config.getoption("--emulator"))
    return lambda name: [*emulator, str(cpp_build / name)]


@pytest.fixture(scope="session")
def probe(program: Program) -> Probe:
    """`probe(("prefill", "5 6 7"), ("length",))` -> one `Reply` each, of a process of its own."""

    def run(*commands: Sequence[object]) -> list[Reply]:
        lines = "".join("\t".join(str(field) for field in command) + "\n" for command in commands)
        done = subprocess.run(
            program("exportable_cache_probe"), input=lines, capture_output=True, text=True, timeout=300,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        replies = [line.split("\t") for line in done.stdout.split("\n")[:-1]]
        assert len(replies) == len(commands), done.stderr[-2000:]
        return [Reply(fields[0] == "ok", fields[1:]) for fields in replies]

    return run


def ids(tokens: Sequence[int]) -> str:
    """Token ids as a field."""
    return " ".join(str(int(token)) for token in tokens)


def hexed(text: str | bytes) -> str:
    """Text as a field."""
    return (text.encode("utf-8") if isinstance(text, str) else text).hex()
