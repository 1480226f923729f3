"""C++ of this package, compiled for this processor on first use and cached for the user, and operators from it.

The compiler is the one that Inductor uses. Cached libraries are loaded without a check, so only the user may write
their folder.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import select
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ...errors import ExportableCacheError, first_line
from ..devices import cpp_compiler
from ..fs.files import PARTIAL, atomic_path, clear_partials
from ..fs.user_files import HAS_OWNERS, home_folder, is_user_file, user_folder

log = logging.getLogger(__name__)

_FOLDER = "machine_code"
#: Time limit of a compilation in seconds; it usually takes about five.
_SECONDS = 300.0


class MachineCode:
    """A library of torch operators that is compiled on first use.

    Args:
        source: C++ file that needs only torch's headers.
        headers: Headers of this package that it includes.
    """

    def __init__(self, source: Path, *headers: Path) -> None:
        self.source, self.headers = source, headers
        self._is_loaded = False
        #: The running compiler, and a pipe that closes when it ends.
        self._begun: tuple[subprocess.Popen[bytes], int] | None = None
        #: Why the library is not available; "" if nothing has failed.
        self.reason = ""

    @functools.cached_property
    def digest(self) -> str:
        """Digest of the sources, the compiler options, torch's release and the processor."""
        sources = (path.read_text() for path in (self.source, *self.headers))
        parts = [*sources, *_OPTIONS, torch.__version__, processor_name(), instructions()]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]

    @property
    def path(self) -> Path:
        """Path of the cached library.

        Raises:
            RuntimeError: If the user has no home directory.
        """
        return home_folder() / _FOLDER / f"{self.source.stem}-{self.digest}.so"

    def can_be_loaded(self) -> bool:
        """Return True if the library is cached or can be compiled. Systems without file owners load nothing."""
        try:
            return not self.reason and HAS_OWNERS and (self.path.is_file() or bool(cpp_compiler()))
        except (OSError, RuntimeError):  # there is no home
            return False

    def begin(self) -> None:
        """Start compiling in a subprocess unless the library is cached; `load` waits for it, also in a fork."""
        if self._is_loaded or self._begun is not None or not self.can_be_loaded() or self.path.is_file():
            return
        try:
            clear_partials(user_folder(self.path.parent, make=True))
            handle, temporary = tempfile.mkstemp(prefix=f".{self.path.name}.", suffix=PARTIAL, dir=self.path.parent)
            os.close(handle)
            ended, write_end = os.pipe()
            try:
                command = ["sh", "-c", _IN_PLACE, temporary, str(self.path), *self._command(temporary)]
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=write_end, stderr=subprocess.DEVNULL
                )
            finally:
                os.close(write_end)
            self._begun = process, ended
        except (ExportableCacheError, OSError) as error:  # `load` says so
            log.info("%s is not compiled ahead: %s", self.source.name, error)

    def load(self, compiles: bool = True) -> bool:
        """Load the operators into this process, once; compile them if they are not cached.

        Args:
            compiles: False to load a cached library only.

        Returns:
            True if the operators are loaded. Failures are logged in one line.
        """
        if self._is_loaded or self.reason:
            return self._is_loaded
        try:
            if not HAS_OWNERS:
                raise OSError("this system does not report file owners")
            if not self.path.is_file():
                if not compiles:
                    return False
                self._wait()
            if not self.path.is_file():
                self._compile()
            folder = user_folder(self.path.parent)
            with self.path.open("rb") as file:
                if not is_user_file(file.fileno()):
                    raise OSError(f"{self.path} must belong to you and be writable by you only")
            torch.ops.load_library(str(folder / self.path.name))
            self._is_loaded = True
        except (ExportableCacheError, OSError, RuntimeError, subprocess.SubprocessError) as error:
            self.reason = first_line(error.__cause__ or error)
            log.warning("%s is not compiled, so torch's operators are used: %s", self.source.name, self.reason)
        return self._is_loaded

    def _wait(self) -> None:
        """Wait for the compilation that `begin` started. If it failed, `_compile` reports why."""
        if self._begun is not None:
            process, ended = self._begun
            select.select([ended], [], [], _SECONDS)
            process.poll()

    def _compile(self) -> None:
        user_folder(self.path.parent, make=True)
        with atomic_path(self.path) as temporary:
            command = self._command(str(temporary))
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
            if done.returncode:
                errors = [line for line in done.stderr.splitlines() if "error" in line]
                raise OSError(f"{command[0]} ends with {done.returncode}: {errors[0] if errors else done.stderr[:200]}")

    def _command(self, target: str) -> list[str]:
        compiler = cpp_compiler()
        if not compiler:
            raise OSError("there is no C++ compiler")
        return [compiler, *_OPTIONS, str(self.source), "-o", target, *_torch_options()]


