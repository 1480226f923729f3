"""Private names of executorch, seen in 1.4.1. Nothing of it is imported before an accessor is called.

| name | without it |
|---|---|
| `executorch.exir.passes._quant_patterns_and_replacements` | operators on 8-bit tables cannot be traced |
| `executorch.exir._serialize._program._get_extended_header` | segments of a `.pte` cannot be found |
| `executorch.exir._serialize._flatbuffer_program._patch_generated_flatbuffer_aliases` | the readers fail |
| `executorch.exir._serialize.generated.executorch_flatbuffer.Program` | delegates and segments cannot be listed |
| `DelegateCall`, `InstructionArguments` beside it | delegates cannot be put into another order |
| `executorch.exir._serialize._program.deserialize_pte_binary` | plans in a file cannot be read back |
| `executorch.extension.pybindings._portable_lib`, `_C` from 1.5 on | a `.pte` is opened 2.4 s of processor time later |
| `_load_program` and `_get_operator_names` of these | no `.pte` runs; a file that no runtime loads is written |
| `EdgeCompileConfig(_check_ir_validity=..., _skip_dim_order=...)` | operators of our own fail a check |
| `NodeVisitor.convert_to_qc4w` of XNNPACK's compiler | 4-bit weights of equal layers cannot be told in what it wrote |
| `executorch.exir._serialize._named_data_store.NamedDataStoreOutput` | equal layers are lowered one by one |
| `executorch.exir.backend.utils.is_same_node`, `WhyNoPartition` | a process keeps the weights of all that it exported |
| `LoweredBackendModule._named_data_store_output`, `ExecutorchProgramManager._named_data` | the same |
| `_schema`, `_overloadname` of an operator | one of the edge dialect cannot be found for it |
| `_op` of an operator of the edge dialect | an operator of ours is not recognised after lowering |
| `GraphModule._set_replace_hook` | deep programs take longer to write |
| `_tab` of a generated reader | the offset of a segment cannot be changed in place |
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
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

#: The runtime's extension module, from executorch 1.5 and before it; then the public one, which imports the exporter.
_EXTENSIONS = tuple(f"executorch.extension.pybindings.{name}" for name in ("_C", "_portable_lib", "portable_lib"))
#: Kernels that exported programs call beside the runtime's own: package -> pattern of its library.
_KERNELS = {
    "executorch.extension.llm.custom_ops": "*custom_ops_aot_lib.*",
    "executorch.kernels.quantized": "*quantized_ops_aot_lib.*",
}
_REMEDY = "pip install 'exportable-cache[executorch]'"
#: The series of torch that each series of executorch is compiled against. Its wheels name no upper bound: pip may take
#: a newer torch with them, whose classes their libraries read at other offsets.
COMPILED_AGAINST = {"1.4": "2.13", "1.5": "2.14"}


@functools.cache
def check_pair() -> None:
    """Refuse an executorch beside a torch that it was not compiled against, before either is loaded.

    A pair of which neither is known here is let through.

    Raises:
        MissingDependencyError: If they do not go together.
    """
    try:
        executorch, torch = metadata.version("executorch"), metadata.version("torch")
    except metadata.PackageNotFoundError:
        return  # Built from sources, or missing: then importing it says so.
    refuse_pair(executorch, torch)


def refuse_pair(executorch: str, torch: str) -> None:
    """See `check_pair`; two versions, as `refuse_pair("1.4.1", "2.13.0+cpu")`."""
    ours, theirs = (".".join(version.split(".")[:2]) for version in (executorch, torch))
    wanted = COMPILED_AGAINST.get(ours)
    fitting = next((series for series, against in COMPILED_AGAINST.items() if against == theirs), None)
    if wanted == theirs or (wanted is None and fitting is None):
        return
    remedies = [f"pip install 'torch=={wanted}.*'"] if wanted else []
    remedies += [f"pip install 'executorch=={fitting}.*'"] if fitting else []
    raise MissingDependencyError(
        f"executorch {executorch} is installed beside torch {torch}; "
        + (f"it is compiled against torch {wanted}" if wanted else f"torch {theirs} goes with executorch {fitting}")
        + f": {', or '.join(remedies)}"
    )


@functools.cache
def runtime() -> ModuleType:
    """The extension module of the runtime, with every kernel that an exported program may call registered.

    `import executorch.runtime` imports `executorch.exir` for a warning class, and with it torch's compiler and a YAML
    table of every operator: 2.4 s of processor time where this takes 0.2 s (1.4.1, Intel Xeon with AVX-512). So the
    extension is imported by its own name, and libraries of kernels are opened where their packages lie.

    Raises:
        MissingDependencyError: If the installed executorch brings no runtime, one of its libraries is not there, or it
            does not go with the installed torch.
    """
    check_pair()
    import torch

    name = next((name for name in _EXTENSIONS if util.find_spec(name) is not None), None)
    if name is None:
        raise MissingDependencyError(f"the installed executorch has no Python runtime; {_REMEDY}")
    extension = import_module(name)
    for package, pattern in _KERNELS.items():
        torch.ops.load_library(str(_library(package, pattern)))
    # After the runtime, whose registry it adds to; the kernels that a program finds are chosen when it is loaded.
    load_native_kernels()
    return extension


def load_program(path: Path) -> Any:
    """A `.pte`, memory-mapped where the runtime does so: `load_method(name)` of it gives what is called with tensors.

    The tables of the file are verified whole, as far as the runtime can: offsets, types and sizes.

    Raises:
        RuntimeError: If the runtime cannot load it.
    """
    extension = runtime()
    program = extension._load_program(str(path), program_verification=extension.Verification.InternalConsistency)
    # It locks the constants of its own kernels, such as an embedding table, of which a step reads a few rows.
    give_back_pages(path)
    return program


def _library(package: str, pattern: str) -> Path:
    # The folder is looked up and not imported: its code is for exporters.
    spec = util.find_spec(package)
    folders = () if spec is None else spec.submodule_search_locations or ()
    found = [path for folder in folders for path in sorted(Path(folder).glob(pattern))]
    if not found:
        raise MissingDependencyError(f"the installed executorch has no {pattern} in {package}; {_REMEDY}")
    return found[0]


def register_fused_operators() -> None:
    """Make `torch.ops.llama` known, with what tracing needs; it imports the exporter."""
    runtime()
    import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401


def register_quantized_operators() -> None:
    """Make `torch.ops.quantized_decomposed` known with all its operators; it imports the exporter."""
    runtime()
    import executorch.exir.passes._quant_patterns_and_replacements  # noqa: F401


def extended_header(data: bytes) -> Any | None:
    """Header of a `.pte`, from its first 64 bytes: where its segments begin; None of a file without segments."""
    from executorch.exir._serialize._program import _get_extended_header

    return _get_extended_header(data)


def flat_program(table: bytes | bytearray) -> Any:
    """Reader of the flatbuffer of a `.pte`."""
    from executorch.exir._serialize._flatbuffer_program import _patch_generated_flatbuffer_aliases
    from executorch.exir._serialize.generated.executorch_flatbuffer.Program import Program

    # The generated readers name modules where they need classes, until the serialiser's own reader has been here.
    _patch_generated_flatbuffer_aliases()
    return Program.GetRootAs(table)


def delegate_calls(plan: Any) -> list[Any]:
    """Readers of a method's calls of delegates.

    Args:
        plan: Its reader, of `flat_program`.
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
    """The program of a `.pte`, as its schema's dataclasses."""
    from executorch.exir._serialize._program import deserialize_pte_binary

    return deserialize_pte_binary(data).program


