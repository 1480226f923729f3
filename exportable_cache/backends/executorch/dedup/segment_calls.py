"""Replace each repeated segment by one operator during a lowering, and keep the lowered bodies to insert afterwards."""

from __future__ import annotations

import json
import logging
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from executorch.backends.transforms.utils import delete_constant_placeholder

from ....common.compat.executorch import operator_of
from ....common.compat.torch import METADATA_ASSERTION
from ..graph_edits import add_constant
from ..quantized import fold_linears
from .cloned_delegates import DelegateTemplate, described_size, size_of
from .segments import (
    CONSTANT,
    WEIGHT,
    CannotClone,
    Segment,
    StateOrder,
    functional_order,
    may_repeat,
    repeated_segments,
    segment_program,
    tensor_of,
    traced_order,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.export import ExportedProgram
    from torch.fx import GraphModule, Node


log = logging.getLogger(__name__)


@torch.library.custom_op("exportable_cache::segment", mutates_args=())
def segment_call(
    inputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], name: str, results: str
) -> list[torch.Tensor]:
    """Represent a segment of the program; never run, because `ClonedSegments` has its lowered body.

    Args:
        inputs: Inputs of the segment.
        tensors: Weights and constants that its portable operators read.
        name: Name of this segment.
        results: JSON of each result's dtype and sizes; a size such as `"0.1"` is that of an input's dimension.
    """
    raise NotImplementedError("exportable_cache::segment is a placeholder and has no kernel")


@segment_call.register_fake
def _(inputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], name: str, results: str) -> list[torch.Tensor]:
    return [
        torch.empty([size_of(size, inputs) for size in sizes], dtype=getattr(torch, dtype))
        for dtype, sizes in json.loads(results)
    ]


_OPERATOR = torch.ops.exportable_cache.segment.default


def is_segment(target: Any) -> bool:
    """Return True if a node's target is the segment operator."""
    return operator_of(target) is _OPERATOR


@dataclass(frozen=True)
class SegmentTemplate:
    """A lowered segment.

    Attributes:
        graph_module: Graph in the edge dialect; its placeholders are `tensors`, then the inputs.
        tensors: Names of the tensors that its portable operators read: weights, constants, and those that a rewrite
            added.
        added: Values of the tensors that a rewrite added.
        delegates: Delegate templates by their attribute name in the graph.
    """

    graph_module: GraphModule
    tensors: tuple[str, ...]
    added: Mapping[str, torch.Tensor]
    delegates: Mapping[str, DelegateTemplate]


