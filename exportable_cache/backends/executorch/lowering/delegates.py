"""Delegates that a program can be lowered to, their partitioners, and checks of the result.

XNNPACK's partitions are made free of circular dependencies, and skip compiler passes that they do not need.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from graphlib import CycleError, TopologicalSorter
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir.backend.canonical_partitioners.config_partitioner import ConfigerationBasedPartitioner
from executorch.exir.backend.canonical_partitioners.pattern_op_partitioner import (
    generate_grouped_partitions_from_list_of_nodes,
)
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, PartitionResult
from executorch.runtime import Runtime
from torch.fx import Node
from torch.fx.passes.infra.partitioner import Partition

from ....common.compat.executorch import extended_header, flat_program
from ....errors import BundleError, MissingDependencyError, UnsupportedModelError
from ..options import DEVICE_ONLY

if TYPE_CHECKING:
    from executorch.exir import ExecutorchProgramManager
    from torch.export import ExportedProgram
    from torch.fx import Graph

    from ....common.compat.torch import OpOverload
    from ....program.program import Program


#: Ids of delegates in the file, by name.
BACKEND_IDS = {"xnnpack": "XnnpackBackend", "vulkan": "VulkanBackend", "coreml": "CoreMLBackend"}

_HEADER_BYTES = 64


def partitioners_for(delegate: str) -> list[Any]:
    """Return the partitioners of a delegate.

    Raises:
        MissingDependencyError: If its compiler is not installed.
    """
    if delegate == "vulkan":
        from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner

        return [VulkanPartitioner()]
    if delegate == "coreml":
        return [_core_ml_partitioner()]

    return [AcyclicXnnpackPartitioner()]


def _core_ml_partitioner() -> Any:
    if util.find_spec("coremltools") is None:
        raise MissingDependencyError(
            "delegate 'coreml' needs coremltools, which is not installed; pip install coremltools"
        )
    with _quiet():
        import coremltools
        from executorch.backends.apple.coreml.compiler import CoreMLBackend
        from executorch.backends.apple.coreml.partition import CoreMLPartitioner

    specs = CoreMLBackend.generate_compile_specs(
        # The first version with state inside a model.
        minimum_deployment_target=coremltools.target.iOS18,
        compute_precision=coremltools.precision.FLOAT32,
    )
    return CoreMLPartitioner(compile_specs=specs, take_over_mutable_buffer=True)


def check_methods(delegate: str, program: Program) -> None:
    """Refuse methods that a delegate's compiler does not take.

    Raises:
        UnsupportedModelError: If the delegate compiles only a static decode step, and the program has other methods.
    """
    if delegate in DEVICE_ONLY and list(program.methods) != ["decode"]:
        raise UnsupportedModelError(
            f"methods must be decode only for delegate {delegate!r}, got {', '.join(program.methods)}; "
            "export with prefill_chunk=1 (--prefill-chunk 1), so that prompts are fed token by token"
        )


def check_cache(delegate: str, program: Program, lowered: ExecutorchProgramManager) -> None:
    """Refuse a program whose cache is not where the delegate is known to keep it.

    Raises:
        UnsupportedModelError: If a part of the cache is elsewhere.
    """
    if delegate not in DEVICE_ONLY:
        return
    cache_bytes = sum(
        tensor.nbytes for name, tensor in program.cache.named_state() if not name.endswith(".cumulative_length")
    )
    (plan,) = (plan for plan in lowered.executorch_program.execution_plan if plan.name == "decode")
    # Arenas after that of the activations hold the mutable buffers.
    outside = sum(plan.non_const_buffer_sizes[2:])
    expected = 0 if delegate == "coreml" else cache_bytes
    if outside != expected or (delegate == "coreml" and len(plan.delegates) != 1):
        raise UnsupportedModelError(
            f"delegate {delegate!r} splits this model into {len(plan.delegates)} calls with {outside} of {cache_bytes} "
            f"bytes of the cache outside them, expected {expected}; no runtime is known to run that correctly: "
            "export for delegate 'xnnpack'"
        )


def delegated_calls(lowered: ExecutorchProgramManager) -> dict[str, int]:
    """Return the number of delegate calls by method."""
    return {plan.name: len(plan.delegates) for plan in lowered.executorch_program.execution_plan if plan.delegates}


def delegate_ids(path: Path) -> set[str]:
    """Return the ids of the delegates that a `.pte` calls.

    Raises:
        BundleError: If the file is not a program.
    """
    with path.open("rb") as file:
        header = extended_header(file.read(_HEADER_BYTES))
        if header is None:
            raise BundleError(
                f"the ExecuTorch runtime cannot load {path.name}: the file has no program; export the model again"
            )
        file.seek(0, os.SEEK_SET)
        table = file.read(header.segment_base_offset or header.program_size)
    program = flat_program(table)
    plans = [program.ExecutionPlan(index) for index in range(program.ExecutionPlanLength())]
    return {plan.Delegates(index).Id().decode() for plan in plans for index in range(plan.DelegatesLength())}


def check_runs_here(path: Path) -> None:
    """Refuse a file for delegates that this machine's runtime lacks.

    Raises:
        BundleError: If a delegate is missing.
    """
    available = set(Runtime.get().backend_registry.registered_backend_names)
    missing = sorted(delegate_ids(path) - available)
    if missing:
        raise BundleError(
            f"{path.name} is for {', '.join(missing)}, which the ExecuTorch runtime of this machine lacks (it has "
            f"{', '.join(sorted(available))}); run it on a device that has it, or export for delegate 'xnnpack'"
        )


def not_executed_remark(delegate: str) -> str:
    """Return the remark of a verification for a delegate that this machine cannot execute."""
    remark = (
        f"the XNNPACK lowering of the same exported program was run; the program for {BACKEND_IDS[delegate]} is "
        "not executed here"
    )
    return f"{remark}, and keeps its cache in float16" if delegate == "coreml" else remark


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


#: Read by backends/xnnpack/xnnpack_preprocess.py; the runtime ignores it.
LINEAR_ONLY = CompileSpec("dqlinear_partitioner", b"")

_ATEN = (
    *("linear.default", "addmm.default", "mm.default", "bmm.default"),
    *("_softmax.default", "sigmoid.default", "tanh.default", "gelu.default"),
    *("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "maximum.default", "minimum.default"),
    *("exp.default", "log.default", "sqrt.default", "rsqrt.default", "pow.Tensor_Scalar", "neg.default", "abs.default"),
    *("sin.default", "cos.default", "clamp.default"),
    *("permute_copy.default", "view_copy.default", "unsqueeze_copy.default", "slice_copy.Tensor"),
)
_TORCHAO = ("choose_qparams_affine.default", "quantize_affine.default", "dequantize_affine.default")
#: Operators that no other pass changes. Only torchao's have several results.
PLAIN = frozenset((*(f"aten.{name}" for name in _ATEN), *(f"torchao.{name}" for name in _TORCHAO), "getitem"))
#: Limit of tensors that XNNPACK concatenates at once; a pass splits longer lists.
LONGEST_CAT = 5


def skip_unneeded_passes(result: PartitionResult) -> PartitionResult:
    """Return the partitions, with those of plain operators marked to run one XNNPACK pass only."""
    nodes: dict[str, list[Node]] = {tag: [] for tag in result.partition_tags}
    for node in result.tagged_exported_program.graph.nodes:
        if node.op == "call_function" and node.meta.get("delegation_tag") in nodes:
            nodes[node.meta["delegation_tag"]].append(node)
    specs = {
        tag: _linear_only(spec) if all(map(is_plain, nodes[tag])) else spec
        for tag, spec in result.partition_tags.items()
    }
    return PartitionResult(tagged_exported_program=result.tagged_exported_program, partition_tags=specs)


def is_plain(node: Node) -> bool:
    """Return True if only the pass for linear layers applies to an operator."""
    name = getattr(node.target, "__name__", "")
    arguments: tuple[Any, ...] = node.args
    return name in PLAIN or (name == "aten.cat.default" and len(arguments[0]) <= LONGEST_CAT)


def _linear_only(spec: DelegationSpec) -> DelegationSpec:
    return DelegationSpec(spec.backend_id, [*spec.compile_specs, LINEAR_ONLY])


#: Operators that the delegate serializes as a reshape.
_RESHAPES = ("aten.squeeze_copy.dim", "aten.unsqueeze_copy.default")

#: A unit of execution: one operator, or the index of a group.
Step = Node | int


class AcyclicXnnpackPartitioner(XnnpackPartitioner):
    """Use upstream's partitions if they can run one after the other, else `partitions_by_level`."""

    def generate_partitions(self, ep: ExportedProgram) -> list[Partition]:
        """Return partitions without circular dependencies."""
        matched = [group for group in self.get_matched_nodes_from_configs(ep) if all(map(is_serialisable, group))]
        partitions = generate_grouped_partitions_from_list_of_nodes(ep.graph_module, matched)
        return partitions_by_level(ep.graph, matched) if has_cycle(ep.graph, partitions) else partitions

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Partition a program."""
        # Not `XnnpackPartitioner.partition`, which warns about decomposed operators unless a certain function calls it.
        return skip_unneeded_passes(ConfigerationBasedPartitioner.partition(self, exported_program))

    def kept_operators(self, programs: Iterable[ExportedProgram]) -> list[OpOverload] | None:
        """Return the operators that a lowering must not decompose, because the delegate takes them.

        Returns:
            None if the delegate takes some calls of an operator but not all, which must then be decided per call.
        """
        kept: set[OpOverload] = set()
        others: set[OpOverload] = set()
        for program in programs:
            offered, takes = self.ops_to_not_decompose(program)
            for node in program.graph.nodes:
                if node.target in offered:
                    (kept if takes is None or takes(node) else others).add(node.target)
        return None if kept & others else list(kept)


def is_serialisable(node: Node) -> bool:
    """Return True if XNNPACK can serialize an operator: a reshape may have one dynamic size at most."""
    if getattr(node.target, "__name__", None) not in _RESHAPES:
        return True
    return sum(isinstance(size, torch.SymInt) for size in node.meta["val"].shape) <= 1


def has_cycle(graph: Graph, partitions: Sequence[Partition]) -> bool:
    """Return True if partitions depend on each other in a circle."""
    inputs = _inputs(graph, {node: index for index, partition in enumerate(partitions) for node in partition.nodes})
    try:
        TopologicalSorter(inputs).prepare()
    except CycleError:
        return True
    return False


def partitions_by_level(graph: Graph, groups: Sequence[Sequence[Node]]) -> list[Partition]:
    """Partition a delegate's operators by how often the longest path to them enters or leaves the delegate.

    This level never falls along an edge, and rises where an edge leaves the delegate, so no path returns to a
    partition.

    Args:
        graph: Graph to partition.
        groups: The delegate's operators; those of one group stay together.
    """
    inputs = _inputs(graph, {node: index for index, group in enumerate(groups) for node in group})
    level: dict[Step, int] = {}
    members: dict[int, dict[Node, None]] = {}
    for step in TopologicalSorter(inputs).static_order():
        delegated = isinstance(step, int)
        level[step] = max((level[used] + (isinstance(used, int) is not delegated) for used in inputs[step]), default=0)
        if isinstance(step, int):
            members.setdefault(level[step], {}).update(dict.fromkeys(groups[step]))
    return [Partition(id=index, nodes=nodes) for index, nodes in enumerate(members.values())]


def _inputs(graph: Graph, number_of: Mapping[Node, int]) -> dict[Step, set[Step]]:
    """Return the dependencies of each step; nodes with an index in `number_of` are one step under it."""
    inputs: dict[Step, set[Step]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":  # Always available; a constant in several partitions is copied to each.
            continue
        step = number_of.get(node, node)
        used = {number_of.get(one, one) for one in node.all_input_nodes if one.op != "placeholder"}
        inputs.setdefault(step, set()).update(used - {step})
    return inputs
