"""Lower one delegate call for equal segments, clone it with the weights of each, and insert the lowered bodies.

A model's layers run the same operators over different weights, and lowering each layer takes most of an export. So one
segment of each kind is lowered over random weights. XNNPACK's payload names its data by SHA-256 digests: the digest
shows where each weight went and how it was packed. A clone is the same payload with the digests of other weights,
packed in the same way. Segments whose payload cannot be explained so are lowered in place.

Clones also carry the shapes of their outputs (`DelegateShapes`), because every ExecuTorch pass would otherwise run the
operators of each delegate on fake tensors: 0.6 s for each delegate of a quantized layer. Each repeated segment is one
operator during a lowering (`ClonedSegments`), and its lowered body is inserted afterwards.
"""

from __future__ import annotations

import hashlib
import json
import logging
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from executorch.backends.transforms.utils import delete_constant_placeholder
from executorch.exir.lowered_backend_module import LoweredBackendModule
from torch.fx import Graph

from ....common.compat.executorch import named_data, operator_of, pack_pairs
from ....common.compat.torch import METADATA_ASSERTION
from ..graph_edits import add_constant
from ..quantized import fold_linears
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
    source_of_size,
    tensor_names,
    tensor_of,
    traced_order,
)

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import GraphModule, Node

    from ....common.compat.executorch import NamedDataStoreOutput


@dataclass(frozen=True)
class _Packing:
    """A way in which XNNPACK's compiler writes a tensor.

    Attributes:
        pack: Returns the tensor whose bytes are written.
        takes: Returns True for tensors that may be packed so.
        bits: Bits per number, or None for those of the tensor's dtype.
    """

    pack: Callable[[torch.Tensor], torch.Tensor]
    takes: Callable[[torch.Tensor], bool]
    bits: int | None = None

    def bytes(self, tensor: torch.Tensor) -> int:
        """Return the number of bytes written for a tensor."""
        return tensor.nbytes if self.bits is None else tensor.numel() * self.bits // 8


def _is_int4(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.int8 and tensor.dim() == 2 and -8 <= int(tensor.min()) <= int(tensor.max()) <= 7


def _is_matrix(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dim() == 2


_PACKINGS = {
    "unchanged": _Packing(lambda tensor: tensor, lambda tensor: True),
    "float32": _Packing(torch.Tensor.float, torch.Tensor.is_floating_point, 32),
    "bfloat16": _Packing(torch.Tensor.bfloat16, torch.Tensor.is_floating_point, 16),
    "transposed": _Packing(lambda tensor: tensor.float().t(), _is_matrix, 32),
    "two to a byte": _Packing(pack_pairs, _is_int4, 4),
}
_KEY = re.compile(rb"(?:scale_)?[0-9a-f]{64}")


@dataclass(frozen=True)
class _WeightEntry:
    """An entry of a delegate's data that holds a weight.

    Attributes:
        key: Key in the template.
        weight: Index of the weight.
        packing: A key of `_PACKINGS`.
    """

    key: str
    weight: int
    packing: str


class DelegateTemplate:
    """A lowered delegate call whose weights can be replaced.

    Args:
        lowered: Call over weights that differ from one another.
        weights: Indices of the weights that the delegate reads, by name in its program.

    Raises:
        CannotClone: If some of its data is neither a weight, packed in a known way, nor the same for all weights; or if
            a weight is in none of its data.
    """

    def __init__(self, lowered: LoweredBackendModule, weights: Mapping[str, int]) -> None:
        self._lowered = with_known_shapes(lowered)
        program = lowered.original_module
        tensors = {**program.state_dict, **program.constants}
        data = lowered.named_data_store_output
        if data is None or data.external_data:
            raise CannotClone("the delegate stores data outside the program")
        self._weight_entries: list[_WeightEntry] = []
        self._fixed: list[str] = []
        for key, entry in data.pte_data.items():
            content = data.buffers[entry.buffer_index]
            found = [(name, packing) for name, tensor in tensors.items() for packing in _packings(tensor, content)]
            if not found:
                raise CannotClone(f"{len(content)} bytes match no tensor of the segment")
            name, packing = found[0]
            if name not in weights:
                self._fixed.append(key)
            else:
                if any(other != name for other, _ in found):
                    raise CannotClone(f"{len(content)} bytes match several tensors of the segment")
                self._weight_entries.append(_WeightEntry(key, weights[name], packing))
        baked = set(weights.values()) - {entry.weight for entry in self._weight_entries}
        if baked:
            raise CannotClone(f"weights are missing in the data: {sorted(baked)}")

    def clone(self, weights: Sequence[torch.Tensor], packed: dict[Any, Any]) -> LoweredBackendModule:
        """Return the call over other weights.

        Args:
            weights: Weights by index.
            packed: Weights packed so far, shared between the methods of the program.
        """
        data = self._lowered.named_data_store_output
        buffers: list[bytes] = []
        entries, keys = {}, {}
        for key in self._fixed:
            entries[key] = replace(data.pte_data[key], buffer_index=len(buffers))
            buffers.append(data.buffers[data.pte_data[key].buffer_index])
        for entry in self._weight_entries:
            tensor = weights[entry.weight]
            identity = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), entry.packing)
            if identity not in packed:
                content = _content(_PACKINGS[entry.packing].pack(tensor.detach()))
                # The tensor is kept, so that its address is not reused.
                packed[identity] = (hashlib.sha256(content).hexdigest(), content, tensor)
            digest, content, _ = packed[identity]
            name = entry.key[:-64] + digest
            keys[entry.key.encode()] = name.encode()
            if name not in entries:
                entries[name] = replace(data.pte_data[entry.key], buffer_index=len(buffers))
                buffers.append(content)
        payload = _KEY.sub(lambda match: keys.get(match.group(), match.group()), self._lowered.processed_bytes)
        return replaced(self._lowered, processed_bytes=payload, named_data=named_data(buffers, entries))