@dataclass
class ClonedSegments:
    """Segments of all methods of a program: `replace` inserts placeholders before lowering, `body_of` is read after it.

    Args:
        lower: Lowers the program of one segment to the edge dialect.

    Attributes:
        left: Reasons why kinds of repeated segments are lowered in place.
    """

    lower: Callable[[ExportedProgram], ExportedProgram]
    left: list[str] = field(default_factory=list)
    _templates: dict[str, SegmentTemplate | None] = field(default_factory=dict)
    _calls: dict[str, tuple[SegmentTemplate, dict[str, Any]]] = field(default_factory=dict)
    _packed: dict[Any, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of segments replaced so far."""
        return len(self._calls)

    def replace(self, program: ExportedProgram, state: Collection[str] = ()) -> ExportedProgram:
        """Return the program with one call for each repeated segment; other programs are returned unchanged.

        Args:
            program: The program.
            state: Buffers that another method of the file writes, see `rewrites.state_of`.
        """
        program = fold_linears(program)
        if not may_repeat(program):
            return program
        ordered, order = _ordered(program, state)
        replaced: dict[Node, Node] = {}
        # All templates first, because replacing a segment changes what others read.
        groups = [(group, self._template(ordered, group[0])) for group in repeated_segments(ordered, order)]
        for group, template in groups:
            if template is None:
                continue
            for segment in group:
                self._replace(ordered, segment, template, replaced)
        if not replaced:
            return program
        order.restore(ordered.graph)
        ordered.graph.eliminate_dead_code()
        for node in ordered.graph.find_nodes(op="placeholder"):
            if not node.users and node.name in ordered.graph_signature.inputs_to_parameters:
                delete_constant_placeholder(ordered, node)
        ordered.graph_module.recompile()
        return ordered

    def body_of(self, name: str) -> tuple[SegmentTemplate, dict[str, Any]]:
        """Return the lowered body of a call, and its delegates by name."""
        return self._calls[name]

    def _template(self, program: ExportedProgram, segment: Segment) -> SegmentTemplate | None:
        if segment.text not in self._templates:
            try:
                self._templates[segment.text] = self._lowered(segment_program(program, segment), len(segment.weights))
            except Exception as error:  # an error of the model itself is raised again by the lowering in place
                self._templates[segment.text] = None
                self.left.append(f"{type(error).__name__}: {error}")
                log.info(
                    "equal layers are lowered separately, starting with %s (%d operators): %s",
                    segment.nodes[0].name,
                    len(segment.nodes),
                    self.left[-1],
                )
        return self._templates[segment.text]

    def _lowered(self, program: ExportedProgram, weights: int) -> SegmentTemplate:
        edge = self.lower(program)
        signature = edge.graph_signature
        names = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }
        read = [node for node in edge.graph.find_nodes(op="placeholder") if node.name in names]
        added = {
            names[node.name]: tensor_of(edge, node)
            for node in read
            if not names[node.name].startswith((WEIGHT, CONSTANT))
        }
        delegates, found_in = {}, {names[node.name] for node in read}
        for node in edge.graph.find_nodes(op="get_attr"):
            lowered = getattr(edge.graph_module, node.target)
            found = _weights(lowered.original_module)
            delegates[node.target] = DelegateTemplate(lowered, found)
            found_in |= set(found)
        lost = {f"{WEIGHT}{index}" for index in range(weights)} - found_in
        if lost:
            raise CannotClone(f"weights are part of other tensors: {', '.join(sorted(lost))}")
        return SegmentTemplate(edge.graph_module, tuple(names[node.name] for node in read), added, delegates)

    def _replace(
        self, program: ExportedProgram, segment: Segment, template: SegmentTemplate, replaced: dict[Node, Node]
    ) -> None:
        weights = [tensor_of(program, node) for node in segment.weights]
        delegates = {name: delegate.clone(weights, self._packed) for name, delegate in template.delegates.items()}
        name = f"segment_{len(self._calls)}"
        self._calls[name] = (template, delegates)
        tensors = []
        for read in template.tensors:
            if read in template.added:
                tensors.append(add_constant(program, f"{name}_{read}", template.added[read]))
            else:
                of_weights = read.startswith(WEIGHT)
                index = int(read.removeprefix(WEIGHT if of_weights else CONSTANT))
                tensors.append((segment.weights if of_weights else segment.constants)[index])
        values = [node.meta["val"] for node in segment.outputs]
        results = json.dumps(
            [
                [
                    str(value.dtype).removeprefix("torch."),
                    [described_size(size, segment.inputs) for size in value.shape],
                ]
                for value in values
            ]
        )
        with program.graph.inserting_after(segment.nodes[-1]):
            call = program.graph.call_function(
                _OPERATOR, ([replaced.get(node, node) for node in segment.inputs], tensors, name, results)
            )
        call.meta = {key: value for key, value in segment.nodes[-1].meta.items() if key != "val"}
        call.meta["val"] = values
        last = call
        for index, node in enumerate(segment.outputs):
            with program.graph.inserting_after(last):
                last = program.graph.call_function(operator.getitem, (call, index))
            last.meta = dict(node.meta)
            node.replace_all_uses_with(last)
            replaced[node] = last
        for node in reversed(segment.nodes):
            program.graph.erase_node(node)


def _weights(program: ExportedProgram) -> dict[str, int]:
    """Return the indices of the weights that a delegate's program reads, by name."""
    names = program.graph_signature.inputs_to_parameters
    read = [
        names[node.name] for node in program.graph.find_nodes(op="placeholder") if node.users and node.name in names
    ]
    return {name: int(name.removeprefix(WEIGHT)) for name in read if name.startswith(WEIGHT)}


def _ordered(program: ExportedProgram, state: Collection[str]) -> tuple[ExportedProgram, StateOrder]:
    """Return the program without dtype assertions and the order of its writes; functional if that is needed."""
    order = traced_order(program, state)
    if order is None:
        program = program.run_decompositions({})
        order = functional_order(program, state)
    for node in program.graph.find_nodes(op="call_function", target=METADATA_ASSERTION):
        program.graph.erase_node(node)
    program.graph.eliminate_dead_code()
    return program, order
