"""Private names of executorch, seen in 1.4.1. Functions import the package when they are called.

| name | without it |
|---|---|
| `executorch.exir.passes._quant_patterns_and_replacements` | operators on 8-bit tables cannot be traced |
| `executorch.exir._serialize._program._get_extended_header` | segments of a `.pte` cannot be found |
| `executorch.exir._serialize._flatbuffer_program._patch_generated_flatbuffer_aliases` | the readers fail |
| `executorch.exir._serialize.generated.executorch_flatbuffer.Program` | delegates and segments cannot be listed |
| `DelegateCall`, `InstructionArguments` in the same package | delegates cannot be reordered |
| `executorch.exir._serialize._program.deserialize_pte_binary` | memory plans in a file cannot be read back |
| `executorch.extension.pybindings._portable_lib`, `_C` from 1.5 on | opening a `.pte` takes 2.4 s more processor time |
| `_get_registered_backend_names` of these | delegates that do not run here are not named |
| `executorch.backends.openvino.partitioner` | OpenVINO's compiler needs nncf |
| `executorch.backends.mlx.serialization.generate`, `data/bin/flatc`, generated modules | no programs for MLX off Macs |
| `_load_program` and `_get_operator_names` of these | no `.pte` runs; a file that no runtime loads is written |
| `EdgeCompileConfig(_check_ir_validity=..., _skip_dim_order=...)` | native operators fail a check |
| `NodeVisitor.convert_to_qc4w` of XNNPACK's compiler | 4-bit weights of equal layers cannot be found in its output |
| `executorch.exir._serialize._named_data_store.NamedDataStoreOutput` | equal layers are lowered separately |
| `executorch.exir.backend.utils.is_same_node`, `WhyNoPartition` | a process keeps the weights of all its exports |
| `LoweredBackendModule._named_data_store_output`, `ExecutorchProgramManager._named_data` | the same |
| `aten._to_copy` | integers cannot be divided in delegates |
| `_schema`, `_overloadname` of an operator | its edge operator cannot be found |
| `_op` of an operator of the edge dialect | native operators are not recognised after lowering |
| `GraphModule._set_replace_hook` | deep programs take longer to write |
| `_tab` of a generated reader | the offset of a segment cannot be changed in place |
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module, metadata, util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from ...errors import MissingDependencyError
from ..fs.files import give_back_pages
from ..native.kernels import load_native_kernels

if TYPE_CHECKING:
    import torch
    from executorch.exir import ExecutorchProgramManager
    from executorch.exir._serialize._named_data_store import NamedDataStoreOutput
    from torch.export import ExportedProgram

#: The runtime's extension module in executorch 1.5 and in 1.4, then the public one, which imports the exporter.
_EXTENSIONS = tuple(f"executorch.extension.pybindings.{name}" for name in ("_C", "_portable_lib", "portable_lib"))
#: Kernel libraries that exported programs need besides the runtime: package -> pattern of its library.
_KERNELS = {
    "executorch.extension.llm.custom_ops": "*custom_ops_aot_lib.*",
    "executorch.kernels.quantized": "*quantized_ops_aot_lib.*",
}
#: Id of OpenVINO's delegate.
OPENVINO = "OpenvinoBackend"
#: Variable with the newest instruction set that oneDNN uses, and the last one without products in 16 bits.
_ONEDNN, _WITHOUT_BFLOAT16 = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI"
#: Variable with the path of OpenVINO's library for C, which the runtime loads.
_OPENVINO = "OPENVINO_LIB_PATH"
_REMEDY = "pip install 'exportable-cache[executorch]'"
#: Release series of torch that each series of executorch runs with: first the one that it is compiled against, then
#: others that the tests ran. Its wheels have no upper bound, so pip may install a newer torch whose classes have other
#: layouts.
RUNS_WITH = {"1.4": ("2.13",), "1.5": ("2.14", "2.15")}


@functools.cache
def check_pair() -> None:
    """Check that the installed executorch was compiled against the installed torch, before either is loaded.

    Unknown pairs are accepted.

    Raises:
        MissingDependencyError: If they do not fit together.
    """
    try:
        executorch, torch = metadata.version("executorch"), metadata.version("torch")
    except metadata.PackageNotFoundError:
        return  # Built from source, or missing, which the import reports.
    refuse_pair(executorch, torch)


def refuse_pair(executorch: str, torch: str) -> None:
    """Check two versions, as `check_pair` does: `refuse_pair("1.4.1", "2.13.0+cpu")`."""
    series, torch_series = (".".join(version.split(".")[:2]) for version in (executorch, torch))
    wanted = RUNS_WITH.get(series, ())
    fitting = next((series for series, against in RUNS_WITH.items() if torch_series in against), None)
    if torch_series in wanted or not (wanted or fitting):
        return
    remedies = [f"pip install 'torch=={wanted[0]}.*'"] if wanted else []
    remedies += [f"pip install 'executorch=={fitting}.*'"] if fitting else []
    raise MissingDependencyError(
        f"executorch {executorch} is installed with torch {torch}; "
        + (f"it is compiled against {wanted[0]}" if wanted else f"torch {torch_series} needs executorch {fitting}")
        + f": {', or '.join(remedies)}"
    )


@functools.cache
def runtime() -> ModuleType:
    """Return the runtime's extension module, with all kernels registered that an exported program may call.

    `import executorch.runtime` takes 2.4 s of processor time, because it imports torch's compiler and the exporter for
    one warning class. Importing the extension by its private name and loading the kernel libraries directly takes 0.2 s
    (1.4.1, Intel Xeon with AVX-512).

    Raises:
        MissingDependencyError: If executorch has no runtime, lacks a kernel library, or does not fit the installed
            torch.
    """
    check_pair()
    import torch

    name = next((name for name in _EXTENSIONS if util.find_spec(name) is not None), None)
    if name is None:
        raise MissingDependencyError(f"the installed executorch has no Python runtime; {_REMEDY}")
    # The public module looks for it, too. The runtime loads it when it first meets the delegate.
    openvino = util.find_spec("openvino")
    for folder in () if openvino is None else openvino.submodule_search_locations or ():
        for library in sorted(Path(folder, "libs").glob("libopenvino_c.so*"))[:1]:
            os.environ.setdefault(_OPENVINO, str(library))
    extension = import_module(name)
    for package, pattern in _KERNELS.items():
        torch.ops.load_library(str(_library(package, pattern)))
    # After the runtime, because this adds to its registry. A program binds its kernels when it is loaded.
    load_native_kernels()
    return extension


def load_program(path: Path) -> Any:
    """Load a `.pte`, memory-mapped if the runtime supports it.

    `load_method(name)` of the result returns a callable on tensors. The runtime verifies offsets, types and sizes in
    the whole file.

    Raises:
        RuntimeError: If the runtime cannot load it.
    """
    extension = runtime()
    program = extension._load_program(str(path), program_verification=extension.Verification.InternalConsistency)
    # The runtime locks constants such as an embedding table in memory, although a step reads only a few rows.
    give_back_pages(path)
    return program


def _library(package: str, pattern: str) -> Path:
    # Looked up without an import, because the package's code is for exporters.
    spec = util.find_spec(package)
    folders = () if spec is None else spec.submodule_search_locations or ()
    found = [path for folder in folders for path in sorted(Path(folder).glob(pattern))]
    if not found:
        raise MissingDependencyError(f"the installed executorch has no {pattern} in {package}; {_REMEDY}")
    return found[0]


def register_fused_operators() -> None:
    """Register `torch.ops.llama` for tracing. This imports the exporter."""
    runtime()
    import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401


def register_quantized_operators() -> None:
    """Register all operators of `torch.ops.quantized_decomposed`. This imports the exporter."""
    runtime()
    import executorch.exir.passes._quant_patterns_and_replacements  # noqa: F401


def extended_header(data: bytes) -> Any | None:
    """Return the header of a `.pte` from its first 64 bytes, or None if the file has no segments."""
    from executorch.exir._serialize._program import _get_extended_header

    return _get_extended_header(data)


def flat_program(table: bytes | bytearray) -> Any:
    """Return a reader of the flatbuffer of a `.pte`."""
    from executorch.exir._serialize._flatbuffer_program import _patch_generated_flatbuffer_aliases
    from executorch.exir._serialize.generated.executorch_flatbuffer.Program import Program

    # The generated readers refer to modules instead of classes until the serializer has patched them.
    _patch_generated_flatbuffer_aliases()
    return Program.GetRootAs(table)


def delegate_calls(plan: Any) -> list[Any]:
    """Return readers of a method's delegate calls.

    Args:
        plan: Reader of the method's execution plan, from `flat_program`.
    """
    from executorch.exir._serialize.generated.executorch_flatbuffer.DelegateCall import DelegateCall
    from executorch.exir._serialize.generated.executorch_flatbuffer.InstructionArguments import InstructionArguments

    found = []
    for chain in (plan.Chains(index) for index in range(plan.ChainsLength())):
        for instruction in (chain.Instructions(index) for index in range(chain.InstructionsLength())):
            if instruction.InstrArgsType() == InstructionArguments.DelegateCall:
                call, arguments = DelegateCall(), instruction.InstrArgs()
                call.Init(arguments.Bytes, arguments.Pos)
                found.append(call)
    return found


def deserialized_program(data: bytes) -> Any:
    """Return the program of a `.pte` as dataclasses of its schema."""
    return deserialized_file(data).program


def deserialized_file(data: bytes) -> Any:
    """Return a `.pte` as its program and its named data, dataclasses of its schema."""
    from executorch.exir._serialize._program import deserialize_pte_binary

    return deserialize_pte_binary(data)


def openvino_partitioner() -> Any:
    """Return the class of OpenVINO's partitioner, without its package's quantizer, which needs nncf and 20 others."""
    name = "executorch.backends.openvino"
    if name in sys.modules:
        return import_module(f"{name}.partitioner").OpenvinoPartitioner
    spec = util.find_spec(name)
    if spec is None:
        raise MissingDependencyError(f"the installed executorch has no compiler for OpenVINO; {_REMEDY}")
    # Its modules are imported from a package that has not run, and which a later import runs.
    sys.modules[name] = util.module_from_spec(spec)
    try:
        return import_module(f"{name}.partitioner").OpenvinoPartitioner
    finally:
        del sys.modules[name]


_MLX = "executorch.backends.mlx.serialization"


@functools.cache
def prepare_mlx_schema() -> Path:
    """Make MLX's compiler importable, whose schema only the wheel for Macs has as Python code.

    The wheel's generator makes it, in a temporary folder, because the installed package may not be writable. The folder
    lasts as long as the process, because generated code imports parts of itself when it is used.

    Returns:
        Folder of the package `executorch.backends.mlx` or of its generated part.

    Raises:
        MissingDependencyError: If the wheel has no MLX, or the generator fails.
    """
    found = util.find_spec("executorch.backends")
    folders = () if found is None else found.submodule_search_locations or ()
    package = next((Path(one, "mlx") for one in folders if Path(one, "mlx", "serialization").is_dir()), None)
    if package is None:
        raise MissingDependencyError(f"the installed executorch has no compiler for MLX; {_REMEDY}")
    if (package / "serialization" / "mlx_graph_schema.py").exists():
        return package
    generated = Path(tempfile.mkdtemp(prefix="exportable_cache_mlx_"), "mlx")
    atexit.register(shutil.rmtree, generated.parent, ignore_errors=True)
    code = generated / "serialization"
    shutil.copytree(package / "serialization", code, ignore=shutil.ignore_patterns("__pycache__"))
    # It also writes C++ over templates, which the wheel lacks.
    (generated / "runtime").mkdir()
    for name in ("MLXLoader.h.tmpl", "MLXLoader.cpp.tmpl"):
        (code / name).touch()
    compiler = package.parents[1] / "data" / "bin" / ("flatc.exe" if os.name == "nt" else "flatc")
    command = [sys.executable, str(code / "generate.py"), "--flatc", str(compiler)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not (code / "_generated" / "mlx_delegate" / "MLXGraph.py").exists():
        reason = (done.stderr.strip() or done.stdout.strip() or "no reason").splitlines()[-1]
        raise MissingDependencyError(f"executorch's generator of MLX's schema failed: {reason}; {_REMEDY}")
    spec = util.spec_from_file_location(_MLX, code / "__init__.py", submodule_search_locations=[str(code)])
    assert spec is not None
    assert spec.loader is not None
    sys.modules[_MLX] = module = util.module_from_spec(spec)
    try:
        import_module("executorch.backends.mlx")
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[_MLX]
        raise
    return generated


def mlx_graph(payload: bytes) -> tuple[Any, Callable[[Any, Any, Any], Iterator[tuple[str, dict[str, Any]]]]]:
    """Return a reader of an MLX delegate's graph, and a function that yields the instructions of a chain.

    The function takes a chain's reader, and what makes references to tensors and to numbers from their indices. It
    yields the name of each operator, and its operands by name.
    """
    folder = prepare_mlx_schema()
    serialization = import_module(f"{_MLX}.mlx_graph_serialize")
    names = import_module(f"{_MLX}._generated_serializers").MLX_OP_TYPE_NAMES
    spec = util.spec_from_file_location("_exportable_cache_mlx_fields", folder / "_generated_inspector.py")
    assert spec is not None
    assert spec.loader is not None
    fields = util.module_from_spec(spec)
    spec.loader.exec_module(fields)
    offset, size, _, _ = serialization.parse_header(payload)

    def code_of(name: str) -> Any:
        return getattr(import_module(f"{_MLX}._generated.mlx_delegate.{name}"), name)

    def described(chain: Any, tensor: Any, value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        for index in range(chain.InstructionsLength()):
            instruction = chain.Instructions(index)
            name, table = names[instruction.OpType()], instruction.Op()
            node = code_of(name)()
            node.Init(table.Bytes, table.Pos)
            operands = {
                key: _mlx_operand(node, accessor, kind, tensor, value)
                for key, accessor, kind in fields.OP_NODE_FIELDS[name]
            }
            yield name.removesuffix("Node"), operands

    return code_of("MLXGraph").GetRootAs(payload[offset : offset + size], 0), described


def _mlx_operand(node: Any, accessor: str, kind: str, tensor: Any, value: Any) -> Any:
    """Return an operand of an instruction, whose kind is one of the generated table."""
    read = getattr(node, accessor)
    if kind.endswith("_list"):
        count = getattr(node, f"{accessor}Length")()
        return [_mlx_single(read(index), kind.removesuffix("_list"), tensor, value) for index in range(count)]
    return _mlx_single(read(), kind, tensor, value)


def _mlx_single(found: Any, kind: str, tensor: Any, value: Any) -> Any:
    if found is None or kind in ("scalar", "int"):
        return found
    if kind == "string":
        return found.decode()
    if kind in ("tid", "vid"):
        return (tensor if kind == "tid" else value)(found.Idx())
    if kind == "int_or_vid_or_tid":
        by_kind = (found.Literal, lambda: value(found.Vid().Idx()), lambda: tensor(found.Tid().Idx()))
        return by_kind[found.Kind()]()
    if found.IsVid():
        return value(found.Vid().Idx())
    return tensor(found.Tid().Idx()) if kind == "vid_or_tid" else found.Literal()


def operator_names() -> set[str]:
    """Return the operators that the installed runtime has kernels for."""
    return set(runtime()._get_operator_names())


def available_backends() -> set[str]:
    """Return the ids of the delegates that the installed runtime has, with the libraries that they load."""
    registered = set(runtime()._get_registered_backend_names())
    # Not by the runtime's own check, which loads each library and writes to stderr.
    return registered if os.environ.get(_OPENVINO) else registered - {OPENVINO}


@contextmanager
def exact_openvino() -> Iterator[None]:
    """Let OpenVINO, if it is first loaded in this block, compute in float32 on processors with units for bfloat16.

    Its default there is bfloat16. ExecuTorch (1.4.1) imports a compiled model without options, and the file does not
    keep those it was compiled with (docs/guides/delegates.md). OpenVINO reads the variable once.
    """
    before = os.environ.get(_ONEDNN)
    os.environ.setdefault(_ONEDNN, _WITHOUT_BFLOAT16)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_ONEDNN, None)


def edge_config(skip_dim_order: bool = False, kept: Sequence[Any] = ()) -> Any:
    """Return a compile config whose edge dialect accepts operators from outside it.

    Args:
        skip_dim_order: True to leave operators that copy and convert unchanged.
        kept: Operators that are not decomposed.
    """
    from executorch.exir import EdgeCompileConfig

    return EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=skip_dim_order, preserve_ops=list(kept))


def operator_of(target: Any) -> Any:
    """Return the operator that an edge operator wraps, or `target` unchanged."""
    from torch._ops import OpOverload

    return target if isinstance(target, OpOverload) else getattr(target, "_op", target)


def edge_operator(target: Any) -> Any:
    """Return the edge operator of an operator; other targets, such as `operator.getitem`, are returned unchanged."""
    from executorch.exir.dialects._ops import ops
    from torch._ops import OpOverload

    if not isinstance(target, OpOverload):
        return target
    library, name = target._schema.name.split("::")
    return getattr(getattr(getattr(ops.edge, library), name), target._overloadname)


def cast_operator() -> Any:
    """Return the edge operator that converts a tensor to a dtype."""
    import torch

    return edge_operator(torch.ops.aten._to_copy.default)


def call_delegate_operator() -> Any:
    """Return the operator that calls a delegate in a graph."""
    from executorch.exir.delegate import executorch_call_delegate

    return executorch_call_delegate


def release_program(program: ExecutorchProgramManager) -> None:
    """Release a written program's weights and the graphs of earlier exports.

    Several caches keep them alive: modules keep the data that delegates packed, ExecuTorch keeps every pair of nodes it
    compared and the last one it rejected, and torch caches results of operators on fake tensors by their arguments,
    delegates included.
    """
    from executorch.exir.backend.utils import WhyNoPartition, is_same_node
    from executorch.exir.lowered_backend_module import LoweredBackendModule

    for method in program.methods:
        for lowered in program.exported_program(method).graph_module.modules():
            if isinstance(lowered, LoweredBackendModule) and lowered._named_data_store_output is not None:
                lowered._named_data_store_output.buffers.clear()
    if program._named_data is not None:
        program._named_data.buffers.clear()
    # Not at the top, because it imports torch, which the command line starts without.
    from .torch import forget_fake_results

    is_same_node.cache_clear()
    forget_fake_results()
    for name, module in list(sys.modules.items()):
        if name.startswith("executorch.backends.xnnpack."):
            for value in vars(module).values():
                if isinstance(value, WhyNoPartition):
                    value.node = None


def without_submodules(program: ExportedProgram) -> Any:
    """Return a program for `unsafe_remove_auto_functionalized_pass` that hides its nested graphs."""
    module = program.graph_module
    outer = SimpleNamespace(modules=lambda: iter((module,)), _set_replace_hook=module._set_replace_hook)
    return SimpleNamespace(graph_module=outer, graph=program.graph, graph_signature=program.graph_signature)


def named_data(buffers: Sequence[bytes], entries: Mapping[str, Any]) -> NamedDataStoreOutput:
    """Return data that a delegate finds by name in the file.

    Args:
        buffers: Contents.
        entries: Buffer index and alignment by name.
    """
    from executorch.exir._serialize._named_data_store import NamedDataStoreOutput

    return NamedDataStoreOutput(list(buffers), dict(entries), {})


def pack_pairs(integers: torch.Tensor) -> torch.Tensor:
    """Pack two values of -8 to 7 per byte, as XNNPACK's compiler does: int8 [rows, dim] to uint8 [rows, dim // 2]."""
    from executorch.backends.xnnpack.operators.node_visitor import NodeVisitor

    return NodeVisitor.convert_to_qc4w(integers)


def position_of_field(table: Any, field: int) -> int | None:
    """Return the buffer offset of a field in a generated reader's table, or None if the field is not stored.

    Args:
        table: The reader, such as a `DataSegment`.
        field: Offset of the field in the schema's table.
    """
    offset = table._tab.Offset(field)
    return table._tab.Pos + offset if offset else None
