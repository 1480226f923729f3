"""The compiled attention kernels of this package, from `kernels/`, and how a process chooses them.

They implement ExecuTorch's operators `llama::custom_sdpa`, `update_cache` and `update_cache_with_indices`.
`exportable-cache native build` compiles them into the environment. Without them, the kernels of ExecuTorch's wheel run
the same programs.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path

from exportable_cache_runner.installed import release_folder

from ...errors import MissingDependencyError, first_line

#: Variable that chooses the kernels: the path of a compiled library, or `executorch` for those of the wheel. The
#: default is the compiled library of this environment, if there is one.
VARIABLE = "EXPORTABLE_CACHE_KERNELS"
#: Variable that limits the instruction set, by Highway's name: `SSE4`, `AVX2`, `AVX3` for AVX-512, `NEON`.
TARGET_VARIABLE = "EXPORTABLE_CACHE_KERNELS_TARGET"
FILE = "libexportable_cache_kernels.so"
_WHEEL_KERNELS = "executorch"
BUILD = "exportable-cache native build"


@dataclass(frozen=True, eq=False)
class NativeKernels:
    """A loaded library of kernels.

    Attributes:
        path: File of the library.
        library: Its C functions.
    """

    path: Path
    library: ctypes.CDLL

    @property
    def target(self) -> str:
        """Instruction set in use, by Highway's name: `AVX3` is AVX-512."""
        self.library.exportable_cache_kernels_target.restype = ctypes.c_char_p
        return self.library.exportable_cache_kernels_target().decode()

    def limit_target(self, name: str) -> None:
        """Use at most this instruction set in this process.

        Raises:
            MissingDependencyError: If the processor or the library does not have it.
        """
        if not self.library.exportable_cache_kernels_limit_target(name.encode()):
            raise MissingDependencyError(
                f"the attention kernels have no {name!r} here; the best of this processor is {self.target!r}"
            )

    @property
    def threads(self) -> int:
        """Number of threads of ExecuTorch's pool, which the kernels share."""
        return int(self.library.exportable_cache_kernels_threads())

    @property
    def attention_calls(self) -> int:
        """Number of attention calls since the library was loaded."""
        self.library.exportable_cache_kernels_attention_calls.restype = ctypes.c_longlong
        return int(self.library.exportable_cache_kernels_attention_calls())


def installed_path() -> Path:
    """Return where `exportable-cache native build` puts the library.

    The path has the release of executorch, because the library depends on its tensor layout.
    """
    return Path(sysconfig.get_path("platlib"), release_folder(), FILE)


def chosen_path() -> Path | None:
    """Return the library that this process loads, or None for the wheel's kernels.

    Raises:
        MissingDependencyError: If the variable names a missing file.
    """
    choice = os.environ.get(VARIABLE, "")
    if choice == _WHEEL_KERNELS:
        return None
    if choice:
        path = Path(choice)
        if not path.is_file():
            raise MissingDependencyError(
                f"{VARIABLE} is {choice!r}, but there is no such file; build it with `{BUILD}`, or set "
                f"{_WHEEL_KERNELS!r} for the kernels of executorch's wheel"
            )
        return path
    path = installed_path()
    return path if path.is_file() else None


@functools.cache
def load_native_kernels() -> NativeKernels | None:
    """Register the kernels with ExecuTorch's loaded runtime; return None if the wheel's kernels are used.

    Raises:
        MissingDependencyError: If a library named by the variable cannot be loaded. An installed library that fails to
            load gives a warning instead.
    """
    path = chosen_path()
    if path is None:
        return None
    try:
        kernels = NativeKernels(path, ctypes.CDLL(str(path)))
    except OSError as error:
        message = f"the attention kernels {path} cannot be loaded: {first_line(error)}; build them again: `{BUILD}`"
        if os.environ.get(VARIABLE):
            raise MissingDependencyError(message) from error
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return None
    limit = os.environ.get(TARGET_VARIABLE)
    if limit:
        kernels.limit_target(limit)
    return kernels


def kernels_remedy() -> str:
    """Return what to do where the kernels are needed and not loaded."""
    if os.environ.get(VARIABLE) == _WHEEL_KERNELS:
        return f"unset {VARIABLE}, which is {_WHEEL_KERNELS!r}"
    return BUILD