def operator_names() -> set[str]:
    """Operators that the installed runtime has kernels for."""
    return set(runtime()._get_operator_names())


def edge_config(skip_dim_order: bool = False, kept: Sequence[Any] = ()) -> Any:
    """A compile config whose edge dialect takes operators that are not of its own.

    Args:
        skip_dim_order: Keep the operators that copy and convert as they are.
        kept: Operators that are not spelled out.
    """
    from executorch.exir import EdgeCompileConfig

    return EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=skip_dim_order, preserve_ops=list(kept))


def operator_of(target: Any) -> Any:
    """The operator that one of the edge dialect wraps, or `target` itself."""
    from torch._ops import OpOverload

    return target if isinstance(target, OpOverload) else getattr(target, "_op", target)


def edge_operator(target: Any) -> Any:
    """An operator in the edge dialect; what is no operator, such as `operator.getitem`, as it is."""
    from executorch.exir.dialects._ops import ops
    from torch._ops import OpOverload

    if not isinstance(target, OpOverload):
        return target
    library, name = target._schema.name.split("::")
    return getattr(getattr(getattr(ops.edge, library), name), target._overloadname)


def call_delegate_operator() -> Any:
    """What a graph calls a delegate with."""
    from executorch.exir.delegate import executorch_call_delegate

    return executorch_call_delegate


