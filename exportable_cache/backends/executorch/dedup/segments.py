"""Find runs of operators that repeat between layers, and make a program of each kind.

Operators may be moved only within the order of the program's in-place writes (`StateOrder`), which a traced graph does
not record as dependencies. Making a graph functional records it, but takes as long as tracing. If only this package's
operators touch the cache, their schemas declare what they write, and the order is read from these.
"""

from __future__ import annotations

import hashlib
import operator
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.export import Dim
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from ....common.compat.torch import OpOverload, gives_views, writes_in_place, written_arguments

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Graph


#: Shorter runs are lowered in place, because a separate lowering takes longer.
_MIN_OPERATORS = 12
#: Fewer equal segments are lowered in place, because that is as fast.
_MIN_REPEATS = 3
_LIBRARIES = ("aten", "exportable_cache", "torchao", "quantized_decomposed")
#: Not part of a segment, because `lowering.insertions` replaces it: see `attention.forms`.
_IN_PLACE = "exportable_cache::fused_attention"


class CannotClone(Exception):
    """Raised with the reason if equal segments cannot be lowered once and cloned."""


@dataclass(frozen=True, eq=False)
class Segment:
    """A run of operators that repeats.

    Attributes:
        nodes: Operators, in the graph's order.
        inputs: Tensors computed before the run, or inputs of the program.
        weights: Parameters, which may differ between equal segments.
        constants: Other tensors of the program, which have the same values in equal segments.
        outputs: Nodes of the run that are read after it.
        text: Description of the run, which is the same for equal segments.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    weights: tuple[Node, ...]
    constants: tuple[Node, ...]
    outputs: tuple[Node, ...]
    text: str


def repeated_segments(program: ExportedProgram, order: StateOrder) -> list[list[Segment]]:
    """Return the segments that a program has several times, grouped by equality, in the graph's order."""
    reader = _Reader(program)
    segments = [segment for run in _runs(program, order) if (segment := reader.segment(run)) is not None]
    counts = Counter(segment.text for segment in segments)
    groups: dict[str, list[Segment]] = {}
    for segment in segments:
        if counts[segment.text] >= _MIN_REPEATS:
            groups.setdefault(segment.text, []).append(segment)
    return list(groups.values())


def may_repeat(program: ExportedProgram) -> bool:
    """Return True if the program may contain enough equal segments to lower them once.

    The layer indices in the module paths of its operators decide; without module paths the answer is True.
    """
    numbers: dict[str, set[str]] = {}
    for node in program.graph.nodes:
        for path, _ in (node.meta.get("nn_module_stack") or {}).values():
            parent, _, name = path.rpartition(".")
            if name.isdecimal():
                numbers.setdefault(parent, set()).add(name)
    return not numbers or max(map(len, numbers.values())) >= _MIN_REPEATS


def _runs(program: ExportedProgram, order: StateOrder) -> Iterator[list[Node]]:
    """Yield operators that can be moved together: each run ends before the first that depends on one outside it."""
    run: list[Node] = []
    members: set[Node] = set()
    waiting: set[Node] = set()
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        sources = {*node.all_input_nodes, *order.before(node)}
        if not _is_movable(node) or not order.states.isdisjoint(node.all_input_nodes):
            # Operators that depend on this one cannot be in the current run.
            if sources & (members | waiting):
                waiting.add(node)
            continue
        if sources & waiting:
            yield run
            run, members, waiting = [], set(), set()
        run.append(node)
        members.add(node)
    yield run


def _is_movable(node: Node) -> bool:
    target = node.target
    if target is operator.getitem:
        source: Any = node.args[0]
        return _is_movable(source)
    if not isinstance(target, OpOverload) or target.namespace not in _LIBRARIES or target.name() == _IN_PLACE:
        return False
    values = node.meta.get("val")
    values = values if isinstance(values, (list, tuple)) else [values]
    return not writes_in_place(target) and all(isinstance(value, torch.Tensor) for value in values)


