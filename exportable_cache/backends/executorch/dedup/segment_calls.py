"""One operator in place of each repeated segment while a program is lowered, and what takes its place at the end."""

from __future__ import annotations

import json
import logging
import operator
from collections.abc import Mapping, Sequence
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
    Segment,
    StateOrder,
    Unexplained,
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
    """A segment of the program. It is never run: `StampedSegments` knows what it stands for.

    Args:
        inputs: Of the segment.
        tensors: Weights and constants that its portable operators read.
        name: Of this one.
        results: JSON of each result's dtype and sizes; a size that is a text, `0.1`, is that of an input's dimension.
    """
    raise NotImplementedError("exportable_cache::segment stands for other operators and has no kernel")


@segment_call.register_fake
def _(inputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], name: str, results: str) -> list[torch.Tensor]:
    return [
        torch.empty([size_of(size, inputs) for size in sizes], dtype=getattr(torch, dtype))
        for dtype, sizes in json.loads(results)
    ]


_OPERATOR = torch.ops.exportable_cache.segment.default


def is_segment(target: Any) -> bool:
    """Whether a node calls one."""
    return operator_of(target) is _OPERATOR


@dataclass(frozen=True)
class SegmentTemplate:
    """A segment after lowering.

    Attributes:
        graph_module: In the edge dialect. Its placeholders are `tensors`, then the inputs.
        tensors: Names of what its portable operators read: a weight's, a constant's, or one that a rewrite has added.
        added: Values of the last.
        delegates: By the name that the graph has for each.
    """

    graph_module: GraphModule
    tensors: tuple[str, ...]
    added: Mapping[str, torch.Tensor]
    delegates: Mapping[str, DelegateTemplate]


@dataclass
class StampedSegments:
    """The segments of all methods of a program: `take` replaces them before lowering, and what they stand for is asked
    for after it.

    Args:
        lower: Lowers one segment's program by itself, and gives it in the edge dialect.

    Attributes:
        left: Why kinds of repeated segments are lowered in their places.
    """

    lower: Callable[[ExportedProgram], ExportedProgram]
    left: list[str] = field(default_factory=list)
    _templates: dict[str, SegmentTemplate | None] = field(default_factory=dict)
    _calls: dict[str, tuple[SegmentTemplate, dict[str, Any]]] = field(default_factory=dict)
    _packed: dict[Any, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Segments that were replaced so far."""
        return len(self._calls)

    def take(self, program: ExportedProgram) -> ExportedProgram:
        """The program with one call for each repeated segment; others are returned as they are."""
        program = fold_linears(program)
        if not may_repeat(program):
            return program
        ordered, order = _ordered(program)
        replaced: dict[Node, Node] = {}
        # All of them before any is replaced: replacing changes what others read.
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

    def called(self, name: str) -> tuple[SegmentTemplate, dict[str, Any]]:
        """Of one call: what takes its place, and its delegates by name."""
        return self._calls[name]

    def _template(self, program: ExportedProgram, segment: Segment) -> SegmentTemplate | None:
        if segment.text not in self._templates:
            try:
                self._templates[segment.text] = self._lowered(segment_program(program, segment), len(segment.weights))
            except Exception as error:  # what tracers and compilers have against it shows again where it is in place
                self._templates[segment.text] = None
                self.left.append(f"{type(error).__name__}: {error}")
                log.info(
                    "equal layers are lowered one by one, from %s of %d operators on: %s",
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
        delegates, stamped = {}, {names[node.name] for node in read}
        for node in edge.graph.find_nodes(op="get_attr"):
            lowered = getattr(edge.graph_module, node.target)
            found = _weights(lowered.original_module)
            delegates[node.target] = DelegateTemplate(lowered, found)
            stamped |= set(found)
        lost = {f"{WEIGHT}{index}" for index in range(weights)} - stamped
        if lost:
            raise Unexplained(f"weights that became part of something else: {', '.join(sorted(lost))}")
        return SegmentTemplate(edge.graph_module, tuple(names[node.name] for node in read), added, delegates)

    def _replace(
        self, program: ExportedProgram, segment: Segment, template: SegmentTemplate, replaced: dict[Node, Node]
    ) -> None:
        weights = [tensor_of(program, node) for node in segment.weights]
        delegates = {name: delegate.stamped(weights, self._packed) for name, delegate in template.delegates.items()}
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
    """Numbers of the weights that a delegate's program reads, by name."""
    names = program.graph_signature.inputs_to_parameters
    read = [
        names[node.name] for node in program.graph.find_nodes(op="placeholder") if node.users and node.name in names
    ]
    return {name: int(name.removeprefix(WEIGHT)) for name in read if name.startswith(WEIGHT)}


def _ordered(program: ExportedProgram) -> tuple[ExportedProgram, StateOrder]:
    """A program without what only checks dtypes, and the order of its writes; functional where that has to be."""
    order = traced_order(program)
    if order is None:
        program = program.run_decompositions({})
        order = functional_order(program)
    for node in program.graph.find_nodes(op="call_function", target=METADATA_ASSERTION):
        program.graph.erase_node(node)
    program.graph.eliminate_dead_code()
    return program, order
