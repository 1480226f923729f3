"""Layers of a model that are equal but for their weights: a few of each kind are traced, one operator stands for each
other.

TorchDynamo follows a layer in some 0.2 s, and a model of 36 of them 36 times. What it makes of two equal layers is the
same but for the tensors, so the first two and the last of each kind are traced, each between two operators that say
which tensors are its own, and all others are an operator. `Marks` puts the graph of a traced layer in place
of each, over the tensors of that one, once it has seen that the second one's explains the last one's.
"""

from __future__ import annotations

import functools
import inspect
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from transformers import Cache

from ...common.tensors import kind_of_tensor
from .graphs import OwnTensor
from .regions import Region, described, value_of

if TYPE_CHECKING:
    from ...models.cache_factory import ExportableCache


_library = torch.library.Library("exportable_cache", "FRAGMENT")
_library.define("layer_begins(Tensor x, Tensor[] tensors, int number, str arguments) -> Tensor")
_library.define("layer_ends(Tensor x, int number) -> Tensor")
_library.define("equal_layer(Tensor x, Tensor[] tensors, int number, str arguments) -> Tensor")
#: Hidden states [batch, length, hidden] and other tensors, which the first takes with a layer's own: the same hidden
#: states, or those behind the layer.
LAYER_BEGINS = torch.ops.exportable_cache.layer_begins.default
LAYER_ENDS = torch.ops.exportable_cache.layer_ends.default
EQUAL_LAYER = torch.ops.exportable_cache.equal_layer.default
for _name in ("layer_begins", "layer_ends", "equal_layer"):
    torch.library.register_fake(
        f"exportable_cache::{_name}", lambda x, *others: torch.empty_like(x), lib=_library, allow_override=True
    )

#: What of a kind is traced: the first, which may compute something for all; the second, for the others; and the last.
_FIRST, _LAST = 2, 1
_NUMBER = "layer_idx"
_LENGTH = "cumulative_length"
#: How a layer's number is used to find what is its own in the cache, and nothing else.
_OWN_PLACE = re.compile(r"\.(update\w*|get_\w+|has_\w+)\([^()]*layer_idx\)|\.layers\[(self\.)?layer_idx\]")


class _Role(NamedTuple):
    """What a layer's `forward` does while a model is traced.

    Attributes:
        forward: The layer's own.
        number: Of the layer in the cache.
        kind: The same for equal layers.
        paths: Its parameters and buffers, as attributes of attributes.
        state: Names of its tensors in the cache, but for the length, which a step has as an input.
        has_length: Whether there is one.
        is_traced: Whether the layer itself is.
    """

    forward: Any
    number: int
    kind: int
    paths: tuple[tuple[str, ...], ...]
    state: tuple[str, ...]
    has_length: bool
    is_traced: bool


#: Of the classes that layers have meanwhile. TorchDynamo's guards on what is global are not kept.
_ROLES: dict[type, _Role] = {}
#: One model at a time has them: TorchDynamo, too, traces one step after the other.
_TRACING = threading.Lock()


class EqualLayers:
    """The equal layers of a model over a cache.

    Args:
        model: In eval mode.
        cache: Its cache.

    Attributes:
        kinds: Layers that are equal, by their numbers in the cache; those alone of which some need not be traced.
    """

    def __init__(self, model: nn.Module, cache: ExportableCache) -> None:
        kinds: dict[str, dict[int, nn.Module]] = {}
        for number, layer in _layers_of(model, len(cache.layers)).items():
            kinds.setdefault(_kind(layer, cache.layers[number]), {})[number] = layer
        self._layers = [kind for kind in kinds.values() if len(kind) > _FIRST + _LAST]
        if any(hasattr(tensor, "__tensor_flatten__") for tensor in model.parameters()):
            # Tensors of classes of their own know no operators of ours.
            self._layers = []
        self.kinds = [tuple(kind) for kind in self._layers]
        self._own_classes: list[tuple[nn.Module, type]] = []
        self._cache = cache
        self._names = {module: name for name, module in model.named_modules()}

    @contextmanager
    def traced_once(self) -> Iterator[None]:
        """A block in which TorchDynamo follows three layers of each kind, once: until `traced` is called."""
        with _TRACING, self._changed():
            yield

    @contextmanager
    def _changed(self) -> Iterator[None]:
        try:
            for index, kind in enumerate(self._layers):
                for place, (number, layer) in enumerate(kind.items()):
                    own = type(layer)
                    is_traced = place < _FIRST or place >= len(kind) - _LAST
                    changed = _with_forward(own)
                    state = tuple(self._cache.layers[number].state)
                    _ROLES[changed] = _Role(
                        own.forward,
                        number,
                        index,
                        _paths(layer),
                        tuple(name for name in state if name != _LENGTH),
                        _LENGTH in state,
                        is_traced,
                    )
                    self._own_classes.append((layer, own))
                    layer.__class__ = changed
            yield
        finally:
            self.traced()
            _ROLES.clear()

    def traced(self) -> None:
        """A graph is there, and layers are of their own classes again: guards, which are made now, are on those."""
        while self._own_classes:
            layer, own = self._own_classes.pop()
            layer.__class__ = own

    def own_tensors(self, number: int) -> list[tuple[OwnTensor, torch.Tensor]]:
        """A layer's own, in the order in which one that is traced is said to have them."""
        layer, kept = next(kind[number] for kind in self._layers if number in kind), self._cache.layers[number]
        found = [(None, name, tensor) for name, tensor in kept.named_state() if name != _LENGTH]
        for *path, name in _paths(layer):
            module = layer.get_submodule(".".join(path))
            found.append((self._names[module], name, getattr(module, name)))
        return [
            (OwnTensor(module, number, name, tuple(kind_of_tensor(tensor))), tensor) for module, name, tensor in found
        ]


