"""Private names of torch that have several kernels compiled as one file, seen in 2.13.0. Importing this imports the
compiler.

| name | without it |
|---|---|
| `torch._inductor.async_compile.AsyncCompile.cpp_pybinding`, `wait`, `get_compile_threads` | a file for each kernel |
| `torch._inductor.codecache.CppPythonBindingsCodeCache`, its templates and loaders, `LambdaFuture` | the same |

A file of its own costs a kernel two thirds of the time that the C++ compiler takes for it: 0.4 of 1 second to read
headers, though precompiled, and 0.3 to link.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.codecache import CppPythonBindingsCodeCache, LambdaFuture

from ..patch import Patch, torch_patch

log = logging.getLogger(__name__)

#: Kernels in a file: a layer has about half of that. Files of larger graphs are compiled at the same time.
KERNELS_IN_A_FILE = 16
_HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>"
#: One function, and nothing else that two kernels could both define.
_ONE_FUNCTION = re.compile(r'\s*extern "C"\s+void\s+kernel\s*\([^{;]*\)\s*\{.*\n\}\s*', re.DOTALL)
#: At the begin of a line: a second definition, or a macro.
_ANOTHER = re.compile(r"^(?:[A-Za-z_\[]|#(?!pragma (?:GCC|omp)))", re.MULTILINE)
#: What the code that takes arguments from Python defines.
_BINDING = ("kernel", "parse_arg", "py_methods", "py_module", "_torchinductor_pyobject_tensor_data_ptr")
_INCLUDES = "#define PY_SSIZE_T_CLEAN\n#include <Python.h>\n#include <sstream>\n#include <cstdlib>\n#include <cerrno>\n"

Kernel = Callable[..., None]


_BIND = torch_patch(
    "_inductor.async_compile", "AsyncCompile.cpp_pybinding", "it has a file for each kernel", "5da878aeaf11a457"
)
_WAIT = torch_patch(
    "_inductor.async_compile", "AsyncCompile.wait", "it waits for each kernel by itself", "2df746cba5766066"
)
PATCHES: tuple[Patch, ...] = (_BIND, _WAIT)


class _Files:
    """The kernels of one generated module, in files of several.

    Attributes:
        files: Each a list of argument types and source; the last one takes more.
    """

    def __init__(self, submit: Callable[..., Any] | None) -> None:
        self.files: list[list[tuple[Sequence[str], str]]] = []
        self._submit = submit
        self._loaded: dict[int, Sequence[Kernel]] = {}
        self._loaders: dict[int, Callable[[], Sequence[Kernel]]] = {}

    def add(self, argtypes: Sequence[str], source: str) -> LambdaFuture:
        """A kernel, which is there once `LambdaFuture.result` is asked for."""
        if not self.files or len(self.files[-1]) == KERNELS_IN_A_FILE:
            self.files.append([])
        file, index = len(self.files) - 1, len(self.files[-1])
        self.files[-1].append((argtypes, source))
        return LambdaFuture(lambda: self.functions(file)[index])

    def start(self) -> None:
        """Have all files compiled, at the same time where Inductor has threads for it."""
        for number, kernels in enumerate(self.files):
            if number not in self._loaders:
                self._loaders[number] = _loader(kernels, self._submit)

    def functions(self, file: int) -> Sequence[Kernel]:
        """Those of a file."""
        self.start()
        if file not in self._loaded:
            self._loaded[file] = self._loaders[file]()
        return self._loaded[file]


@contextmanager
def kernels_together() -> Iterator[None]:
    """A block in which the kernels of each graph that Inductor compiles or loads are one file, or few."""
    known: WeakKeyDictionary[AsyncCompile, _Files] = WeakKeyDictionary()

    def bind(alone: Callable[..., Any]) -> Callable[..., Any]:
        def cpp_pybinding(self: AsyncCompile, argtypes: list[str], source_code: str) -> Any:
            if not _is_one_function(source_code):
                return alone(self, argtypes, source_code)
            if self not in known:
                known[self] = _Files(self.submit if get_compile_threads() > 1 else None)
            return known[self].add(argtypes, source_code)

        return cpp_pybinding

    def wait(wait_for_others: Callable[..., None]) -> Callable[..., None]:
        def wait_together(self: AsyncCompile, scope: dict[str, Any]) -> None:
            files = known.pop(self, None)
            if files is not None:
                files.start()
                for name, value in scope.items():
                    if isinstance(value, LambdaFuture):
                        scope[name] = value.result()
            wait_for_others(self, scope)

        return wait_together

    with _BIND.during(bind), _WAIT.during(wait):
        yield


def _is_one_function(source: str) -> bool:
    """Whether a kernel can share a file with others: templates of matrix products define more than the function."""
    head, found, body = source.partition(_HEADER)
    if not found or head.strip() or _ONE_FUNCTION.fullmatch(body) is None:
        return False
    return len(_ANOTHER.findall(body)) == 1


def _loader(kernels: Sequence[tuple[Sequence[str], str]], submit: Callable[..., Any] | None) -> Callable[[], Any]:
    """What gives the functions of a file, once it is compiled."""
    if len(kernels) == 1:
        ((argtypes, source),) = kernels
        one = CppPythonBindingsCodeCache.load_pybinding_async(argtypes, source, submit_fn=submit)
        return lambda: (one(),)
    cache: Any = type("Kernels", (_KernelsCache,), {"count": len(kernels)})
    load = cache.load_async(text_of(kernels), "cpu", submit_fn=submit)
    return lambda: load().functions


class _KernelsCache(CppPythonBindingsCodeCache):
    """Loads a file of several kernels: to Python each is an extension module in the same library."""

    count = 0

    @classmethod
    def _load_library_inner(cls, path: str, key: str) -> Any:
        functions = []
        for index in range(cls.count):
            name = f"kernel_{index}"
            module = type("One", (CppPythonBindingsCodeCache,), {"entry_function": name})
            load = CppPythonBindingsCodeCache.__dict__["_load_library_inner"].__func__
            functions.append(getattr(load(module, path, key), name))
        return SimpleNamespace(functions=functions)


def text_of(kernels: Sequence[tuple[Sequence[str], str]]) -> str:
    """A file of several kernels, each with its own code that takes arguments from Python."""
    parts = [f"{_HEADER}\n{_INCLUDES}"]
    for index, (argtypes, source) in enumerate(kernels):
        parse = ", ".join(
            f"parse_arg<{kind.replace('const ', '')}>(args, {place})" for place, kind in enumerate(argtypes)
        )
        cache = CppPythonBindingsCodeCache
        binding = cache.suffix_template.format(
            arg_len=len(argtypes),
            call_entry_func=cache.call_entry_function.format(parse),
            entry_func=f"kernel_{index}",
            extra_parse_arg=cache.extra_parse_arg,
        )
        parts += [f"#define {name} {name}_{index}\n" for name in _BINDING]
        parts += [source.partition(_HEADER)[2], binding]
        parts += [f"#undef {name}\n" for name in _BINDING]
    return "".join(parts)