def forget_program(program: ExecutorchProgramManager) -> None:
    """Let go of a written program's weights, and of the graphs of earlier exports.

    What delegates packed stays with modules that several caches refer to. ExecuTorch remembers every pair of nodes that
    it compared and the last that it did not take, and a node holds its graph; torch remembers what operators gave on
    fake tensors by their arguments, and delegates are arguments.
    """
    from executorch.exir.backend.utils import WhyNoPartition, is_same_node
    from executorch.exir.lowered_backend_module import LoweredBackendModule

    for method in program.methods:
        for lowered in program.exported_program(method).graph_module.modules():
            if isinstance(lowered, LoweredBackendModule) and lowered._named_data_store_output is not None:
                lowered._named_data_store_output.buffers.clear()
    if program._named_data is not None:
        program._named_data.buffers.clear()
    # Torch is imported with it, and the command line without.
    from .torch import forget_fake_results

    is_same_node.cache_clear()
    forget_fake_results()
    for name, module in list(sys.modules.items()):
        if name.startswith("executorch.backends.xnnpack."):
            for value in vars(module).values():
                if isinstance(value, WhyNoPartition):
                    value.node = None


def without_submodules(program: ExportedProgram) -> Any:
    """A program as `unsafe_remove_auto_functionalized_pass` reads it, with no graph inside its own."""
    module = program.graph_module
    outer = SimpleNamespace(modules=lambda: iter((module,)), _set_replace_hook=module._set_replace_hook)
    return SimpleNamespace(graph_module=outer, graph=program.graph, graph_signature=program.graph_signature)


def named_data(buffers: Sequence[bytes], entries: Mapping[str, Any]) -> NamedDataStoreOutput:
    """Data that a delegate finds by name in the file.

    Args:
        buffers: Contents.
        entries: By name, which of them, and how it is aligned.
    """
    from executorch.exir._serialize._named_data_store import NamedDataStoreOutput

    return NamedDataStoreOutput(list(buffers), dict(entries), {})


def pack_pairs(integers: torch.Tensor) -> torch.Tensor:
    """Two values of -8 to 7 a byte, as XNNPACK's compiler packs them: int8 [rows, dim] to uint8 [rows, dim // 2]."""
    from executorch.backends.xnnpack.operators.node_visitor import NodeVisitor

    return NodeVisitor.convert_to_qc4w(integers)


def position_of_field(table: Any, field: int) -> int | None:
    """Where a field of a generated reader's table lies in the buffer, None where it has its default and is not stored.

    Args:
        table: The reader, such as a `DataSegment`.
        field: Offset of the field in the schema's table.
    """
    offset = table._tab.Offset(field)
    return table._tab.Pos + offset if offset else None