def _packings(tensor: torch.Tensor, content: bytes) -> Iterator[str]:
    """Yield the packing whose bytes equal `content`, if there is one."""
    for name, packing in _PACKINGS.items():
        if packing.takes(tensor) and packing.bytes(tensor) == len(content):
            if _content(packing.pack(tensor.detach())) == content:
                yield name
                return


def _content(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


class DelegateShapes:
    """Replacement for the program that a delegate was made from, of which only the outputs' shapes are needed.

    Attributes:
        graph: Graph with as many outputs.
    """

    def __init__(self, outputs: list[tuple[torch.dtype, list[int | str]]]) -> None:
        self._outputs = outputs
        self.graph = Graph()
        self.graph.output((None,) * len(outputs))

    def module(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """Return a function that makes empty outputs for the delegate's inputs."""
        return self._run

    def _run(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(
            torch.empty([size_of(size, inputs) for size in sizes], dtype=dtype) for dtype, sizes in self._outputs
        )


def with_known_shapes(lowered: LoweredBackendModule) -> LoweredBackendModule:
    """Return the call with a `DelegateShapes`, or unchanged if the shapes cannot be described."""
    program = lowered.original_module
    shapes = None if isinstance(program, DelegateShapes) else shapes_of(program)
    return lowered if shapes is None else replaced(lowered, original_module=shapes)


def replaced(
    lowered: LoweredBackendModule,
    original_module: Any = None,
    processed_bytes: bytes | None = None,
    named_data: NamedDataStoreOutput | None = None,
) -> LoweredBackendModule:
    """Return a copy of the call with the arguments that are not None exchanged."""
    changed = LoweredBackendModule(
        original_module or lowered.original_module,
        lowered.backend_id,
        lowered.processed_bytes if processed_bytes is None else processed_bytes,
        lowered.compile_specs,
        named_data or lowered.named_data_store_output,
    )
    changed.meta = lowered.meta
    return changed


def shapes_of(program: ExportedProgram) -> DelegateShapes | None:
    """Return the output shapes of a delegate's program, or None if an output size is not a size of its inputs."""
    inputs = [
        node for node in program.graph.find_nodes(op="placeholder") if node.name in program.graph_signature.user_inputs
    ]
    outputs = [node.meta["val"] for node in program.graph.output_node().args[0]]
    if not all(isinstance(value, torch.Tensor) and value.is_contiguous() for value in outputs):
        return None
    described: list[tuple[torch.dtype, list[int | str]]] = []
    for value in outputs:
        sizes = [described_size(size, inputs) for size in value.shape]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            return None
        described.append((value.dtype, known))
    return DelegateShapes(described)


def described_size(size: int | torch.SymInt, inputs: Sequence[Node]) -> int | str | None:
    """Return a static size, or the source of a symbolic one, as `size_of` reads it."""
    return source_of_size(size, inputs) if isinstance(size, torch.SymInt) else size


def size_of(described: int | str, inputs: Sequence[torch.Tensor]) -> int | torch.SymInt:
    """Return the size that `described_size` described, for these inputs."""
    if isinstance(described, int):
        return described
    index, dim = map(int, described.split("."))
    return inputs[index].shape[dim]


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
        names = tensor_names(edge)
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
