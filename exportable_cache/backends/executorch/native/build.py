"""Build the native package for this environment's executorch: the kernels of `kernels/` and the C++ runner's library.

This is a separate step after the install, because pip's isolated build environment does not have the headers of the
installed executorch wheel.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from exportable_cache_runner.library import FILE as RUNNER

from ....common.native.kernels import FILE as KERNELS
from ....common.native.kernels import installed_path
from ....errors import InputError, MissingDependencyError

#: Sources next to the package, in a checkout.
SOURCES = Path(__file__).parents[4]
STAMP = "built.txt"
_FOLDERS = ("kernels/CMakeLists.txt", "kernels/cmake", "kernels/src", "runners/cpp", "runners/python/CMakeLists.txt")
_LINES_SHOWN = 15
#: Each of two processes compiles half of the runner's files as one, because reading headers takes most of the time.
_UNITY = ("-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_UNITY_BUILD_BATCH_SIZE=13")


@dataclass(frozen=True)
class NativePackage:
    """The result of `build_native`.

    Attributes:
        kernels: Library of the operators.
        runner: Library of the C++ runner's C interface, linked with the operators.
        is_new: False if the libraries were up to date.
    """

    kernels: Path
    runner: Path
    is_new: bool


def build_native(sources: Path | None = None, output: Path | None = None, options: Sequence[str] = ()) -> NativePackage:
    """Compile both libraries, unless sources, options and executorch are those of the last build.

    Args:
        sources: The repository; by default the checkout that this package runs from.
        output: Folder to write; by default where the package finds the libraries.
        options: Further arguments of CMake.

    Raises:
        InputError: If there are no sources, or the folder cannot be written.
        MissingDependencyError: If cmake, a compiler, Highway or executorch is missing, or the compiler fails; with the
            end of its output.
    """
    sources = SOURCES if sources is None else sources
    if not (sources / "runners" / "python" / "CMakeLists.txt").is_file():
        raise InputError(f"sources must be a clone of the repository, got {sources}; clone it and pass --sources DIR")
    folder = installed_path().parent if output is None else output
    package = NativePackage(folder / KERNELS, folder / RUNNER, True)
    stamp, digest = folder / STAMP, _digest(sources, options)
    if package.kernels.is_file() and package.runner.is_file() and stamp.is_file() and stamp.read_text() == digest:
        return NativePackage(package.kernels, package.runner, False)
    if missing := missing_tools():
        raise MissingDependencyError(f"the native package needs {missing}")
    cmake = find_cmake()
    assert cmake is not None
    with tempfile.TemporaryDirectory(prefix="exportable-cache-native-") as build:
        settings = [f"-DPython3_EXECUTABLE={sys.executable}", "-DEC_NATIVE_FOLDER=.", *_UNITY, *options]
        _run([cmake, "-S", str(sources / "runners" / "python"), "-B", build, *settings])
        _run([cmake, "--build", build, "--parallel", str(os.cpu_count() or 1)])
        made = Path(build, "installed")
        _run([cmake, "--install", build, "--component", "native", "--prefix", str(made)])
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stamp.unlink(missing_ok=True)
            for path in (package.kernels, package.runner):
                # Replaced by a rename, because a process may have the old file mapped.
                partial = path.with_name(f".{path.name}.{os.getpid()}")
                shutil.copyfile(made / path.name, partial)
                partial.replace(path)
            stamp.write_text(digest)
        except OSError as error:
            raise InputError(f"{folder} cannot be written: {error}; choose another folder with --output") from error
    return package


def find_cmake() -> str | None:
    """Return cmake of this environment or of PATH, or None."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return shutil.which("cmake", path=path)


def missing_tools() -> str:
    """Return what is missing to build the native package and the commands that install it, or an empty string."""
    packages = []
    compiler = _compiler()
    if compiler is None:
        packages.append("g++")
    # Only the usual header, although CMake also finds Highway elsewhere.
    if not any(Path(prefix, "include", "hwy", "highway.h").is_file() for prefix in _highway_prefixes()):
        packages.append("libhwy-dev")
    names = {"g++": "a C++20 compiler", "libhwy-dev": "Google Highway"}
    missing = [names[package] for package in packages]
    commands = [f"apt install {' '.join(packages)}"] if packages else []
    if find_cmake() is None:
        missing.append("cmake")
        commands.append("pip install cmake")
    return f"{' and '.join(missing)} ({'; '.join(commands)})" if missing else ""


def _compiler() -> str | None:
    """Return the compiler that CMake would use, or None."""
    named = os.environ.get("CXX")
    return (
        shutil.which(named.split()[0])
        if named
        else next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    )


def _highway_prefixes() -> list[str]:
    named = (os.environ.get(name, "") for name in ("hwy_ROOT", "CMAKE_PREFIX_PATH"))
    return [*filter(None, (part for value in named for part in value.split(os.pathsep))), "/usr/local", "/usr"]


def _digest(sources: Path, options: Sequence[str]) -> str:
    """Return a digest of what the libraries are built from."""
    digest = hashlib.sha256()
    # The release of executorch is in the folder's name, but another Python may have its headers elsewhere.
    for text in (sys.executable, str(installed_path()), os.environ.get("CXX", ""), *options):
        digest.update(text.encode() + b"\0")
    for path in _sources(sources):
        digest.update(path.relative_to(sources).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _sources(root: Path) -> Iterator[Path]:
    for name in _FOLDERS:
        path = root / name
        yield from sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return
    said = (done.stdout + done.stderr).strip()
    end = "\n".join(said.splitlines()[-_LINES_SHOWN:])
    remedy = "see the compiler's output above"
    if "hwy" in said and "Could not find" in said:
        remedy = "install Google Highway (on Debian and Ubuntu: apt install libhwy-dev)"
    elif "CMAKE_CXX_COMPILER" in said:
        remedy = "install a C++20 compiler (on Debian and Ubuntu: apt install g++)"
    elif "has no executorch" in said:
        remedy = "pip install 'exportable-cache[executorch]'"
    raise MissingDependencyError(f"{end}\nthe native package cannot be compiled; {remedy}")
