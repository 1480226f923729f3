"""The graph of one layer in place of the others of its kind, in a graph of which `equal_layers.py` had few traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from torch.fx import Graph, GraphModule, Node

from ...common.tensors import kind_of_tensor
from ..regions import Region, described, value_of
from .clone_layers import EQUAL_LAYER, LAYER_BEGINS, LAYER_ENDS

if TYPE_CHECKING:
    import torch

    from .layer_tensors import OwnTensor

#: What is a layer's own by its number: where it is, and the tensor.
OwnOf = Callable[[int], "list[tuple[OwnTensor, torch.Tensor]]"]


class NotStampedError(Exception):
    """A layer is more than its tensors and hidden states say."""


@dataclass(frozen=True, eq=False)
class _Layer:
    """One layer of a captured graph.

    Attributes:
        tensors: Hidden states, what it is called with, and what is its own.
        words: The rest that it is called with, and everything that tells its kind from others.
        result: Hidden states behind it.
    """

    tensors: tuple[Node, ...]
    words: str
    result: Node


@dataclass(frozen=True)
class Marks:
    """The layers of a graph, by their numbers.

    Attributes:
        traced: Those whose operators are there.
        equal: Those that are one operator.
        own: Their own tensors, which the graph was made to take after its inputs.
        owned: Tensors of any layer, graph inputs.
    """

    traced: dict[int, _Layer]
    equal: dict[int, _Layer]
    own: tuple[OwnTensor, ...]

    def stamped(self, regions: list[Region]) -> list[Region]:
        """The regions with that of a traced layer in place of each that is one operator.

        Raises:
            NotStampedError: If the second layer of a kind does not explain the last one, or reads what another layer
                has computed or keeps.
        """
        producer = {node: region for region in regions for node in region.nodes}
        found = {number: producer.get(layer.result) for number, layer in self.traced.items()}
        within = {node for region in found.values() if region is not None for node in region.nodes}
        kinds: dict[str, list[int]] = {}
        for number, layer in self.traced.items():
            kinds.setdefault(layer.words, []).append(number)
        again = {layer.result: layer for layer in self.equal.values()}
        templates: dict[str, _Template] = {}
        for words, numbers in kinds.items():
            if len(numbers) < 3:
                raise NotStampedError(f"of layers {numbers} some do not run")
            second, last = numbers[1], numbers[-1]
            template = _Template(self.traced[second], found[second], within | {*self.owned})
            expected, region = template.region_of(self.traced[last]), found[last]
            if region is None or (expected.inputs, expected.outputs, expected.text) != (
                region.inputs,
                region.outputs,
                region.text,
            ):
                raise NotStampedError(f"layers {second} and {last} differ")
            templates[words] = template
        stamped = []
        for region in regions:
            equal = [again[node] for node in region.nodes if node in again]
            if equal and (len(region.nodes) > 1 or equal[0].words not in templates):
                raise NotStampedError("a layer that is not traced is called in another way")
            stamped.append(templates[equal[0].words].region_of(equal[0]) if equal else region)
        return stamped

    @property
    def owned(self) -> set[Node]:
        """Graph inputs that one layer alone is given."""
        seen: dict[Node, int] = {}
        for layer in (*self.traced.values(), *self.equal.values()):
            for node in {*layer.tensors}:
                seen[node] = seen.get(node, 0) + 1
        return {node for node, times in seen.items() if times == 1 and node.op == "placeholder"}


class _Template:
    """A traced layer as a function of tensors.

    Args:
        layer: It.
        region: Its operators.
        others: What is no function of the step alone: tensors of layers, and what they compute.
    """

    def __init__(self, layer: _Layer, region: Region | None, others: set[Node]) -> None:
        if region is None or region.outputs != (layer.result,):
            raise NotStampedError("a layer gives more than hidden states")
        places: dict[Node, int] = {}
        for place, node in enumerate(layer.tensors):
            places.setdefault(node, place)
        unknown = [node for node in region.inputs if node not in places and node in others]
        if unknown:
            raise NotStampedError(f"a layer reads {unknown[0]} of another one")
        self.layer, self.region, self.places = layer, region, places

    def region_of(self, other: _Layer) -> Region:
        """The operators of a layer of the same kind."""
        if [*map(_described, other.tensors)] != [*map(_described, self.layer.tensors)]:
            raise NotStampedError("layers of one kind are given tensors of other shapes")
        if _described(other.result) != _described(self.layer.result):
            raise NotStampedError("layers of one kind give hidden states of other shapes")
        if [other.tensors.index(node) for node in other.tensors] != [*map(self.places.__getitem__, self.layer.tensors)]:
            raise NotStampedError("layers of one kind share other tensors")
        inputs = (other.tensors[self.places[node]] if node in self.places else node for node in self.region.inputs)
        return Region(self.region.nodes, tuple(inputs), (other.result,), self.region.text)


def taken_marks(module: GraphModule, inputs: Sequence[Any], own_of: OwnOf) -> Marks | None:
    """The layers of a graph, whose marks are taken out of it in place; None of a graph without any.

    Args:
        inputs: Of the graph, as they are: the tensors themselves, not fake ones.
        own_of: What a layer that is one operator has.

    Raises:
        NotStampedError: If a layer that is one operator is none of a kind of which one is traced.
    """
    begun: dict[int, tuple[tuple[Node, ...], str]] = {}
    traced: dict[int, _Layer] = {}
    equal: dict[int, _Layer] = {}
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    places = {node: place for place, node in enumerate(module.graph.nodes)}
    start = next((place for node, place in places.items() if node.target is LAYER_BEGINS), 0)
    for node in places:
        if node.target not in (EQUAL_LAYER, LAYER_BEGINS, LAYER_ENDS):
            continue
        hidden, *arguments = cast(tuple[Any, ...], node.args)
        if node.target is EQUAL_LAYER:
            tensors, number, words = arguments
            equal[number] = _Layer((hidden, *tensors), words, node)
            continue
        if node.target is LAYER_BEGINS:
            tensors, number, words = arguments
            begun[number] = (hidden, *tensors), words
        else:
            traced[arguments[0]] = _Layer(*begun[arguments[0]], hidden)
        node.replace_all_uses_with(hidden)
        module.graph.erase_node(node)
    if not traced:
        return None
    in_layers = {node for node, place in places.items() if place > start}
    _leave_unread(traced, equal, in_layers)
    equal, own = _with_own_tensors(module.graph, traced, equal, dict(zip(placeholders, inputs)), own_of)
    return Marks(traced, equal, own)


def _with_own_tensors(
    graph: Graph, traced: dict[int, _Layer], equal: dict[int, _Layer], inputs: dict[Node, Any], own_of: OwnOf
) -> tuple[dict[int, _Layer], tuple[OwnTensor, ...]]:
    """Layers that are one operator, with inputs that the graph gets for what is their own, and what these are of.

    What the graph has as an input already, as another layer has it as well, stays that one.
    """
    known = {id(tensor): node for node, tensor in inputs.items()}
    last, whole = [*inputs][-1], {}
    own: list[OwnTensor] = []
    for number, layer in equal.items():
        example = next((one for one in traced.values() if one.words == layer.words), None)
        if example is None:
            raise NotStampedError("a layer that is not traced is called in another way")
        nodes, examples = [], example.tensors[len(layer.tensors) :]
        for node, (place, tensor) in zip(examples, own_of(number)[-len(examples) :] if examples else ()):
            if node not in inputs or kind_of_tensor(inputs[node]) != kind_of_tensor(tensor):
                raise NotStampedError("layers of one kind have tensors of other shapes")
            if id(tensor) not in known:
                with graph.inserting_after(last):
                    last = graph.placeholder(f"own_{len(own)}")
                last.meta["example_value"] = value_of(node)
                known[id(tensor)] = last
                own.append(place)
            nodes.append(known[id(tensor)])
        if len(nodes) < len(examples):
            raise NotStampedError("a layer that is not traced has fewer tensors")
        whole[number] = replace(layer, tensors=(*layer.tensors, *nodes))
    return whole, tuple(own)


def _leave_unread(traced: dict[int, _Layer], equal: dict[int, _Layer], in_layers: set[Node]) -> None:
    """Have layers that are one operator take what those that are traced read, and not all that they are called with."""
    others = {layer.result for layer in equal.values()}
    read: dict[str, set[int]] = {}
    for layer in traced.values():
        read.setdefault(layer.words, set()).update(
            place
            for place, node in enumerate(layer.tensors)
            if any(user in in_layers and user not in others for user in node.users)
        )
    for layer in equal.values():
        hidden, *_ = layer.tensors
        kept = [layer.tensors[place] for place in sorted(read.get(layer.words, ())) if 0 < place < len(layer.tensors)]
        layer.result.args = (hidden, kept, *layer.result.args[2:])


def _described(node: Any) -> str:
    return described(value_of(node))
