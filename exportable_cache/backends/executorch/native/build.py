"""Compile the kernels of `kernels/` for this environment's executorch.

This is a separate step after the install, because pip's isolated build environment does not have the headers of the
installed executorch wheel.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ....common.native.kernels import FILE, installed_path
from ....errors import InputError, MissingDependencyError

#: Sources next to the package, in a checkout.
SOURCES = Path(__file__).parents[4] / "kernels"
_HIGHWAY = "install Google Highway (on Debian and Ubuntu: apt install libhwy-dev)"
_LINES_SHOWN = 15


def build_kernels(sources: Path | None = None, output: Path | None = None, options: Sequence[str] = ()) -> Path:
    """Compile the library.

    Args:
        sources: Folder `kernels` of the repository; by default that of the checkout this package runs from.
        output: File to write; by default where `load_native_kernels` finds it.
        options: Further arguments of CMake.

    Returns:
        Path of the library.

    Raises:
        InputError: If there are no sources, or the file cannot be written.
        MissingDependencyError: If cmake, a compiler, Highway or executorch is missing, or the compiler fails; with the
            end of its output.
    """
    sources = SOURCES if sources is None else sources
    if not (sources / "CMakeLists.txt").is_file():
        raise InputError(
            f"sources must be the folder kernels of the repository, got {sources}; clone it and pass --sources kernels"
        )
    cmake = find_cmake()
    if cmake is None:
        raise MissingDependencyError("cmake is not installed; pip install cmake")
    target = installed_path() if output is None else output
    with tempfile.TemporaryDirectory(prefix="exportable-cache-kernels-") as folder:
        settings = [f"-DPython3_EXECUTABLE={sys.executable}", *options]
        _run([cmake, "-S", str(sources), "-B", folder, *settings])
        _run([cmake, "--build", folder, "--parallel", str(os.cpu_count() or 1)])
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            # Replaced by a rename, because a process may have the old file mapped.
            partial = target.with_name(f".{FILE}.{os.getpid()}")
            shutil.copyfile(Path(folder) / FILE, partial)
            partial.replace(target)
        except OSError as error:
            raise InputError(f"{target} cannot be written: {error}; choose another file with --output") from error
    return target


def find_cmake() -> str | None:
    """Return cmake of this environment or of PATH, or None."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return shutil.which("cmake", path=path)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return
    said = (done.stdout + done.stderr).strip()
    end = "\n".join(said.splitlines()[-_LINES_SHOWN:])
    remedy = "see the compiler's output above"
    if "hwy" in said and "Could not find" in said:
        remedy = _HIGHWAY
    elif "CMAKE_CXX_COMPILER" in said:
        remedy = "install a C++17 compiler (on Debian and Ubuntu: apt install g++)"
    elif "has no executorch" in said:
        remedy = "pip install 'exportable-cache[executorch]'"
    raise MissingDependencyError(f"{end}\nthe native kernels cannot be compiled; {remedy}")
