"""Compiling the attention kernels of `kernels/` for this environment's executorch.

They are compiled against the headers of the installed wheel, which the isolated environment that pip builds packages in
does not have: so this is a step of its own, after the install.
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

#: The sources beside the package, in a checkout.
SOURCES = Path(__file__).parents[4] / "kernels"
_HIGHWAY = "install Google Highway (on Debian and Ubuntu: apt install libhwy-dev)"
_LINES_SHOWN = 15


def build_kernels(sources: Path | None = None, output: Path | None = None, options: Sequence[str] = ()) -> Path:
    """Compile the library.

    Args:
        sources: The repository's folder `kernels`; that of the checkout this package runs from by default.
        output: The file to write; where `load` finds it by default.
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
            f"{sources} has no sources of the kernels; clone the repository and name its folder: --sources kernels"
        )
    cmake = find_cmake()
    if cmake is None:
        raise MissingDependencyError("there is no cmake; install it: pip install cmake")
    target = installed_path() if output is None else output
    with tempfile.TemporaryDirectory(prefix="exportable-cache-kernels-") as folder:
        settings = [f"-DPython3_EXECUTABLE={sys.executable}", *options]
        _run([cmake, "-S", str(sources), "-B", folder, *settings])
        _run([cmake, "--build", folder, "--parallel", str(os.cpu_count() or 1)])
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            # Under a name of its own first: a process may have the old one mapped.
            beside = target.with_name(f".{FILE}.{os.getpid()}")
            shutil.copyfile(Path(folder) / FILE, beside)
            beside.replace(target)
        except OSError as error:
            raise InputError(f"{target} cannot be written: {error}; name another place with --output") from error
    return target


def find_cmake() -> str | None:
    """cmake of the path, or of this environment."""
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return shutil.which("cmake", path=beside)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return
    said = (done.stdout + done.stderr).strip()
    end = "\n".join(said.splitlines()[-_LINES_SHOWN:])
    remedy = "see the end of its output above the error"
    if "hwy" in said and "Could not find" in said:
        remedy = _HIGHWAY
    elif "CMAKE_CXX_COMPILER" in said:
        remedy = "install a C++17 compiler (on Debian and Ubuntu: apt install g++)"
    elif "has no executorch" in said:
        remedy = "pip install 'exportable-cache[executorch]'"
    raise MissingDependencyError(f"{end}\nthe attention kernels cannot be compiled; {remedy}")
