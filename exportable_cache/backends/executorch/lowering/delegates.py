"""Delegates that a program can be lowered to, their partitioners, and checks of what they took.

XNNPACK's partitions are made free of circular waits, and skip compiler passes that they do not need.
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
from ..options import ELSEWHERE

if TYPE_CHECKING:
    from executorch.exir import ExecutorchProgramManager
    from torch.export import ExportedProgram
    from torch.fx import Graph

    from ....common.compat.torch import OpOverload
    from ....program.program import Program


#: Those that this package's own lowering serves: name -> ids of delegates in the file.
BACKEND_IDS = {"xnnpack": "XnnpackBackend", "vulkan": "VulkanBackend", "coreml": "CoreMLBackend"}

_HEADER_BYTES = 64


def partitioners_for(delegate: str) -> list[Any]:
    """What assigns a graph's operators to a delegate.

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
        # The first that has state inside a model.
        minimum_deployment_target=coremltools.target.iOS18,
        compute_precision=coremltools.precision.FLOAT32,
    )
    return CoreMLPartitioner(compile_specs=specs, take_over_mutable_buffer=True)


def check_methods(delegate: str, program: Program) -> None:
    """Refuse methods that a delegate's compiler does not take.

    Raises:
        UnsupportedModelError: If it is to compile anything but one static decode step, and can do nothing else.
    """
    if delegate in ELSEWHERE and list(program.methods) != ["decode"]:
        raise UnsupportedModelError(
            f"delegate {delegate!r} compiles one method of one token, this program has {', '.join(program.methods)}; "
            "export with prefill_chunk=1 (--prefill-chunk 1), so that prompts go in token by token"
        )


def check_cache(delegate: str, program: Program, lowered: ExecutorchProgramManager) -> None:
    """Refuse a program whose cache is not where the delegate is known to keep it.

    Raises:
        UnsupportedModelError: If some of it is on the other side.
    """
    if delegate not in ELSEWHERE:
        return
    cache_bytes = sum(
        tensor.nbytes for name, tensor in program.cache.named_state() if not name.endswith(".cumulative_length")
    )
    (plan,) = (plan for plan in lowered.executorch_program.execution_plan if plan.name == "decode")
    # The arena after that of the activations holds the mutable buffers.
    outside = sum(plan.non_const_buffer_sizes[2:])
    expected = 0 if delegate == "coreml" else cache_bytes
    if outside != expected or (delegate == "coreml" and len(plan.delegates) != 1):
        raise UnsupportedModelError(
            f"delegate {delegate!r} splits this model into {len(plan.delegates)} calls with {outside} of {cache_bytes} "
            f"bytes of the cache outside them, where {expected} are expected; nothing is known to run that rightly: "
            "export for delegate 'xnnpack'"
        )


def delegated_calls(lowered: ExecutorchProgramManager) -> dict[str, int]:
    """Calls into a delegate, by method."""
    return {plan.name: len(plan.delegates) for plan in lowered.executorch_program.execution_plan if plan.delegates}


def delegate_ids(path: Path) -> set[str]:
    """Ids of the delegates that a `.pte` calls.

    Raises:
        BundleError: If the file is none.
    """
    with path.open("rb") as file:
        header = extended_header(file.read(_HEADER_BYTES))
        if header is None:
            raise BundleError(
                f"the ExecuTorch runtime cannot load {path.name}: it has no program; export the model again"
            )
        file.seek(0, os.SEEK_SET)
        table = file.read(header.segment_base_offset or header.program_size)
    program = flat_program(table)
    plans = [program.ExecutionPlan(index) for index in range(program.ExecutionPlanLength())]
    return {plan.Delegates(index).Id().decode() for plan in plans for index in range(plan.DelegatesLength())}


def check_runs_here(path: Path) -> None:
    """Refuse a file for delegates that this machine's runtime lacks.

    Raises:
        BundleError: If it lacks one.
    """
    available = set(Runtime.get().backend_registry.registered_backend_names)
    missing = sorted(delegate_ids(path) - available)
    if missing:
        raise BundleError(
            f"{path.name} is for {', '.join(missing)}, which the ExecuTorch runtime of this machine lacks (it has "
            f"{', '.join(sorted(available))}); run it on a device that has it, or export for delegate 'xnnpack'"
        )