#: Shell script that runs a command and then moves its output to the final path, or removes it on failure.
_IN_PLACE = 'path=$1; shift; "$@" && mv -f "$0" "$path" || rm -f "$0"'
_NATIVE = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
_OPTIONS = ("-std=c++17", "-O2", _NATIVE, "-ffp-contract=fast", "-fPIC", "-shared", "-w")


def _torch_options() -> list[str]:
    root = Path(torch.__file__).parent
    return [f"-I{root / 'include'}", f"-L{root / 'lib'}", "-ltorch_cpu"]


_CPU_INFO = Path("/proc/cpuinfo")


@functools.cache
def cpu_fields() -> dict[str, str]:
    """Return the fields of the first processor in /proc/cpuinfo; empty on systems without that file."""
    fields: dict[str, str] = {}
    if _CPU_INFO.is_file():
        for line in _CPU_INFO.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    return fields


def processor_name() -> str:
    """Return the processor's name, with family and model if they are known."""
    fields = cpu_fields()
    name = fields.get("model name") or platform.processor() or platform.machine()
    numbers = ", ".join(f"{key} {fields[key]}" for key in ("cpu family", "model") if key in fields)
    return f"{name} ({numbers})" if numbers else name


def instructions() -> str:
    """Return the processor's instruction sets as the system reports them.

    The name is not enough, because a virtual machine may hide some of them.
    """
    fields = cpu_fields()
    return fields.get("flags") or fields.get("Features") or fields.get("isa") or ""


class NativeOperators:
    """A library of native operators.

    Args:
        code: The library's source and how it is compiled.
        variable: Environment variable that disables the operators if it is `torch`.
        shapes: Fake implementation of each operator, by name, see `torch.library.register_fake`.
    """

    def __init__(self, code: MachineCode, variable: str, shapes: Mapping[str, Callable[..., Any]]) -> None:
        self.code, self.variable = code, variable
        self._shapes = shapes
        self._has_shapes = False

    def is_wanted(self) -> bool:
        """Return True if the operators are enabled, and loaded or can be compiled."""
        # Only x86-64, because the results were not tested on other processors.
        is_known = platform.machine() in ("x86_64", "AMD64")
        return is_known and os.environ.get(self.variable, "") != "torch" and self.code.can_be_loaded()

    def identity(self) -> str:
        """Return the digest of the library, for the key of graphs that may call it; "" if it is not used."""
        return self.code.digest if self.is_wanted() else ""

    def begin(self) -> None:
        """Start compiling the library in a subprocess, see `MachineCode.begin`."""
        if self.is_wanted():
            self.code.begin()

    def load(self, compiles: bool = True) -> bool:
        """Load the operators into this process and return True if that worked, see `MachineCode.load`."""
        if not self.is_wanted() or not self.code.load(compiles):
            return False
        if not self._has_shapes:
            self._has_shapes = True
            for name, shape in self._shapes.items():
                torch.library.register_fake(f"exportable_cache::{name}", shape)
        return True

    def are_called_in(self, graph: bytes) -> bool:
        """Return True if a serialized graph calls an operator of this library."""
        return any(name.encode() in graph for name in self._shapes)
