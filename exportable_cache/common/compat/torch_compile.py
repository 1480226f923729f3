"""Private names of torch that compile a graph by regions, seen in 2.13.0. Importing this imports the compiler.

| name | without it |
|---|---|
| `torch._dynamo.aot_compile_types.SerializableCallable` | graphs compiled by regions are not cached on disk |
| `torch._inductor.standalone_compile` and its `AOTCompiledArtifact` | every layer is compiled |
| `torch._dynamo.guards.GuardsStatePickler.reducer_override`, `_Missing` | graphs of torchao's layers are not cached |
| `torch._dynamo.package.SourceInfo.add_code` | a cached graph takes a tenth longer to compile |
| `torch._inductor.codecache.CppCodeCache.load_async`, `runtime.cache_dir_utils.cache_dir` | graphs lack their code |
| `torch._inductor.cpu_vec_isa.VecISA.check_build` | six compilations and interpreters before the first kernel |
| `VecISA._probe_load`, `torch._inductor.codecache._precompile_header` | a graph from disk takes longer |
| caches of `VecISA` and its subclasses, `supported_vec_isa_list`, `valid_vec_isa_list` | old probe results are kept |
| `torch._inductor.config.size_asserts` | a step of 12 layers takes 0.2 to 1 ms longer |
| `torch._inductor.config.inplace_buffers` | wrong results, see `own_buffers` |
| `torch._inductor.compile` | graphs without equal layers are not compiled |
| `torch.UntypedStorage._cdata` | regions whose inputs share memory are not found, and are compiled wrongly |
| `torch.fx.experimental.symbolic_shapes.free_symbols`, `SymNode.shape_env` | regions of prompts are not distinguished |
| `torch.compiler.config.cache_key_tag` | a session with longer chunks of prompts than one before is not compiled |
| `torch._TorchCompileInductorWrapper` | the same, with a `mode` and on a GPU |
| `torch._inductor.async_compile.AsyncCompile.cpp_pybinding`, `wait`, `get_compile_threads` | one file per kernel |
| `torch._inductor.codecache.CppPythonBindingsCodeCache`, its templates and loaders, `LambdaFuture` | the same |

A separate file costs a kernel two thirds of its time in the C++ compiler: of 1 second, 0.4 to read precompiled headers
and 0.3 to link.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import CodeType, MethodType, SimpleNamespace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch._dynamo.aot_compile_types import SerializableCallable
from torch._dynamo.guards import GuardsStatePickler, _Missing
from torch._dynamo.package import SourceInfo
from torch._inductor import standalone_compile
from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.codecache import CppPythonBindingsCodeCache, LambdaFuture
from torch._inductor.cpu_vec_isa import (
    VecAMX,
    VecAVX512,
    VecAVX512VNNI,
    VecISA,
    supported_vec_isa_list,
    valid_vec_isa_list,
)
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.standalone_compile import AOTCompiledArtifact
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_symbols as symbols_in

from ..patch import Patch, torch_patch
from .torch_loading import without_compiler

__all__ = ["FakeTensor", "SerializableCallable"]

log = logging.getLogger(__name__)
Result = TypeVar("Result")

#: True while `with_short_cuts` may skip probes and batch kernels.
_takes_short_cuts = True

_ADD_CODE = torch_patch(
    "_dynamo.package",
    "SourceInfo.add_code",
    "it reads and digests a whole file again for each call of a function that it has noted before",
    "7b5730e312ad4ff5",
)
_REDUCE = torch_patch(
    "_dynamo.guards",
    "GuardsStatePickler.reducer_override",
    "it wants a name of each method, and fails on those that have none",
    *("bf150f4fce286624", "ccdbd27eca5c3a8d"),
)
_LOAD = torch_patch(
    "_inductor.codecache",
    "CppCodeCache.load_async",
    "it does not say which file of machine code it loads",
    *("eba94afa339b25d8", "e10d2b7bd80fcca0"),
)
_PROBE = torch_patch(
    "_inductor.cpu_vec_isa",
    "VecISA._probe_load",
    "it does not say which file it tries the processor by, and starts an interpreter for it",
    "e5fa7c48016931b3",
)
_CHECK = torch_patch(
    "_inductor.cpu_vec_isa",
    "VecISA.check_build",
    "it compiles a kernel for each set of instructions, and starts an interpreter that loads it",
    *("b2f38b7766fe38f1", "c3d4dd058c75501e"),
)
_HEADER = torch_patch(
    "_inductor.codecache",
    "_precompile_header",
    "it compiles headers also where every kernel comes from disk",
    *("a7221f2f90f9eff0", "87dd5f0ced843c79"),
)
_BIND = torch_patch(
    "_inductor.async_compile", "AsyncCompile.cpp_pybinding", "it has a file for each kernel", "5da878aeaf11a457"
)
_WAIT = torch_patch(
    "_inductor.async_compile", "AsyncCompile.wait", "it waits for each kernel separately", "2df746cba5766066"
)
#: Functions of torch that are replaced for the time of a block.
PATCHES: tuple[Patch, ...] = (_ADD_CODE, _REDUCE, _LOAD, _PROBE, _CHECK, _HEADER, _BIND, _WAIT)


def free_symbols(value: Any) -> dict[Any, Any]:
    """Return the symbols in a tensor's shape, strides and offset, or in a size, with the shape environment of each."""
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
    """Return an identifier of a fake tensor's storage."""
    return tensor.untyped_storage()._cdata