def elsewhere_remark(delegate: str) -> str:
    """What verification says of a program that this machine cannot execute."""
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


#: Read by backends/xnnpack/xnnpack_preprocess.py; the runtime does not look at it.
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
#: No pass but that one looks for these. Of operators with several results, only torchao's are among them.
PLAIN = frozenset((*(f"aten.{name}" for name in _ATEN), *(f"torchao.{name}" for name in _TORCHAO), "getitem"))
#: XNNPACK concatenates so many tensors at once; a pass splits longer lists.
LONGEST_CAT = 5


def with_needed_passes(result: PartitionResult) -> PartitionResult:
    """The same partitions, those of plain operators marked so that one pass is run over them."""
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
    """Whether no pass but the one for linear layers has anything to do with an operator of a delegate."""
    name = getattr(node.target, "__name__", "")
    arguments: tuple[Any, ...] = node.args
    return name in PLAIN or (name == "aten.cat.default" and len(arguments[0]) <= LONGEST_CAT)


def _linear_only(spec: DelegationSpec) -> DelegationSpec:
    return DelegationSpec(spec.backend_id, [*spec.compile_specs, LINEAR_ONLY])


#: Operators that the delegate takes for a reshape.
_RESHAPES = ("aten.squeeze_copy.dim", "aten.unsqueeze_copy.default")

#: What runs as a whole: one operator, or those of one number.
Step = Node | int


class AcyclicXnnpackPartitioner(XnnpackPartitioner):
    """Upstream's partitions where they can run one after the other, `partitions_by_level` where not."""

    def generate_partitions(self, ep: ExportedProgram) -> list[Partition]:
        matched = [group for group in self.get_matched_nodes_from_configs(ep) if all(map(is_serialisable, group))]
        partitions = generate_grouped_partitions_from_list_of_nodes(ep.graph_module, matched)
        return partitions_by_level(ep.graph, matched) if has_cycle(ep.graph, partitions) else partitions

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        # Not XNNPACK's own, which says that operators to keep are spelled out unless one certain function calls it.
        return with_needed_passes(ConfigerationBasedPartitioner.partition(self, exported_program))

    def kept_operators(self, programs: Iterable[ExportedProgram]) -> list[OpOverload] | None:
        """The operators that a lowering leaves whole for the delegate.

        Returns:
            None if the delegate takes some calls of one operator and not others: those are to be spelled out.
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
    """Whether XNNPACK has a form for an operator: it reshapes to one dynamic size at most."""
    if getattr(node.target, "__name__", None) not in _RESHAPES:
        return True
    return sum(isinstance(size, torch.SymInt) for size in node.meta["val"].shape) <= 1


def has_cycle(graph: Graph, partitions: Sequence[Partition]) -> bool:
    """Whether some partitions wait for one another."""
    inputs = _inputs(graph, {node: index for index, partition in enumerate(partitions) for node in partition.nodes})
    try:
        TopologicalSorter(inputs).prepare()
    except CycleError:
        return True
    return False


def partitions_by_level(graph: Graph, groups: Sequence[Sequence[Node]]) -> list[Partition]:
    """A delegate's operators by how often the longest way to them leaves or enters the delegate.

    That number never falls along an edge, and rises where one leaves the delegate: what left a partition never returns
    to it.

    Args:
        graph: To be partitioned.
        groups: The delegate's operators; those of one group go together.
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
    """The steps that each waits for: nodes by themselves, but those that have a number under it."""
    inputs: dict[Step, set[Step]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":  # There from the start; a constant in several partitions is copied to each.
            continue
        step = number_of.get(node, node)
        used = {number_of.get(one, one) for one in node.all_input_nodes if one.op != "placeholder"}
        inputs.setdefault(step, set()).update(used - {step})
    return inputs