class _Reader:
    """Makes segments from runs of operators."""

    def __init__(self, program: ExportedProgram) -> None:
        self._tensors = {**program.state_dict, **program.constants}
        self._names, self._parameters = tensor_names(program), program.graph_signature.inputs_to_parameters

    def segment(self, run: Sequence[Node]) -> Segment | None:
        """Return the segment, or None if the run is too short or a size in it is not a size of its inputs."""
        # Assertions about sizes have no users, and the sizes of the inputs are known.
        nodes = [node for node in run if node.users]
        if len(nodes) < _MIN_OPERATORS:
            return None
        members = set(nodes)
        read = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in members)
        weights = [node for node in read if self._is_weight(node)]
        constants = [node for node in read if self._tensor(node) is not None and node not in weights]
        others = [node for node in read if self._tensor(node) is None]
        inputs = [node for node in others if isinstance(node.meta["val"], torch.Tensor)]
        outputs = [node for node in nodes if any(user not in members for user in node.users)]
        if not all(isinstance(node.meta["val"], torch.Tensor) for node in outputs):
            return None
        sizes = {node: source_of_size(node.meta["val"], inputs) for node in others if node not in inputs}
        dims = [dim for node in outputs for dim in node.meta["val"].shape]
        if None in (*sizes.values(), *(source_of_size(dim, inputs) for dim in dims)):
            return None
        names = {node: f"size of {source}" for node, source in sizes.items()}
        for letter, group in (("w", weights), ("c", constants), ("i", inputs), ("n", nodes)):
            names |= {node: f"{letter}{index}" for index, node in enumerate(group)}
        lines = [f"{names[node]}: {_shape(node)} {self._digest(node)}" for node in (*weights, *constants, *inputs)]
        lines += [_call(node, names) for node in nodes]
        lines.append(", ".join(names[node] for node in outputs))
        tensors = (tuple(inputs), tuple(weights), tuple(constants))
        return Segment(tuple(nodes), *tensors, tuple(outputs), "\n".join(lines))

    def _tensor(self, node: Node) -> torch.Tensor | None:
        return self._tensors.get(self._names.get(node.name, ""))

    def _is_weight(self, node: Node) -> bool:
        if node.name not in self._parameters:
            return False
        tensor = self._tensor(node)
        assert tensor is not None
        # A constant, because equal zero points decide which kernel the delegate uses.
        return tensor.is_floating_point() or _varies(tensor.flatten())

    def _digest(self, node: Node) -> str:
        """Return the SHA-256 of a constant's values, or "" for other nodes."""
        tensor = self._tensor(node)
        if tensor is None or self._is_weight(node):
            return ""
        return hashlib.sha256(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()


def _varies(numbers: torch.Tensor) -> bool:
    # The first elements usually decide, and a weight has billions.
    return any(bool((part != numbers[0]).any()) for part in (numbers[:1024], numbers))


def source_of_size(size: int | torch.SymInt, inputs: Sequence[Node]) -> str | None:
    """Return a static size as text, the `input.dim` where a symbolic size is found, or None if it is in no input."""
    if isinstance(size, int):
        return str(size)
    if not isinstance(size, torch.SymInt):
        return None
    for index, node in enumerate(inputs):
        for dim, other in enumerate(node.meta["val"].shape):
            if isinstance(other, torch.SymInt) and other.node.expr == size.node.expr:
                return f"{index}.{dim}"
    return None


def _call(node: Node, names: dict[Node, str]) -> str:
    arguments = map_aggregate(
        (node.args, tuple(node.kwargs.items())), lambda value: names[value] if isinstance(value, Node) else value
    )
    return f"{node.target} {arguments} {_shape(node)}"


def _shape(node: Node) -> str:
    values = node.meta["val"]
    values = values if isinstance(values, (list, tuple)) else [values]
    return ", ".join(f"{value.dtype} {list(value.shape)}" for value in values)


WEIGHT, CONSTANT = "weight_", "constant_"


def segment_program(program: ExportedProgram, segment: Segment) -> ExportedProgram:
    """Trace a segment as a program from its inputs to its outputs; its tensors are `weight_N` and `constant_N`.

    Weights are random, in the range of the segment's weights. No two are equal, so that each can be found in what a
    compiler writes.

    Raises:
        Exception: Any error of torch.export.
    """
    root = nn.Module()
    generator = torch.Generator().manual_seed(0)
    graph = Graph()
    copies: dict[Node, Any] = {}
    for index, node in enumerate(segment.weights):
        name = f"{WEIGHT}{index}"
        root.register_parameter(name, nn.Parameter(_marked(tensor_of(program, node), generator), requires_grad=False))
        copies[node] = graph.get_attr(name)
    for index, node in enumerate(segment.constants):
        root.register_buffer(f"{CONSTANT}{index}", tensor_of(program, node).detach())
        copies[node] = graph.get_attr(f"{CONSTANT}{index}")
    for index, node in enumerate(segment.inputs):
        copies[node] = graph.placeholder(f"input_{index}")

    def copied(node: Node) -> Any:
        if node not in copies:
            source = source_of_size(node.meta["val"], segment.inputs)
            assert source is not None
            index, dim = map(int, source.split("."))
            copies[node] = graph.call_function(torch.ops.aten.sym_size.int, (copies[segment.inputs[index]], dim))
        return copies[node]

    for node in segment.nodes:
        arguments, keywords = map_arg((node.args, node.kwargs), copied)
        target: Any = node.target
        copies[node] = graph.call_function(target, arguments, keywords)
    graph.output(tuple(copies[node] for node in segment.outputs))
    graph.lint()
    values = [node.meta["val"] for node in segment.inputs]
    examples = tuple(torch.zeros([_example(size) for size in value.shape], dtype=value.dtype) for value in values)
    dims: dict[str, Dim] = {}
    shapes = tuple(
        {index: _dim(size, program, dims) for index, size in enumerate(value.shape) if isinstance(size, torch.SymInt)}
        for value in values
    )
    traced = torch.export.export(
        GraphModule(root, graph),
        examples,
        dynamic_shapes=shapes,
        prefer_deferred_runtime_asserts_over_guards=True,
    )
    _check_sizes(segment, traced)
    return traced


def _check_sizes(segment: Segment, traced: ExportedProgram) -> None:
    """Refuse a trace that made a dynamic size static, as torch.export does with example sizes of 1."""
    placeholders = {node.name: node for node in traced.graph.find_nodes(op="placeholder")}
    for node, name in zip(segment.inputs, traced.graph_signature.user_inputs, strict=True):
        found = placeholders[name].meta["val"].shape
        for size, other in zip(node.meta["val"].shape, found, strict=True):
            if isinstance(size, torch.SymInt) and not isinstance(other, torch.SymInt):
                raise CannotClone(f"torch.export specialized size {size} of {name} to {other}")


def tensor_names(program: ExportedProgram) -> dict[str, str]:
    """Return the names of parameters, buffers and constants, by those of their placeholders."""
    signature = program.graph_signature
    return {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }


def tensor_of(program: ExportedProgram, node: Node) -> torch.Tensor:
    """Return the value of a parameter, buffer or constant of a program."""
    name = tensor_names(program)[node.name]
    return program.state_dict[name] if name in program.state_dict else program.constants[name]


def _marked(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if tensor.is_floating_point():
        return torch.rand(tensor.shape, generator=generator).add(0.5).to(tensor.dtype)
    return torch.randint(
        int(tensor.min()), int(tensor.max()) + 1, tensor.shape, generator=generator, dtype=tensor.dtype
    )


def _example(size: int | torch.SymInt) -> int:
    return size.node.hint if isinstance(size, torch.SymInt) else size


def _dim(size: torch.SymInt, program: ExportedProgram, dims: dict[str, Any]) -> Any:
    """Return a `Dim` for a size that is linear in one symbol, or `Dim.AUTO` for other expressions."""
    expression = size.node.expr
    symbols = list(expression.free_symbols)
    if len(symbols) != 1 or not expression.is_polynomial(*symbols) or expression.diff(symbols[0]).free_symbols:
        return Dim.AUTO
    (symbol,) = symbols
    if str(symbol) not in dims:
        limits = program.range_constraints[symbol]
        dims[str(symbol)] = Dim(str(symbol), min=int(limits.lower), max=int(limits.upper))
    factor, offset = int(expression.diff(symbol)), int(expression.subs(symbol, 0))
    dim = dims[str(symbol)]
    dim = dim if factor == 1 else factor * dim
    return dim + offset if offset else dim


_Order = Mapping[Node, Sequence[Node]]


@dataclass(frozen=True)
class StateOrder:
    """Order of the operators that read and write the buffers that a program mutates.

    Attributes:
        states: The mutated buffers.
        dependencies: For each operator that reads or writes one, the operators that must come first, besides its
            arguments.
    """

    states: frozenset[Node]
    dependencies: _Order = field(default_factory=dict)

    def before(self, node: Node) -> Sequence[Node]:
        """Return the operators that must come before `node`, besides its arguments."""
        return self.dependencies.get(node, ())

    def restore(self, graph: Graph) -> None:
        """Move the dependencies of each node before it; other nodes keep their order.

        A write to a buffer stays after the reads that preceded it, because the runtime writes in place.
        """
        order: dict[Node, None] = {}
        for node in list(graph.nodes):
            pending = [node]
            while pending:
                sources = (*pending[-1].all_input_nodes, *self.before(pending[-1]))
                missing = next((source for source in sources if source not in order), None)
                if missing is not None:
                    pending.append(missing)
                else:
                    order[pending.pop()] = None
        nodes = list(order)
        for before, node in zip(nodes, nodes[1:]):
            before.append(node)


def functional_order(program: ExportedProgram, state: Collection[str] = ()) -> StateOrder:
    """Return the order of a functional program, whose dependencies are all arguments; see `traced_order`."""
    buffers = program.graph_signature.inputs_to_buffers
    mutated = {*program.graph_signature.buffers_to_mutate.values(), *state}
    return StateOrder(frozenset(node for node in _placeholders(program) if buffers.get(node.name) in mutated))


def traced_order(program: ExportedProgram, state: Collection[str] = ()) -> StateOrder | None:
    """Return the order of a traced program, or None if it must be made functional first.

    That is the case if it writes to a tensor that is not a buffer, or if a torch operator reads what is written,
    because that may be a view.

    Args:
        program: The program.
        state: Buffers that another method of the file writes, see `rewrites.state_of`.
    """
    if program.graph_signature.buffers_to_mutate:
        # A rewrite made it functional.
        return functional_order(program, state)
    buffers = {node for node in _placeholders(program) if node.name in program.graph_signature.inputs_to_buffers}
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    writes: dict[Node, set[Node]] = {}
    for node in calls:
        if isinstance(node.target, OpOverload):
            targets = _written(node, node.target)
            if not targets <= buffers:
                return None
            if targets:
                writes[node] = targets
        elif node.target is not operator.getitem and not isinstance(node.meta.get("val"), _NUMBERS):
            # A higher-order operator, whose graphs may write.
            return None
    states = set().union(*writes.values())
    touching = [node for node in calls if not states.isdisjoint(node.all_input_nodes)]
    if any(node.target.namespace == "aten" or gives_views(node.target) for node in touching):
        return None
    names = program.graph_signature.inputs_to_buffers
    read = {node for node in buffers if names[node.name] in state}
    return StateOrder(frozenset(states | read), _dependencies(touching, states, writes))


_NUMBERS = (bool, int, float, torch.SymBool, torch.SymInt, torch.SymFloat)


def _placeholders(program: ExportedProgram) -> Sequence[Node]:
    return program.graph.find_nodes(op="placeholder")


def _written(node: Node, target: OpOverload) -> set[Node]:
    """Return the arguments that an operator writes to."""
    found: set[Node] = set()
    for index, name in written_arguments(target):
        map_arg(node.args[index] if index < len(node.args) else node.kwargs.get(name), found.add)
    return found


def _dependencies(touching: Sequence[Node], states: set[Node], writes: Mapping[Node, set[Node]]) -> _Order:
    """Map each operator to its dependencies: reads follow the last write, writes also follow all reads since."""
    last: dict[Node, list[Node]] = defaultdict(list)
    readers: dict[Node, list[Node]] = defaultdict(list)
    dependencies: dict[Node, Sequence[Node]] = {}
    for node in touching:
        before: dict[Node, None] = {}
        for state in states.intersection(node.all_input_nodes):
            before |= dict.fromkeys(last[state])
            if state in writes.get(node, ()):
                before |= dict.fromkeys(readers.pop(state, ()))
                last[state] = [node]
            else:
                readers[state].append(node)
        dependencies[node] = tuple(before)
    return dependencies
