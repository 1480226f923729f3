"""Private names of torch that compile a graph by regions, seen in 2.13.0. Importing this imports the compiler.

| name | without it |
|---|---|
| `torch._dynamo.aot_compile_types.SerializableCallable` | graphs compiled by regions are not kept on disk |
| `torch._inductor.standalone_compile` and its `AOTCompiledArtifact` | every layer is compiled |
| `torch._inductor.compile` | graphs without equal layers are not compiled |
| `torch.UntypedStorage._cdata` | regions whose inputs share memory are not told, and compiled wrongly |
| `torch.fx.experimental.symbolic_shapes.free_symbols`, `SymNode.shape_env` | regions of prompts are not told apart |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.aot_compile_types import SerializableCallable
from torch._inductor import standalone_compile
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
