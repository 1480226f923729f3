"""Private names of torch that compile graphs ahead of time, seen in 2.13.0. Importing this imports the compiler.

| name | without it |
|---|---|
| `torch._inductor.aot_compile`, `package.package_aoti` | no target `aoti` |
| `torch._inductor.cpp_builder.CppBuilder.build` and its parts | seven seconds more for each region |
| `aten::_grouped_mm`, `torch._meta_registrations._meta_grouped_mm_common` | no mixture of experts for target `aoti` |

AOTInductor adds the same 660 lines of C++ interface to each graph's source. With their headers they take four of the
five seconds that a small graph takes to compile. They are compiled once here and linked to each graph.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._inductor import aot_compile
from torch._inductor.cpp_builder import CppBuilder
from torch._inductor.package import package_aoti
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.fx import GraphModule

from ..patch import Patch, torch_patch
from .torch_compile import with_short_cuts

log = logging.getLogger(__name__)

_BUILD = torch_patch(
    "_inductor.cpp_builder",
    "CppBuilder.build",
    "it compiles the interface of machine code again for each graph",
    "e2d627e9f24e793c",
)
_GROUPED_OUTPUT = torch_patch(
    "_meta_registrations",
    "_meta_grouped_mm_common",
    "it refuses all floats but bfloat16, which the CPU's kernel takes too",
    "b5cd72f24ddf69f4",
)
#: Functions of torch that are replaced within a block.
PATCHES: tuple[Patch, ...] = (_BUILD, _GROUPED_OUTPUT)
#: An operator of transformers, written in Python, which machine code cannot call, and the same one of torch.
_PRODUCTS_IN_PYTHON = "transformers.grouped_mm_fallback.default"
_PRODUCTS = torch.ops.aten._grouped_mm.default
#: Constants are passed when the code is loaded. Line tables for debuggers would be three quarters of the code's size.
_OPTIONS = {
    "aot_inductor.package": True,
    "aot_inductor.package_constants_in_so": False,
    "aot_inductor.enable_line_tables": False,
    # See `own_buffers` in torch_compile.
    "inplace_buffers": False,
    # Inductor writes constants of up to eight numbers into the code, and the length of an encoder's output, which
    # `decode` only reads, is a constant to it. Nor may it fold what is computed from that length alone.
    "always_keep_tensor_constants": True,
    "joint_graph_constant_folding": False,
}
#: The last line of the interface.
_END = '} // extern "C"\n'
#: The interface parses device names with regular expressions, which take as long again, so they are compiled once, too.
_REGEX = """
#include <regex>
#ifdef __GLIBCXX__
namespace std::__detail {
%(extern)s template class _Compiler<std::regex_traits<char>>;
%(extern)s template class _Scanner<char>;
}
#endif
"""
#: Functions of the interface.
_INTERFACE = ("AOTInductorModelContainerCreateWithDevice(", "AOTInductorGetLastError(")


def compile_ahead_of_time(module: GraphModule, inputs: Sequence[Any]) -> list[str]:
    """Compile a module with AOTInductor and return its files, for `write_package`.

    Args:
        module: A graph from torch.export, or one with a fake tensor `val` for each input.
        inputs: Positional inputs, and a dict of keyword inputs.
    """

    def compiled() -> list[str]:
        with _interface_compiled_once(), _GROUPED_OUTPUT.during(_of_all_floats):
            return aot_compile(module, *inputs, options=dict(_OPTIONS))  # type: ignore[return-value]

    return with_short_cuts(compiled)


def write_package(path: Path, files: Mapping[str, list[str]]) -> None:
    """Write one package from the files that `compile_ahead_of_time` returned for each name."""
    package_aoti(str(path), dict(files))  # type: ignore[arg-type]


def call_products_in_cpp(module: GraphModule) -> None:
    """Let a graph multiply the tokens of experts by torch's operator instead of transformers' in Python.

    Args:
        module: A graph from torch.export, changed in place.
    """
    for node in module.graph.nodes:
        if str(node.target) == _PRODUCTS_IN_PYTHON:
            node.target = _PRODUCTS


def _of_all_floats(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def output_of(mat_a: torch.Tensor, mat_b: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if {mat_a.dtype, mat_b.dtype} in ({torch.float32}, {torch.float16}) and mat_a.dim() < mat_b.dim():
            return mat_a.new_empty(mat_a.shape[0], mat_b.shape[-1])
        return original(mat_a, mat_b, *args, **kwargs)

    return output_of


@contextmanager
def _interface_compiled_once() -> Iterator[None]:
    """Reuse the compiled interface in Inductor's cache folder within a block."""
    if sys.platform != "linux":
        yield
        return
    with _BUILD.during(_in_two):
        yield


def _in_two(build: Callable[[CppBuilder], None]) -> Callable[[CppBuilder], None]:
    def build_in_two(self: CppBuilder) -> None:
        target, source = Path(self.get_target_file_path()), Path(self._sources_args)
        if target.name.endswith(".wrapper.o") and source.is_file():
            interface, end, rest = source.read_text().partition(_END)
            if end and all(name in interface for name in _INTERFACE):
                try:
                    _build_in_two(self, build, target, interface + end, rest)
                    return
                except Exception as error:  # an unknown compiler may fail here; a real error occurs again below
                    log.info("compiled as one file: %s", error)
        build(self)

    return build_in_two


def _build_in_two(
    builder: CppBuilder, build: Callable[[CppBuilder], None], target: Path, interface: str, rest: str
) -> None:
    flags = builder.get_command_line().replace(str(target), "").replace(builder._sources_args, "")
    digest = hashlib.sha256(f"{flags}\n{interface}{_REGEX}".encode()).hexdigest()[:32]
    folder = Path(cache_dir()) / "exportable_cache_interface"
    compiled, name = folder / f"{digest}.o", f"{digest}.{os.getpid()}"
    if not compiled.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        object_file = _built(builder, build, interface + _REGEX % {"extern": ""}, folder, name)
        # Renamed atomically, because another process may compile it at the same time.
        os.replace(object_file, compiled)
    includes = "".join(line for line in interface.splitlines(keepends=True) if line.startswith("#include"))
    declared = _REGEX % {"extern": "extern"}
    model_object = _built(builder, build, declared + includes + rest, target.parent, f"{target.stem}.rest")
    link = [builder._compiler, "-r", "-nostdlib", "-o", str(target), str(model_object), str(compiled)]
    subprocess.run(link, check=True, capture_output=True)
    model_object.unlink()


def _built(builder: CppBuilder, build: Callable[[CppBuilder], None], text: str, folder: Path, name: str) -> Path:
    source = folder / f"{name}.cpp"
    source.write_text(text)
    one = CppBuilder(name=name, sources=str(source), BuildOption=builder._build_option, output_dir=str(folder))
    try:
        build(one)
    finally:
        source.unlink()
    return Path(one.get_target_file_path())
