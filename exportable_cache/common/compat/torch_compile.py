"""Private names of torch that compile a graph by regions, seen in 2.13.0. Importing this imports the compiler.

| name | without it |
|---|---|
| `torch._dynamo.aot_compile_types.SerializableCallable` | graphs compiled by regions are not kept on disk |
| `torch._inductor.standalone_compile` and its `AOTCompiledArtifact` | every layer is compiled |
| `torch._dynamo.package.SourceInfo.add_code` | a graph that is kept takes a tenth longer to compile |
| `torch._inductor.codecache.CppCodeCache.load_async`, `runtime.cache_dir_utils.cache_dir` | graphs lack their code |
| `torch._inductor.cpu_vec_isa.VecISA._probe_load`, `codecache._precompile_header` | a graph from disk takes longer |
| `VecISA.__bool__impl.cache_clear`, `cpu_vec_isa.valid_vec_isa_list` | so does one of a process that compiled before |
| `torch._inductor.compile` | graphs without equal layers are not compiled |
| `torch.UntypedStorage._cdata` | regions whose inputs share memory are not told, and compiled wrongly |
| `torch.fx.experimental.symbolic_shapes.free_symbols`, `SymNode.shape_env` | regions of prompts are not told apart |
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any
from unittest import mock

import torch
from torch._dynamo.aot_compile_types import SerializableCallable
from torch._dynamo.package import SourceInfo
from torch._inductor import codecache, standalone_compile
from torch._inductor.codecache import CppCodeCache
from torch._inductor.cpu_vec_isa import VecISA, valid_vec_isa_list
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.standalone_compile import AOTCompiledArtifact
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_symbols as symbols_in

__all__ = ["FakeTensor", "SerializableCallable"]


def free_symbols(value: Any) -> dict[Any, Any]:
    """The symbols in a tensor's shape, strides and offset, or in a size, each with the tensor's environment of
    symbols.
    """
    if isinstance(value, FakeTensor):
        sizes = [*value.shape, *value.stride(), value.storage_offset()]
    else:
        sizes = list(value) if isinstance(value, (list, tuple)) else [value]
    symbols: dict[Any, Any] = {}
    for size in sizes:
        if isinstance(size, (FakeTensor, list, tuple)):
            symbols |= free_symbols(size)
        elif isinstance(size, (torch.SymInt, torch.SymBool, torch.SymFloat)):
            symbols |= dict.fromkeys(sorted(symbols_in(size), key=str), size.node.shape_env)
    return symbols


def storage_of(tensor: FakeTensor) -> int:
    """The same for fake tensors of one storage."""
    return tensor.untyped_storage()._cdata


def symbol_range(symbol: Any, environment: Any) -> str:
    """Which values a symbolic size is known to have."""
    return str(environment.var_to_range.get(symbol))


@contextmanager
def sources_once() -> Iterator[None]:
    """A block in which `aot_compile` notes the source of each traced function once, and not at each of its calls."""
    noted: set[tuple[int, CodeType]] = set()
    add_code = SourceInfo.add_code

    def add_new_code(self: SourceInfo, code: CodeType) -> None:
        if (id(self), code) not in noted:
            noted.add((id(self), code))
            add_code(self, code)

    with mock.patch.object(SourceInfo, "add_code", add_new_code):
        yield


@contextmanager
def libraries_noted(found: set[Path]) -> Iterator[None]:
    """A block in which Inductor's machine code is noted: the files of kernels that it loads, and those by which it
    tries the processor.
    """
    load, probe = CppCodeCache.__dict__["load_async"].__func__, VecISA._probe_load

    def load_noted(cls: type, *arguments: Any, **options: Any) -> Any:
        loader = load(cls, *arguments, **options)
        found.add(Path(inspect.getclosurevars(loader).nonlocals["binary_path"]))
        return loader

    def probe_noted(self: VecISA, path: str) -> bool:
        found.add(Path(path))
        return probe(self, path)

    with (
        mock.patch.object(CppCodeCache, "load_async", classmethod(load_noted)),
        mock.patch.object(VecISA, "_probe_load", probe_noted),
    ):
        yield


def forget_processor() -> None:
    """Have Inductor try the processor again when it compiles next, from its files where they are there.

    That it has tried it keeps in memory, where `libraries_noted` does not see by which files.
    """
    valid_vec_isa_list.cache_clear()
    VecISA._VecISA__bool__impl.cache_clear()  # type: ignore[attr-defined]


@contextmanager
def processor_known() -> Iterator[None]:
    """A block that loads what was compiled for this processor. Inductor would start an interpreter for each set of
    vector instructions, to try it, and compile headers first that no kernel needs which is compiled.
    """
    with (
        mock.patch.object(VecISA, "_probe_load", lambda self, path: True),
        mock.patch.object(codecache, "_precompile_header", lambda *arguments, **options: ""),
    ):
        yield


def code_folder() -> Path:
    """Where Inductor keeps machine code."""
    return Path(cache_dir())


def compile_whole(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """What torch.compile's default backend makes of a graph."""
    return torch._inductor.compile(module, list(inputs))


def compile_region(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Part of a graph that TorchDynamo is compiling, over its fake tensors, compiled by Inductor in a form that can be
    written.
    """
    return standalone_compile(module, list(inputs), dynamic_shapes="from_tracing_context", options={}, aot=True)


def region_function(compiled: Any) -> Callable[..., Sequence[Any]]:
    """What `compile_region` made, to be called with its inputs one by one."""
    return compiled.inner_fn.compiled_fn


def region_bytes(compiled: Any) -> bytes:
    """What `compile_region` made, to be written."""
    return compiled.serialize()


def region_from_bytes(written: bytes) -> Any:
    """What `region_bytes` gave."""
    return AOTCompiledArtifact.deserialize(written)
