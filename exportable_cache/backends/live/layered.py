"""A backend of torch.compile that compiles one layer of each kind and calls it for each layer of that kind."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule, Node

from ...common.compat import torch_compile as private
from .clone_layers import take_marks
from .graph_cache import BoundTensor, BoundTensors
from .ops.attention import attention_of_few_queries
from .ops.linear import linears_by_onednn, linears_of_few_rows
from .regions import regions_of

if TYPE_CHECKING:
    from .clone_layers import EqualLayers

#: A region compiled by Inductor, which can be called and serialized.
Compiled = Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class _Call:
    """A call of a region.

    Attributes:
        region: Index of the compiled region.
        sources, targets: Indices of its inputs and outputs among all values: the graph's inputs, its bound tensors, and
            the values computed so far.
        done: Indices of values that are not read afterwards.
    """

    region: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    done: tuple[int, ...]


class LayeredGraph(private.SerializableCallable):
    """A compiled graph that calls its regions.

    Args:
        compiled: The distinct regions.
        calls: The calls, in order.
        count: Number of values. The graph's inputs come first, then its bound tensors.
        results: Indices of the outputs, None for an output that is None.
        bound: Tensors that the graph looks up in the model and the cache.

    Raises:
        OutdatedGraph: See `BoundTensors`.
    """

    def __init__(
        self,
        compiled: Sequence[Compiled],
        calls: Sequence[_Call],
        count: int,
        results: Sequence,
        bound: Sequence[BoundTensor] = (),
    ) -> None:
        self.compiled = tuple(compiled)
        self.calls, self.count, self.results = tuple(calls), count, tuple(results)
        self.bound = BoundTensors(bound)
        self._functions = [(private.region_function(compiled[call.region]), call) for call in calls]

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Run the graph and return its outputs."""
        values = [*inputs, *self.bound.tensors()]
        values += [None] * (self.count - len(values))
        for region, call in self._functions:
            outputs = region(*[values[index] for index in call.sources])
            for index, value in zip(call.targets, outputs, strict=True):
                values[index] = value
            for index in call.done:
                values[index] = None
        return tuple(None if index is None else values[index] for index in self.results)

    @classmethod
    def serialize_compile_artifacts(cls, fn: LayeredGraph) -> bytes:
        """Pickle a graph, as torch does with its own compiled functions."""
        regions = [private.region_bytes(one) for one in fn.compiled]
        return pickle.dumps((regions, fn.calls, fn.count, fn.results, fn.bound.specs))

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> LayeredGraph:
        """Return the graph that `serialize_compile_artifacts` has written."""
        regions, *others = pickle.loads(data)
        return cls([private.region_from_bytes(one) for one in regions], *others)


class LayeredBackend:
    """Compiles graphs by regions if layers repeat, and other graphs whole.

    Pass it as `torch.compile(..., backend=LayeredBackend())`. Graphs of one model share regions, for example those with
    different ways to choose tokens.

    Args:
        equal: Layers of which only some need to be traced.

    Attributes:
        compiled: Number of regions compiled so far, and of graphs compiled whole.
        called: Number of calls of regions in the graphs so far.
    """

    def __init__(self, equal: EqualLayers | None = None) -> None:
        self.equal = equal
        self.compiled, self.called = 0, 0
        # The operators are kept alive, because the texts contain their ids.
        self._regions: dict[str, tuple[Compiled, list[Any]]] = {}

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph."""
        if self.equal is not None:
            self.equal.traced()
        attention_of_few_queries(module)
        linears_of_few_rows(module)
        linears_by_onednn(module)
        marks = None if self.equal is None else take_marks(module, inputs, self.equal.bound_tensors)
        regions = regions_of(module)
        if marks is not None:
            regions = marks.cloned(regions)
        if not regions:
            self.compiled += 1
            return private.compile_whole(module, inputs)
        indices = {
            node: index for index, node in enumerate(node for node in module.graph.nodes if node.op == "placeholder")
        }
        last = {source: index for index, region in enumerate(regions) for source in region.inputs}
        output = next(node for node in module.graph.nodes if node.op == "output")
        region_indices: dict[str, int] = {}
        calls: list[_Call] = []
        for region in regions:
            if region.text not in self._regions:
                compiled = private.compile_region(region.module(module), region.examples())
                self._regions[region.text] = compiled, [node.target for node in region.nodes]
                self.compiled += 1
            region_indices.setdefault(region.text, len(region_indices))
            for node in region.outputs:
                indices[node] = len(indices)
            done = (
                node
                for node in region.inputs
                if last[node] == len(calls) and node.op != "placeholder" and output not in node.users
            )
            calls.append(
                _Call(
                    region_indices[region.text],
                    tuple(indices[node] for node in region.inputs),
                    tuple(indices[node] for node in region.outputs),
                    tuple(indices[node] for node in done),
                )
            )
        self.called += len(calls)
        results = [indices[value] if isinstance(value, Node) else None for value in output.args[0]]
        bound = () if marks is None else marks.bound
        return LayeredGraph([self._regions[text][0] for text in region_indices], calls, len(indices), results, bound)
