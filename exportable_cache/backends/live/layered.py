"""A backend of torch.compile that compiles one layer of each kind, and calls it once for each."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule, Node

from ...common.compat import torch_compile as private
from .clone_layers import taken_marks
from .graphs import OwnTensor, OwnTensors
from .ops.attention import attention_of_few_queries
from .ops.linear import linears_by_onednn, linears_of_few_rows
from .regions import regions_of
from .replay import RecordedSteps

if TYPE_CHECKING:
    from .clone_layers import EqualLayers

#: What Inductor has compiled: its own object, which runs, and can be written.
Compiled = Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class _Call:
    """One region's turn: which one, and where its inputs and outputs lie.

    Attributes:
        region: Number of what was compiled.
        sources, targets: Places among the graph's inputs, its own tensors and the values computed so far.
        done: Places that nothing reads afterwards.
    """

    region: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    done: tuple[int, ...]


class LayeredGraph(private.SerializableCallable):
    """A compiled graph as calls of its regions.

    Args:
        compiled: The distinct regions.
        calls: In order.
        places: How many values there are, the graph's inputs first, and then its own tensors.
        results: Places of what it gives, or values that are the same in every step.
        own: What it takes from the model and the cache by itself.

    Raises:
        OutdatedGraph: See `OwnTensors`.
    """

    def __init__(
        self,
        compiled: Sequence[Compiled],
        calls: Sequence[_Call],
        places: int,
        results: Sequence,
        own: Sequence[OwnTensor] = (),
    ) -> None:
        self.compiled = tuple(compiled)
        self.calls, self.places, self.results = tuple(calls), places, tuple(results)
        self.own = OwnTensors(own)
        self._bound = [(private.region_function(compiled[call.region]), call) for call in calls]
        self.steps = RecordedSteps(self.own)

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        return self.steps(self._run, inputs)

    def _run(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        values = [*inputs, *self.own.tensors()]
        values += [None] * (self.places - len(values))
        for region, call in self._bound:
            outputs = region(*[values[place] for place in call.sources])
            for place, value in zip(call.targets, outputs, strict=True):
                values[place] = value
            for place in call.done:
                values[place] = None
        return tuple(None if place is None else values[place] for place in self.results)

    @classmethod
    def serialize_compile_artifacts(cls, fn: LayeredGraph) -> bytes:
        """As torch's own compiled functions are written, pickled."""
        regions = [private.region_bytes(one) for one in fn.compiled]
        return pickle.dumps((regions, fn.calls, fn.places, fn.results, fn.own.places))

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> LayeredGraph:
        """What was written."""
        regions, *others = pickle.loads(data)
        return cls([private.region_from_bytes(one) for one in regions], *others)


class LayeredBackend:
    """Compiles graphs whose layers repeat by regions, and others whole: `torch.compile(..., backend=LayeredBackend())`.

    Graphs of one model share the regions that they have in common: the ways to choose tokens, and several steps.

    Args:
        equal: Layers that need not all be traced, where graphs are of such a model.

    Attributes:
        compiled: Regions compiled so far, and graphs compiled whole.
        called: Calls of regions in the graphs so far.
    """

    def __init__(self, equal: EqualLayers | None = None) -> None:
        self.equal = equal
        self.compiled, self.called = 0, 0
        # Operators go along: the texts tell them apart by identity.
        self._regions: dict[str, tuple[Compiled, list[Any]]] = {}

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if self.equal is not None:
            self.equal.traced()
        attention_of_few_queries(module)
        linears_of_few_rows(module)
        linears_by_onednn(module)
        marks = None if self.equal is None else taken_marks(module, inputs, self.equal.own_tensors)
        regions = regions_of(module)
        if marks is not None:
            regions = marks.stamped(regions)
        if not regions:
            self.compiled += 1
            return private.compile_whole(module, inputs)
        places = {
            node: index for index, node in enumerate(node for node in module.graph.nodes if node.op == "placeholder")
        }
        last = {source: index for index, region in enumerate(regions) for source in region.inputs}
        output = next(node for node in module.graph.nodes if node.op == "output")
        numbers: dict[str, int] = {}
        calls: list[_Call] = []
        for region in regions:
            if region.text not in self._regions:
                compiled = private.compile_region(region.module(module), region.examples())
                self._regions[region.text] = compiled, [node.target for node in region.nodes]
                self.compiled += 1
            numbers.setdefault(region.text, len(numbers))
            for node in region.outputs:
                places[node] = len(places)
            done = (
                node
                for node in region.inputs
                if last[node] == len(calls) and node.op != "placeholder" and output not in node.users
            )
            calls.append(
                _Call(
                    numbers[region.text],
                    tuple(places[node] for node in region.inputs),
                    tuple(places[node] for node in region.outputs),
                    tuple(places[node] for node in done),
                )
            )
        self.called += len(calls)
        results = [places[value] if isinstance(value, Node) else None for value in output.args[0]]
        own = () if marks is None else marks.own
        return LayeredGraph([self._regions[text][0] for text in numbers], calls, len(places), results, own)
