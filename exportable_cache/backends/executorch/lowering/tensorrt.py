"""ExecuTorch programs whose methods are one TensorRT plan each, made without a GPU.

torch_tensorrt 2.13.0 writes such files from live engines, which need a GPU. Its partitioner also accepts the
placeholder operator that holds a plan's bytes, so a module that calls it is exported instead of an engine.

The delegate of torch_tensorrt 2.14.0 also takes aliases: an output that shares its memory with an input of the method.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.export import Dim

from ....common.compat.executorch import deserialized_program, edge_config
from ....errors import UnsupportedModelError
from ....models.lora import WRITE_ADAPTER
from ...base import LoweredFile
from ...tensorrt.engine_io import details_of
from ...tensorrt.target import program_networks, record_of

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from ....program.program import Program
    from ...tensorrt.engine_io import EngineRecord
    from ..options import ExecutorchOptions


_DELIMITER = "%"


def takes_aliases() -> bool:
    """Return True if the installed torch_tensorrt's delegate writes caches in place, as from 2.14 on."""
    from ...tensorrt import upstream  # noqa: F401  torch_tensorrt is importable after it

    return hasattr(import_module("torch_tensorrt.executorch.serialization"), "TENSORRT_MAGIC_ALIASED_IO")


class PlanModule(nn.Module):
    """Module that calls a plan: `forward(tensors)` maps the engine's inputs to its outputs, in the record's order.

    Args:
        plan: Serialized plan.
        record: Record of the plan.
    """

    def __init__(self, plan: bytes, record: EngineRecord) -> None:
        from ...tensorrt.upstream import register_engine_operator

        register_engine_operator()
        super().__init__()
        self.register_buffer("plan", torch.frombuffer(bytearray(plan), dtype=torch.uint8))
        # In the order of the operator's arguments.
        aliased = takes_aliases()
        abi = "10" if aliased else "9"
        self.before = (abi, record.method, _DELIMITER.join(("0", "0", "0", "0", "gpu")))  # ABI, name, GPU 0
        names = (_DELIMITER.join(tensor.name for tensor in tensors) for tensors in (record.inputs, record.outputs))
        self.after = (*names, "0", _metadata(record), "linux_x86_64", "0", "0", "0")
        if aliased:
            pairs = (f"{output}@{source}@kv_cache_update" for output, source in record.aliases.items())
            self.after = (*self.after, _DELIMITER.join(pairs))

    def forward(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Call the plan."""
        return torch.ops.tensorrt.no_op_placeholder_for_execute_engine(tensors, *self.before, self.plan, *self.after)


def _metadata(record: EngineRecord) -> str:
    """Return output shapes for the operator's fake kernel, as the pickle of plain values that torch_tensorrt reads."""
    outputs = [
        {"shape_exprs": list(tensor.shape), "dtype": getattr(torch, tensor.dtype)}
        for tensor in record.outputs
        # The fake kernel appends aliased outputs.
        if tensor.name not in record.aliases
    ]
    return base64.b64encode(pickle.dumps({"inout_symexprs": {"inputs": [], "outputs": outputs}})).decode()


def export_plan(plan: bytes, record: EngineRecord) -> ExportedProgram:
    """Return an exported program that calls a plan."""
    tensors, shapes = [], []
    for tensor in record.inputs:
        tensors.append(torch.zeros(tensor.max_shape, dtype=getattr(torch, tensor.dtype)))
        sizes = zip(tensor.min_shape, tensor.max_shape, strict=True)
        shapes.append(
            {dim: Dim("length", min=least, max=most) for dim, (least, most) in enumerate(sizes) if least != most}
        )
    return torch.export.export(PlanModule(plan, record).eval(), (tensors,), dynamic_shapes=(shapes,))


def lower_to_plans(program: Program, folder: Path, file: str, options: ExecutorchOptions) -> list[LoweredFile]:
    """Write one `.pte` with a plan per method.

    Caches are inputs and outputs of each method. If the delegate takes aliases, it writes new tokens into the inputs.
    """
    encoders = [name for name, method in program.methods.items() if not method.is_step and name != WRITE_ADAPTER]
    if encoders:
        raise UnsupportedModelError(
            f"delegate 'tensorrt' takes decoders of text alone, and the program has {', '.join(encoders)}; export for "
            "target 'tensorrt'"
        )
    capabilities = options.capabilities
    records, exported = [], {}
    for method, network in program_networks(program, options, in_place=takes_aliases()).items():
        record = record_of(method, network, capabilities)
        # The delegate's compiler expects the others first.
        record = record.model_copy(
            update={"outputs": sorted(record.outputs, key=lambda tensor: tensor.name in record.aliases)}
        )
        exported[method] = export_plan(network.build_plan(capabilities), record)
        records.append(record)
    with (folder / file).open("wb") as target:
        _to_executorch(exported).write_to_file(target)
    return [LoweredFile(file, f"TensorRT plans of {', '.join(exported)}, weights in each", details_of(*records))]


def _to_executorch(exported: Mapping[str, ExportedProgram]) -> Any:
    from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
    from executorch.exir.passes import MemoryPlanningPass
    from executorch.exir.passes.propagate_device_config import PropagateDeviceConfig
    from torch_tensorrt.executorch import TensorRTPartitioner

    from ...tensorrt import upstream  # noqa: F401

    edge = to_edge_transform_and_lower(
        dict(exported), partitioner=[TensorRTPartitioner()], compile_config=edge_config()
    )
    if not takes_aliases():
        return edge.to_executorch()
    # Inputs and outputs are the caller's, on the GPU: with one address for an output and its alias, nothing is copied.
    return edge.to_executorch(
        ExecutorchBackendConfig(
            memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False, alloc_graph_output=False),
            propagate_device_config=PropagateDeviceConfig(
                skip_h2d_for_method_inputs=True, skip_d2h_for_method_outputs=True
            ),
        )
    )


def plans_in(path: Path) -> list[tuple[bytes, Sequence[str]]]:
    """Return the plans inside a `.pte`, each with its binding names, inputs before outputs."""
    from torch_tensorrt.executorch.serialization import deserialize_engine

    from ...tensorrt import upstream  # noqa: F401

    program = deserialized_program(path.read_bytes())
    plans: list[tuple[bytes, Sequence[str]]] = []
    for delegate in program.backend_delegate_data:
        plan, metadata = deserialize_engine(bytes(delegate.data))
        plans.append((plan, [binding.name for binding in metadata.io_bindings]))
    return plans
