"""Private names of torch by which the calls of compiled code are noted, seen in 2.13.0. Importing this imports a
part of the compiler.

| name | without it |
|---|---|
| `torch._inductor.codecache.PyCodeCache.modules`, and how generated modules name kernels | Python calls them |
| `torch.utils._python_dispatch.is_traceable_wrapper_subclass` | steps of quantised models fail |
"""

from __future__ import annotations

import ctypes
import functools
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import BuiltinFunctionType, ModuleType
from typing import Any, NamedTuple

from torch._inductor.codecache import PyCodeCache
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from .torch import OpOverload

_KERNEL = re.compile(r"^(\w+) = async_compile\.cpp_pybinding\(\[([^\]]*)\]", re.MULTILINE)
_LIBRARY = ".so"
#: One thread notes at a time: what another has put in the place of a module's functions would be put back for good.
_NOTING = threading.RLock()


class GeneratedKernel(NamedTuple):
    """A function that Inductor has generated.

    Attributes:
        address: Of the function, which takes tensors as pointers.
        kinds: Its arguments' types, in C++.
    """

    address: int
    kinds: tuple[str, ...]


#: Told of each kernel, None where it is not known what it is, and its arguments in Python.
OnKernel = Callable[["GeneratedKernel | None", tuple[Any, ...]], None]
#: Told of each operator of torch, its arguments, and what it gave.
OnOperator = Callable[[OpOverload, tuple[Any, ...], Any], None]


@contextmanager
def calls_noted(on_kernel: OnKernel, on_operator: OnOperator) -> Iterator[None]:
    """A block in which this thread's calls of generated kernels and of operators are told of, in their order."""
    thread = threading.get_ident()
    with _NOTING:
        replaced = [
            (vars(module), name, function)
            for module in list(PyCodeCache.modules)
            for name, function in list(vars(module).items())
            if _library_of(function)
        ]
        try:
            for names, name, function in replaced:
                names[name] = _noting(function, _kernel(names, name, function), on_kernel, thread)
            with _Operators(on_operator):
                yield
        finally:
            for names, name, function in replaced:
                names[name] = function


def is_wrapper(value: Any) -> bool:
    """Whether it is a tensor that is made of others."""
    return is_traceable_wrapper_subclass(value)


class _Operators(TorchDispatchMode):
    def __init__(self, on_operator: OnOperator) -> None:
        super().__init__()
        self._on_operator = on_operator

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._on_operator(func, (*args, *(kwargs or {}).values()), result)
        return result


def _noting(
    function: Callable[..., None], kernel: GeneratedKernel | None, on_kernel: OnKernel, thread: int
) -> Callable[..., None]:
    def noted(*arguments: Any) -> None:
        function(*arguments)
        if threading.get_ident() == thread:
            on_kernel(kernel, arguments)

    return noted


def _library_of(value: Any) -> str:
    """The file of machine code that a function is from, "" of what is none."""
    if not isinstance(value, BuiltinFunctionType) or not isinstance(value.__self__, ModuleType):
        return ""
    origin = getattr(getattr(value.__self__, "__spec__", None), "origin", None) or ""
    # Those of torch are not from files that come with generated modules.
    return origin if origin.endswith(_LIBRARY) and not value.__self__.__name__.startswith("torch.") else ""


def _kernel(names: Mapping[str, Any], name: str, function: Any) -> GeneratedKernel | None:
    kinds = _argument_kinds(names["__file__"]).get(name)
    if kinds is None:
        return None
    address = ctypes.cast(getattr(ctypes.CDLL(_library_of(function)), function.__name__), ctypes.c_void_p).value
    return None if address is None else GeneratedKernel(address, kinds)


@functools.lru_cache(maxsize=256)
def _argument_kinds(path: str) -> dict[str, tuple[str, ...]]:
    """Of each kernel of a generated module."""
    return {
        name: tuple(kind.strip(" '\"") for kind in kinds.split(","))
        for name, kinds in _KERNEL.findall(Path(path).read_text())
    }