def symbol_range(symbol: Any, environment: Any) -> str:
    """Return the known range of a symbolic size, as text."""
    return str(environment.var_to_range.get(symbol))


@contextmanager
def sources_once() -> Iterator[None]:
    """Record the source of each traced function once within a block, instead of once per call."""
    noted: set[tuple[int, CodeType]] = set()

    def once(add_code: Callable[..., None]) -> Callable[..., None]:
        def add_new_code(self: SourceInfo, code: CodeType) -> None:
            if (id(self), code) not in noted:
                noted.add((id(self), code))
                add_code(self, code)

        return add_new_code

    with _ADD_CODE.during(once):
        yield


@contextmanager
def nameless_methods_omitted() -> Iterator[None]:
    """Leave methods without a name out of guards within a block, because they cannot be pickled.

    torchao sets such methods on its layers, for their representation.
    """

    def named(reduce: Callable[..., Any]) -> Callable[..., Any]:
        def reduce_named(self: GuardsStatePickler, value: Any) -> Any:
            if isinstance(value, MethodType) and not hasattr(value, "__name__"):
                return _Missing, ("a method without a name",)
            return reduce(self, value)

        return reduce_named

    with _REDUCE.during(named):
        yield


@contextmanager
def libraries_recorded(found: set[Path]) -> Iterator[None]:
    """Record the files of machine code that Inductor loads within a block, and those that probe the processor."""

    def loads(load: Callable[..., Any]) -> Callable[..., Any]:
        def load_noted(cls: type, *arguments: Any, **options: Any) -> Any:
            loader = load(cls, *arguments, **options)
            found.add(Path(inspect.getclosurevars(loader).nonlocals["binary_path"]))
            return loader

        return load_noted

    def probes(probe: Callable[..., bool]) -> Callable[..., bool]:
        def probe_noted(self: VecISA, path: str) -> bool:
            found.add(Path(path))
            return probe(self, path)

        return probe_noted

    with _LOAD.during(loads), _PROBE.during(probes):
        yield


def forget_processor() -> None:
    """Clear Inductor's cached probes of the processor, so that it probes again, from its files if they exist.

    A cached probe would hide its file from `libraries_recorded`.
    """
    valid_vec_isa_list.cache_clear()
    VecISA._VecISA__bool__impl.cache_clear()  # type: ignore[attr-defined]
    for kind in (VecAVX512, VecAVX512VNNI, VecAMX):
        kind.__bool__.cache_clear()
        kind.is_avx512_bf16_supported.cache_clear()
    VecAMX.is_amx_fp16_supported.cache_clear()
    for one in supported_vec_isa_list:
        # A probe stores its result on the object, which the next probe would reuse.
        vars(one).pop("_is_avx512_bf16_supported", None)
        vars(one).pop("_is_amx_fp16_supported", None)


def takes_short_cuts() -> bool:
    """Return True if everything compiled so far was compiled with the short cuts of `with_short_cuts`."""
    return _takes_short_cuts


def with_short_cuts(compiled: Callable[[], Result]) -> Result:
    """Compile without probing the processor, and with several kernels per file.

    Inductor compiles and loads a small kernel for each vector instruction set first, because the compiler may not
    support what the processor has. Compiling the real kernels shows the same: if it fails, this and all later
    compilations of the process use Inductor's own procedure.
    """
    global _takes_short_cuts
    if _takes_short_cuts:
        try:
            with _CHECK.during(_assume_supported), kernels_in_few_files():
                return compiled()
        except Exception as error:  # if the short cuts are not the cause, the error occurs again below
            log.info("compiled again without short cuts: %s", error)
            _takes_short_cuts = False
            forget_processor()
    return compiled()


