"""The attention kernels of `kernels/`, compiled once for all tests."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ..support.compiling import cmake_compiler, compiles
from ..support.store import REPOSITORY, stored

SOURCES = REPOSITORY / "kernels"

Build = Callable[..., Path]
#: Programs of `native_programs` that are made in one process.
FAST = ("operators", "experts", "rows")


@pytest.fixture(scope="session")
def kernels_build(request: pytest.FixtureRequest) -> Build:
    """`kernels_build("-DEC_KERNELS_TESTS=ON", ...)` -> folder with what is built so; skips where nothing can be."""
    from exportable_cache.backends.executorch.native.build import find_cmake

    cmake = find_cmake()
    if cmake is None:
        pytest.skip("there is no cmake; the test extra installs one")
    compiler = cmake_compiler(17)
    if not compiles(compiler, 17, '#include "hwy/highway.h"\n'):
        pytest.skip("there is no Google Highway (Debian and Ubuntu: libhwy-dev)")
    digest = hashlib.sha256()
    for path in sorted(SOURCES.rglob("*")):
        if path.is_file():
            digest.update(path.relative_to(SOURCES).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")

    # Optimised as users have them with the full lane: that takes the compiler twice as long.
    level = [] if request.config.getoption("--full") else ["-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG"]

    def build(*options: str) -> Path:
        options = (*level, f"-DPython3_EXECUTABLE={sys.executable}", f"-DCMAKE_CXX_COMPILER={compiler}", *options)

        def make(folder: Path) -> None:
            for command in (
                [cmake, "-S", SOURCES, "-B", folder, *options],
                [cmake, "--build", folder, "--parallel", str(os.cpu_count() or 1)],
            ):
                done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
                assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

        return stored({"kernels": digest.hexdigest(), "options": options}, make)

    return build


@pytest.fixture(scope="session")
def native_library(kernels_build: Build) -> Path:
    """The library, against the executorch wheel of this interpreter."""
    pytest.importorskip("executorch", reason="the executorch extra is not installed")
    return kernels_build("-DEC_KERNELS_TESTS=ON") / "libexportable_cache_kernels.so"


@pytest.fixture(scope="session")
def native_bundle(native_library: Path, tmp_path_factory: pytest.TempPathFactory):
    """`native_bundle("rows")` -> folder of one of `PROGRAMS`, whose logits were found to be the model's."""
    folder, made = tmp_path_factory.mktemp("own"), set()

    def make(name: str) -> Path:
        if name not in made:
            from exportable_cache.common.native.kernels import VARIABLE

            # One process for those that always run: to import the exporter takes as long as to export.
            names = FAST if name in FAST else (name,)
            done = subprocess.run(
                [sys.executable, "-m", "tests.kernels.native_programs", folder, *names],
                capture_output=True, text=True, timeout=900, env={**os.environ, VARIABLE: str(native_library)},
            )  # fmt: skip
            assert done.returncode == 0, done.stderr[-3000:]
            made.update(names)
        return folder / name.replace(" ", "-")

    return make