def _with_forward(own: type) -> type:
    """A class with the same members and bases, whose `forward` is `_forward`: guards name classes by their place among
    the bases.
    """
    members = {name: value for name, value in vars(own).items() if name not in ("__dict__", "__weakref__")}
    return type(own.__name__, own.__bases__, {**members, "forward": _forward})


def _forward(self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    role = _ROLES.get(type(self))
    if role is None or not torch.compiler.is_compiling():
        # Somebody else runs the model meanwhile.
        return (role or type(self)).forward(self, hidden_states, *args, **kwargs)
    tensors, words, kept = _taken(role, args, kwargs)
    if not role.is_traced:
        return EQUAL_LAYER(hidden_states, tensors, role.number, words)
    if kept is not None:
        tensors += [getattr(kept, name) for name in role.state]
    for path in role.paths:
        found: Any = self
        for name in path:
            found = getattr(found, name)
        tensors.append(found)
    hidden_states = LAYER_BEGINS(hidden_states, tensors, role.number, words)
    result = role.forward(self, hidden_states, *args, **kwargs)
    if not isinstance(result, torch.Tensor):
        raise TypeError("a layer gives more than hidden states")
    return LAYER_ENDS(result, role.number)


def _taken(role: _Role, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], str, Any]:
    """Tensors that a layer is called with, the rest in words, and its own in the cache, None where it is given none."""
    tensors: list[torch.Tensor] = []
    kept: Any = None
    words = f"{role.kind} "
    for name, value in [*((str(place), one) for place, one in enumerate(args)), *kwargs.items()]:
        if isinstance(value, Cache):
            if kept is not None:
                raise TypeError("a layer is called with two caches")
            kept = value.layers[role.number]
            if role.has_length:
                tensors.append(kept.cumulative_length)
        elif isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, tuple):
            for one in value:
                if not isinstance(one, torch.Tensor):
                    raise TypeError("a layer is called with something unknown")
                tensors.append(one)
        elif value is not None and not isinstance(value, (bool, str)):
            raise TypeError("a layer is called with something unknown")
        words += f"{name} {value if isinstance(value, (bool, str)) else len(tensors)} "
    return tensors, words, kept


def _layers_of(model: nn.Module, count: int) -> dict[int, nn.Module]:
    """Modules of one list that each have one number, which no other of them has: those are a decoder's layers."""
    for modules in model.modules():
        if not isinstance(modules, nn.ModuleList):
            continue
        numbers = [
            {vars(part)[_NUMBER] for part in layer.modules() if isinstance(vars(part).get(_NUMBER), int)}
            for layer in modules
        ]
        found = {next(iter(own)): layer for own, layer in zip(numbers, modules, strict=True) if len(own) == 1}
        if len(found) == len(modules) > _FIRST + _LAST and max(found) < count:
            # Once for each class: sources take long to read.
            asking = {kind for kind in _classes(modules) if _asks_for_its_number(kind)}
            return {number: layer for number, layer in found.items() if not asking & _classes(layer)}
    return {}


def _classes(module: nn.Module) -> set[type]:
    return {kind for part in module.modules() for kind in type(part).__mro__} - {nn.Module, object}


def _asks_for_its_number(kind: type) -> bool:
    """Whether the code of a class may do something else for each number of a layer."""
    for method in (one for name, one in vars(kind).items() if name != "__init__"):
        # Behind a decorator, too.
        while (code := getattr(method, "__code__", None)) is not None:
            if _NUMBER in code.co_names and _NUMBER in _OWN_PLACE.sub("", _source_of(method)):
                return True
            method = getattr(method, "__wrapped__", None)
    return False


def _source_of(method: Any) -> str:
    try:
        return re.sub(r"\s", "", inspect.getsource(method.__code__))
    except OSError:
        return _NUMBER


def _kind(layer: nn.Module, kept: Any) -> str:
    """The same for layers that are equal but for their number and the values of their tensors.

    Args:
        kept: The layer's own in the cache.
    """
    parts = [
        (name, id(type(part)), *((key, _value(value)) for key, value in vars(part).items() if key != _NUMBER))
        for name, part in layer.named_modules()
    ]
    state = [(name, kind_of_tensor(tensor)) for name, tensor in kept.named_state()]
    return repr((parts, id(type(kept)), kept.config(), state))


def _value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return kind_of_tensor(value)
    if isinstance(value, (tuple, list, set)):
        return type(value).__name__, [_value(one) for one in value]
    if isinstance(value, dict):
        return [(_value(name), _value(one)) for name, one in value.items() if not isinstance(one, nn.Module)]
    if isinstance(value, functools.partial):
        return _value(value.func), _value(value.args), _value(value.keywords)
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return repr(value)
    return type(value).__name__, id(value)


def _paths(layer: nn.Module) -> tuple[tuple[str, ...], ...]:
    named = [*layer.named_parameters(remove_duplicate=False), *layer.named_buffers(remove_duplicate=False)]
    return tuple(tuple(name.split(".")) for name, _ in named)


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
