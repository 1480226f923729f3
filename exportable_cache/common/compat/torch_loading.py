"""Private names of torch that load compiled graphs without the compiler, seen in 2.13.0.

Importing this imports a part of the compiler.

| name | without it |
|---|---|
| `torch._inductor.codecache.FxGraphCache.cache_hit_post_compile` | the first graph loads in three times the time |
| `torch._inductor.output_code.CompiledFxGraph.write_to_disk`, `codecache.code_hash`, `get_path` | the same |
| `torch._inductor.codecache.write_atomic`, `CompiledFxGraph._triton_bundle` | the same |
| `torch._functorch._aot_autograd.aot_autograd_result.BundledOutputCodeLoadable.post_compile` | the same |
| `torch._inductor.graph`, `torch._inductor.select_algorithm.extern_kernels`, `KernelNamespace` | the same |
| `torch._inductor.hooks`, `torch._functorch._aot_autograd.subclass_codegen` | they are imported with the first graph |

Of the 0.7 processor seconds that the first graph of a process takes to load, 0.45 are imports of the compiler for three
names: a hook of tests, and two imports in generated code that seldom uses them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from torch._functorch._aot_autograd.aot_autograd_result import BundledOutputCodeLoadable
from torch._inductor.codecache import code_hash, get_path, write_atomic
from torch._inductor.output_code import CompiledFxGraph

from ..patch import Patch, torch_patch

#: The compiler's module. Once it is imported, avoiding it saves nothing.
_COMPILER = "torch._inductor.graph"
#: Imports of the compiler in generated code, by the imported name.
IMPORTS = {
    "align": "from torch._inductor.codegen.memory_planning import _align as align\n",
    "extern_kernels": "from torch._inductor.select_algorithm import extern_kernels\n",
}
#: Attributes of `extern_kernels` that are torch functions.
PLAIN_KERNELS = ("mm", "addmm", "bmm", "baddbmm")
_PLAIN = "from types import SimpleNamespace\nextern_kernels = SimpleNamespace({})\n".format(
    ", ".join(f"{name}=torch.{name}" for name in PLAIN_KERNELS)
)

_HIT = torch_patch(
    "_inductor.codecache",
    "FxGraphCache.cache_hit_post_compile",
    "it imports the compiler, for a hook of tests",
    "91c203a0bcf8ed65",
)
_WRITE = torch_patch(
    "_inductor.output_code",
    "CompiledFxGraph.write_to_disk",
    "what it writes imports the compiler, for names that it does not use",
    "c0f25cb5d4d05b90",
)
_POST = torch_patch(
    "_functorch._aot_autograd.aot_autograd_result",
    "BundledOutputCodeLoadable.post_compile",
    "what it gives looks into the compiler at each call, for a record of tests",
    "31b15504593fd6b2",
)
PATCHES: tuple[Patch, ...] = (_HIT, _WRITE, _POST)
#: Modules that torch imports when a process loads its first graph.
_IMPORTED_LATE = (
    "torch._functorch._aot_autograd.subclass_codegen",
    "torch._inductor.hooks",
    "torch.fx.experimental.validator",
    "torch.utils.cpp_extension",
)


def import_loader() -> None:
    """Import the modules that loading a graph needs."""
    for name in _IMPORTED_LATE:
        # Another release may not have the module; it then imports its own with the graph.
        with suppress(ImportError):
            import_module(name)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Load graphs from disk within a block without importing the compiler, unless a graph needs it.

    Loaded graphs are called in fewer steps; they cannot be written again, and profilers do not list them.
    """
    with ExitStack() as stack:
        # All patches or none, because each is useless without the others.
        if all(stack.enter_context(patch.during(replace)) for patch, replace in _REPLACEMENTS):
            yield
            return
    yield


def _loaded(load: Callable[..., Any]) -> Callable[..., Any]:
    def load_alone(graph: CompiledFxGraph, cache_info: Any, constants: Any) -> tuple[CompiledFxGraph, Any]:
        bundle = graph._triton_bundle
        if _COMPILER in sys.modules or (bundle and (bundle.kernel_artifacts or bundle.static_autotuners)):
            return load(graph, cache_info, constants)
        graph.after_deserialization(constants)
        return graph, cache_info

    return load_alone


def _written(write: Callable[..., str]) -> Callable[..., str]:
    def write_alone(self: CompiledFxGraph) -> str:
        code = self.source_code if _COMPILER in sys.modules else self_contained(self.source_code)
        if code == self.source_code:
            return write(self)
        path = get_path(code_hash(code), "py")[2]
        if not Path(path).exists():
            write_atomic(path, code, make_dirs=True)
        return path

    return write_alone


def _callable(finish: Callable[..., Any]) -> Callable[..., Any]:
    def finish_alone(self: BundledOutputCodeLoadable, result: Any, options: Any) -> Any:
        graph = finish(self, result, options)
        if _COMPILER in sys.modules or type(graph) is not CompiledFxGraph or graph.current_callable is None:
            return graph
        code: Callable[..., Any] = graph.current_callable

        def call(inputs: Sequence[Any]) -> Any:
            return code(inputs)

        # The graph reads this attribute from its code.
        vars(call)["graph"] = graph
        return call

    return finish_alone


_REPLACEMENTS = ((_HIT, _loaded), (_WRITE, _written), (_POST, _callable))


def self_contained(code: str) -> str:
    """Return a generated module without imports that it does not use, or that only import functions of torch."""
    for name, line in IMPORTS.items():
        used = set(re.findall(rf"\b{name}\b(?:\.(\w+))?", code.replace(line, "")))
        if not used:
            code = code.replace(line, "")
        elif name == "extern_kernels" and used <= {*PLAIN_KERNELS}:
            code = code.replace(line, _PLAIN)
    return code