@contextmanager
def compiled_here(plainly: bool) -> Iterator[None]:
    """Load code that was compiled for this processor, without probes, precompiled headers or an import of the compiler.

    Args:
        plainly: True if it was compiled without short cuts.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_compiler())
        stack.enter_context(_HEADER.during(lambda compile_header: lambda *arguments, **options: ""))
        if plainly:
            stack.enter_context(_PROBE.during(_assume_supported))
        else:
            stack.enter_context(_CHECK.during(_assume_supported))
            stack.enter_context(kernels_in_few_files())
        yield


def _assume_supported(trial: Callable[..., bool]) -> Callable[..., bool]:
    return lambda self, what: True


def code_folder() -> Path:
    """Return the folder of Inductor's machine code."""
    return Path(cache_dir())


def compile_whole(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph captured by TorchDynamo, as torch.compile's default backend does."""
    with _ranges_in_keys(_values_of_inputs(module)), _without_size_checks(), own_buffers():
        return with_short_cuts(lambda: torch._inductor.compile(module, list(inputs)))


class InductorByRanges(torch._TorchCompileInductorWrapper):
    """torch.compile's default backend, with caches that distinguish the ranges of symbolic sizes.

    Args:
        mode: Mode of torch.compile, or None.
        dynamic: See torch.compile.
    """

    #: Name of the backend in TorchDynamo.
    __name__ = "inductor"

    def __init__(self, mode: str | None, dynamic: bool | None) -> None:
        super().__init__(mode, None, dynamic)

    def __call__(self, model_: torch.fx.GraphModule, inputs_: Sequence[Any], **options: Any) -> Callable[..., Any]:
        with _ranges_in_keys(_values_of_inputs(model_)), own_buffers():
            return super().__call__(model_, inputs_, **options)


def _values_of_inputs(module: torch.fx.GraphModule) -> list[Any]:
    return [node.meta.get("example_value") for node in module.graph.nodes if node.op == "placeholder"]


def compile_region(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Compile part of a graph that TorchDynamo is compiling, over its fake tensors, in a form that can be written."""
    with _ranges_in_keys(inputs), _without_size_checks(), own_buffers():
        return with_short_cuts(
            lambda: standalone_compile(
                module, list(inputs), dynamic_shapes="from_tracing_context", options={}, aot=True
            )
        )


def _without_size_checks() -> AbstractContextManager[object]:
    """Skip the size checks of inputs in code compiled within a block, because guards and layers check their sizes."""
    return torch._inductor.config.patch(size_asserts=False)


def own_buffers() -> AbstractContextManager[object]:
    """Give each value of a graph compiled within a block a buffer of its own.

    Inductor (2.13) writes a sum over the buffer of an operand, even if that is part of a concatenation that the same
    kernel still reads elsewhere. Scans by doubling were wrong so from the fifth token of a later chunk on.
    """
    return torch._inductor.config.patch(inplace_buffers=False)


@contextmanager
def _ranges_in_keys(values: Sequence[Any]) -> Iterator[None]:
    """Add the ranges of symbolic sizes to the keys of torch's caches within a block.

    Otherwise, code compiled for prompts of up to 16 tokens would be reused for prompts of up to 64, and its guard would
    fail for a size that is marked dynamic in the whole range.
    """
    ranges = {
        f"{symbol} {symbol_range(symbol, environment)}"
        for value in values
        for symbol, environment in free_symbols(value).items()
    }
    config: Any = torch.compiler.config
    with config.patch(cache_key_tag=" ".join([config.cache_key_tag, *sorted(ranges)])):
        yield


def region_function(compiled: Any) -> Callable[..., Sequence[Any]]:
    """Return a function of the separate inputs, from the result of `compile_region`."""
    return compiled.inner_fn.compiled_fn


def region_bytes(compiled: Any) -> bytes:
    """Serialize the result of `compile_region`."""
    return compiled.serialize()


def region_from_bytes(written: bytes) -> Any:
    """Deserialize the result of `region_bytes`."""
    return AOTCompiledArtifact.deserialize(written)


#: Kernels per file, about twice as many as a layer has. Files of larger graphs are compiled in parallel.
KERNELS_IN_A_FILE = 16
_INCLUDED = "#include <torch/csrc/inductor/cpp_prefix.h>"
#: A source with exactly one function, and no other definition that two kernels could share.
_ONE_FUNCTION = re.compile(r'\s*extern "C"\s+void\s+kernel\s*\([^{;]*\)\s*\{.*\n\}\s*', re.DOTALL)
#: A line that begins a definition or a macro.
_ANOTHER = re.compile(r"^(?:[A-Za-z_\[]|#(?!pragma (?:GCC|omp)))", re.MULTILINE)
#: Names that the Python binding defines.
_BINDING = ("kernel", "parse_arg", "py_methods", "py_module", "_torchinductor_pyobject_tensor_data_ptr")
_INCLUDES = "#define PY_SSIZE_T_CLEAN\n#include <Python.h>\n#include <sstream>\n#include <cstdlib>\n#include <cerrno>\n"

Kernel = Callable[..., None]


class _Files:
    """The kernels of one generated module, grouped into files.

    Attributes:
        files: Lists of argument types and source; new kernels go into the last one.
    """

    def __init__(self, submit: Callable[..., Any] | None) -> None:
        self.files: list[list[tuple[Sequence[str], str]]] = []
        self._submit = submit
        self._loaded: dict[int, Sequence[Kernel]] = {}
        self._loaders: dict[int, Callable[[], Sequence[Kernel]]] = {}

    def add(self, argtypes: Sequence[str], source: str) -> LambdaFuture:
        """Add a kernel, which `LambdaFuture.result` returns."""
        if not self.files or len(self.files[-1]) == KERNELS_IN_A_FILE:
            self.files.append([])
        file, index = len(self.files) - 1, len(self.files[-1])
        self.files[-1].append((argtypes, source))
        return LambdaFuture(lambda: self.functions(file)[index])

    def start(self) -> None:
        """Start compiling all files, in parallel if Inductor has threads for it."""
        for number, kernels in enumerate(self.files):
            if number not in self._loaders:
                self._loaders[number] = _loader(kernels, self._submit)

    def functions(self, file: int) -> Sequence[Kernel]:
        """Return the functions of a file."""
        self.start()
        if file not in self._loaded:
            self._loaded[file] = self._loaders[file]()
        return self._loaded[file]


@contextmanager
def kernels_in_few_files() -> Iterator[None]:
    """Compile the kernels of each graph as one file or a few within a block."""
    known: WeakKeyDictionary[AsyncCompile, _Files] = WeakKeyDictionary()

    def bind(original: Callable[..., Any]) -> Callable[..., Any]:
        def cpp_pybinding(self: AsyncCompile, argtypes: list[str], source_code: str) -> Any:
            if not _is_one_function(source_code):
                return original(self, argtypes, source_code)
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

    with contextlib.ExitStack() as stack:
        # Both or neither, because kernels of `bind` can be called only after `wait` has replaced them.
        if stack.enter_context(_WAIT.during(wait)):
            stack.enter_context(_BIND.during(bind))
        yield


def _is_one_function(source: str) -> bool:
    """Return True if a kernel can share a file with others.

    Templates of matrix products cannot, because they define more than the function.
    """
    head, found, body = source.partition(_INCLUDED)
    if not found or head.strip() or _ONE_FUNCTION.fullmatch(body) is None:
        return False
    return len(_ANOTHER.findall(body)) == 1


def _loader(kernels: Sequence[tuple[Sequence[str], str]], submit: Callable[..., Any] | None) -> Callable[[], Any]:
    """Return a function that waits for a file and returns its functions."""
    if len(kernels) == 1:
        ((argtypes, source),) = kernels
        one = CppPythonBindingsCodeCache.load_pybinding_async(argtypes, source, submit_fn=submit)
        return lambda: (one(),)
    cache: Any = type("Kernels", (_KernelsCache,), {"count": len(kernels)})
    load = cache.load_async(text_of(kernels), "cpu", submit_fn=submit)
    return lambda: load().functions


class _KernelsCache(CppPythonBindingsCodeCache):
    """Loads a file of several kernels. Python sees each kernel as an extension module in the same library."""

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
    """Return the source of a file of several kernels, each with its own Python binding."""
    parts = [f"{_INCLUDED}\n{_INCLUDES}"]
    for index, (argtypes, source) in enumerate(kernels):
        parse = ", ".join(
            f"parse_arg<{kind.replace('const ', '')}>(args, {position})" for position, kind in enumerate(argtypes)
        )
        cache = CppPythonBindingsCodeCache
        binding = cache.suffix_template.format(
            arg_len=len(argtypes),
            call_entry_func=cache.call_entry_function.format(parse),
            entry_func=f"kernel_{index}",
            extra_parse_arg=cache.extra_parse_arg,
        )
        parts += [f"#define {name} {name}_{index}\n" for name in _BINDING]
        parts += [source.partition(_INCLUDED)[2], binding]
        parts += [f"#undef {name}\n" for name in _BINDING]
    return "".join(parts)
