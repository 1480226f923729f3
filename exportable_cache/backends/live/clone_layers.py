"""Trace three layers of each kind, and copy the graph of one for all other layers of that kind.

TorchDynamo takes about 0.2 s to trace a layer. The graphs of equal layers differ only in their tensors. So the first
two layers and the last one of each kind are traced, each between two marker operators that list the layer's tensors,
and every other layer becomes one placeholder operator. After tracing, `MarkedLayers`
replaces each placeholder by the graph of the second layer, over the other layer's tensors. It first checks that this
substitution turns the graph of the second layer into that of the last one.
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
from .graph_cache import BoundTensor
from .regions import Region, described, value_of

if TYPE_CHECKING:
    from ...models.cache_factory import ExportableCache


_library = torch.library.Library("exportable_cache", "FRAGMENT")
_library.define("layer_begins(Tensor x, Tensor[] tensors, int index, str arguments) -> Tensor")
_library.define("layer_ends(Tensor x, int index) -> Tensor")
_library.define("equal_layer(Tensor x, Tensor[] tensors, int index, str arguments) -> Tensor")
#: The markers and the placeholder, from hidden states [batch, length, hidden] to hidden states. They also take the
#: tensors that the layer is called with, and `layer_begins` the layer's parameters and cache tensors.
LAYER_BEGINS = torch.ops.exportable_cache.layer_begins.default
LAYER_ENDS = torch.ops.exportable_cache.layer_ends.default
EQUAL_LAYER = torch.ops.exportable_cache.equal_layer.default
for _name in ("layer_begins", "layer_ends", "equal_layer"):
    torch.library.register_fake(
        f"exportable_cache::{_name}", lambda x, *others: torch.empty_like(x), lib=_library, allow_override=True
    )

#: Traced layers of a kind: the first, which may compute values for all layers; the second, which is copied; the last.
_FIRST, _LAST = 2, 1
_INDEX = "layer_idx"
_LENGTH = "cumulative_length"
#: Uses of the layer index that only access the layer's part of the cache; transformers 5.24 passes `kwargs` on.
_CACHE_ACCESS = re.compile(
    r"\.(update\w*|get_\w+|has_\w+)\([^()]*layer_idx(,kwargs=kwargs)?\)|\.layers\[(self\.)?layer_idx\]"
)


class _Role(NamedTuple):
    """The behavior of a layer's `forward` while the model is traced.

    Attributes:
        forward: The original `forward`.
        layer: Index of the layer in the cache.
        kind: Index of the layer's kind. Equal layers have the same one.
        paths: Names of its parameters and buffers, split at the dots.
        state: Names of its cache tensors without the length, which is an input of a step.
        has_length: True if the cache layer has a length.
        is_traced: True if the layer is traced, False if it becomes a placeholder.
    """

    forward: Any
    layer: int
    kind: int
    paths: tuple[tuple[str, ...], ...]
    state: tuple[str, ...]
    has_length: bool
    is_traced: bool


#: Roles by the temporary class of a layer. A global, because guards on globals are not kept with a graph.
_ROLES: dict[type, _Role] = {}
#: One model is traced at a time, as by TorchDynamo itself.
_TRACING = threading.Lock()


class EqualLayers:
    """Finds the layers of a model that are equal except for their weights.

    Args:
        model: In eval mode.
        cache: The model's cache.

    Attributes:
        kinds: Indices in the cache of equal layers, for each kind that has more layers than need to be traced.
    """

    def __init__(self, model: nn.Module, cache: ExportableCache) -> None:
        kinds: dict[str, dict[int, nn.Module]] = {}
        for layer_index, layer in _layers_of(model, len(cache.layers)).items():
            kinds.setdefault(_kind(layer, cache.layers[layer_index]), {})[layer_index] = layer
        self._layers = [kind for kind in kinds.values() if len(kind) > _FIRST + _LAST]
        if any(hasattr(tensor, "__tensor_flatten__") for tensor in model.parameters()):
            # Wrapper subclasses do not support the marker operators.
            self._layers = []
        self.kinds = [tuple(kind) for kind in self._layers]
        self._classes_before: list[tuple[nn.Module, type]] = []
        self._cache = cache
        self._names = {module: name for name, module in model.named_modules()}

    @contextmanager
    def tracing_few(self) -> Iterator[None]:
        """Make TorchDynamo trace three layers of each kind in this block, until `traced` is called."""
        with _TRACING, self._changed():
            yield

    @contextmanager
    def _changed(self) -> Iterator[None]:
        try:
            for index, kind in enumerate(self._layers):
                for order, (layer_index, layer) in enumerate(kind.items()):
                    original = type(layer)
                    is_traced = order < _FIRST or order >= len(kind) - _LAST
                    changed = _with_forward(original)
                    state = tuple(self._cache.layers[layer_index].state)
                    _ROLES[changed] = _Role(
                        original.forward,
                        layer_index,
                        index,
                        _paths(layer),
                        tuple(name for name in state if name != _LENGTH),
                        _LENGTH in state,
                        is_traced,
                    )
                    self._classes_before.append((layer, original))
                    layer.__class__ = changed
            yield
        finally:
            self.traced()
            _ROLES.clear()

    def traced(self) -> None:
        """Restore the layers' classes after tracing, because the guards that are made next must be on these."""
        while self._classes_before:
            layer, original = self._classes_before.pop()
            layer.__class__ = original

    def bound_tensors(self, layer_index: int) -> list[tuple[BoundTensor, torch.Tensor]]:
        """Return a layer's cache tensors, parameters and buffers, in the order in which its marker lists them."""
        layer = next(kind[layer_index] for kind in self._layers if layer_index in kind)
        kept = self._cache.layers[layer_index]
        found = [(None, name, tensor) for name, tensor in kept.named_state() if name != _LENGTH]
        for *path, name in _paths(layer):
            module = layer.get_submodule(".".join(path))
            found.append((self._names[module], name, getattr(module, name)))
        return [
            (BoundTensor(module, layer_index, name, tuple(kind_of_tensor(tensor))), tensor)
            for module, name, tensor in found
        ]


def _with_forward(original: type) -> type:
    """Return a class with the same members and bases whose `forward` is `_forward`.

    The bases are the same because guards identify a class by its index among them.
    """
    members = {name: value for name, value in vars(original).items() if name not in ("__dict__", "__weakref__")}
    return type(original.__name__, original.__bases__, {**members, "forward": _forward})


def _forward(self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    role = _ROLES.get(type(self))
    if role is None or not torch.compiler.is_compiling():
        # Another thread runs the model.
        return (role or type(self)).forward(self, hidden_states, *args, **kwargs)
    tensors, arguments, kept = _taken(role, args, kwargs)
    if not role.is_traced:
        return EQUAL_LAYER(hidden_states, tensors, role.layer, arguments)
    if kept is not None:
        tensors += [getattr(kept, name) for name in role.state]
    for path in role.paths:
        found: Any = self
        for name in path:
            found = getattr(found, name)
        tensors.append(found)
    hidden_states = LAYER_BEGINS(hidden_states, tensors, role.layer, arguments)
    result = role.forward(self, hidden_states, *args, **kwargs)
    if not isinstance(result, torch.Tensor):
        raise TypeError("a layer returns more than hidden states")
    return LAYER_ENDS(result, role.layer)


def _taken(role: _Role, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], str, Any]:
    """Return the tensors that a layer is called with, its other arguments as text, and its cache layer or None."""
    tensors: list[torch.Tensor] = []
    kept: Any = None
    arguments = f"{role.kind} "
    for name, value in [*((str(index), one) for index, one in enumerate(args)), *kwargs.items()]:
        if isinstance(value, Cache):
            if kept is not None:
                raise TypeError("a layer is called with two caches")
            kept = value.layers[role.layer]
            if role.has_length:
                tensors.append(kept.cumulative_length)
        elif isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, tuple):
            for one in value:
                if not isinstance(one, torch.Tensor):
                    raise TypeError("a layer is called with an argument of an unsupported type")
                tensors.append(one)
        elif value is not None and not isinstance(value, (bool, str)):
            raise TypeError("a layer is called with an argument of an unsupported type")
        arguments += f"{name} {value if isinstance(value, (bool, str)) else len(tensors)} "
    return tensors, arguments, kept


def _layers_of(model: nn.Module, count: int) -> dict[int, nn.Module]:
    """Return the decoder's layers by index: the modules of a list whose `layer_idx` differ."""
    for modules in model.modules():
        if not isinstance(modules, nn.ModuleList):
            continue
        found_indices = [
            {vars(part)[_INDEX] for part in layer.modules() if isinstance(vars(part).get(_INDEX), int)}
            for layer in modules
        ]
        found = {next(iter(each)): layer for each, layer in zip(found_indices, modules, strict=True) if len(each) == 1}
        if len(found) == len(modules) > _FIRST + _LAST and max(found) < count:
            # Check each class once, because reading sources is slow.
            dependent = {kind for kind in _classes(modules) if _depends_on_index(kind)}
            return {layer_index: layer for layer_index, layer in found.items() if not dependent & _classes(layer)}
    return {}


def _classes(module: nn.Module) -> set[type]:
    return {kind for part in module.modules() for kind in type(part).__mro__} - {nn.Module, object}


def _depends_on_index(kind: type) -> bool:
    """Return True if the code of a class may depend on the layer index."""
    for method in (one for name, one in vars(kind).items() if name != "__init__"):
        while (code := getattr(method, "__code__", None)) is not None:
            if _INDEX in code.co_names and _INDEX in _CACHE_ACCESS.sub("", _source_of(method)):
                return True
            method = getattr(method, "__wrapped__", None)
    return False


def _source_of(method: Any) -> str:
    try:
        return re.sub(r"\s", "", inspect.getsource(method.__code__))
    except OSError:
        return _INDEX


def _kind(layer: nn.Module, kept: Any) -> str:
    """Return a text that is the same for layers that differ only in their index and the values of their tensors.

    Args:
        layer: A decoder layer.
        kept: The layer's part of the cache.
    """
    parts = [
        (name, id(type(part)), *((key, _value(value)) for key, value in vars(part).items() if key != _INDEX))
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


#: Returns the tensors of a layer, and how a graph finds them.
BoundOf = Callable[[int], "list[tuple[BoundTensor, torch.Tensor]]"]


class CloneError(Exception):
    """A layer cannot be copied from a traced one."""


@dataclass(frozen=True, eq=False)
class _Layer:
    """One layer of a captured graph.

    Attributes:
        tensors: Hidden states, the tensors that it is called with, its parameters and its cache tensors.
        arguments: Its kind and its other arguments as text.
        result: Hidden states after the layer.
    """

    tensors: tuple[Node, ...]
    arguments: str
    result: Node


@dataclass(frozen=True)
class MarkedLayers:
    """The marked layers of a graph, by index.

    Attributes:
        traced: Layers whose operators are in the graph.
        equal: Layers that are one placeholder operator.
        bound: Tensors of the equal layers, which the graph takes after its inputs.
    """

    traced: dict[int, _Layer]
    equal: dict[int, _Layer]
    bound: tuple[BoundTensor, ...]

    def cloned(self, regions: list[Region]) -> list[Region]:
        """Return the regions with each placeholder replaced by a copy of a traced layer.

        Raises:
            CloneError: If the copy of the second layer of a kind differs from the last one, or a layer reads values or
                tensors of another layer.
        """
        producer = {node: region for region in regions for node in region.nodes}
        found = {layer_index: producer.get(layer.result) for layer_index, layer in self.traced.items()}
        within = {node for region in found.values() if region is not None for node in region.nodes}
        kinds: dict[str, list[int]] = {}
        for layer_index, layer in self.traced.items():
            kinds.setdefault(layer.arguments, []).append(layer_index)
        again = {layer.result: layer for layer in self.equal.values()}
        templates: dict[str, _Template] = {}
        for arguments, indices in kinds.items():
            if len(indices) < 3:
                raise CloneError(f"some of the layers {indices} do not run")
            second, last = indices[1], indices[-1]
            template = _Template(self.traced[second], found[second], within | {*self.owned})
            expected, region = template.region_of(self.traced[last]), found[last]
            if region is None or (expected.inputs, expected.outputs, expected.text) != (
                region.inputs,
                region.outputs,
                region.text,
            ):
                raise CloneError(f"layers {second} and {last} differ")
            templates[arguments] = template
        cloned = []
        for region in regions:
            equal = [again[node] for node in region.nodes if node in again]
            if equal and (len(region.nodes) > 1 or equal[0].arguments not in templates):
                raise CloneError("no traced layer of the same kind was called with the same arguments")
            cloned.append(templates[equal[0].arguments].region_of(equal[0]) if equal else region)
        return cloned

    @property
    def owned(self) -> set[Node]:
        """Graph inputs that only one layer uses."""
        seen: dict[Node, int] = {}
        for layer in (*self.traced.values(), *self.equal.values()):
            for node in {*layer.tensors}:
                seen[node] = seen.get(node, 0) + 1
        return {node for node, times in seen.items() if times == 1 and node.op == "placeholder"}


class _Template:
    """A traced layer, as a function of its tensors.

    Args:
        layer: The traced layer.
        region: Its operators.
        others: Tensors of layers and the values computed from them, which a copy must not read from another layer.
    """

    def __init__(self, layer: _Layer, region: Region | None, others: set[Node]) -> None:
        if region is None or region.outputs != (layer.result,):
            raise CloneError("a layer returns more than hidden states")
        indices: dict[Node, int] = {}
        for index, node in enumerate(layer.tensors):
            indices.setdefault(node, index)
        unknown = [node for node in region.inputs if node not in indices and node in others]
        if unknown:
            raise CloneError(f"a layer reads {unknown[0]} of another layer")
        self.layer, self.region, self.indices = layer, region, indices

    def region_of(self, other: _Layer) -> Region:
        """Return the region of another layer of the same kind."""
        if [*map(_described, other.tensors)] != [*map(_described, self.layer.tensors)]:
            raise CloneError("layers of one kind are called with tensors of different shapes")
        if _described(other.result) != _described(self.layer.result):
            raise CloneError("layers of one kind return hidden states of different shapes")
        if [*map(other.tensors.index, other.tensors)] != [*map(self.indices.__getitem__, self.layer.tensors)]:
            raise CloneError("layers of one kind share different tensors")
        inputs = (other.tensors[self.indices[node]] if node in self.indices else node for node in self.region.inputs)
        return Region(self.region.nodes, tuple(inputs), (other.result,), self.region.text)


def take_marks(module: GraphModule, inputs: Sequence[Any], bound_of: BoundOf) -> MarkedLayers | None:
    """Remove the markers of a graph in place and return its layers, None if the graph has none.

    Args:
        module: The captured graph.
        inputs: The real inputs of the graph, not fake tensors.
        bound_of: Returns the tensors of a placeholder's layer.

    Raises:
        CloneError: If an untraced layer has no traced layer of the same kind to copy.
    """
    begun: dict[int, tuple[tuple[Node, ...], str]] = {}
    traced: dict[int, _Layer] = {}
    equal: dict[int, _Layer] = {}
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    indices = {node: index for index, node in enumerate(module.graph.nodes)}
    start = next((index for node, index in indices.items() if node.target is LAYER_BEGINS), 0)
    for node in indices:
        if node.target not in (EQUAL_LAYER, LAYER_BEGINS, LAYER_ENDS):
            continue
        hidden, *others = cast(tuple[Any, ...], node.args)
        if node.target is EQUAL_LAYER:
            tensors, layer_index, arguments = others
            equal[layer_index] = _Layer((hidden, *tensors), arguments, node)
            continue
        if node.target is LAYER_BEGINS:
            tensors, layer_index, arguments = others
            begun[layer_index] = (hidden, *tensors), arguments
        else:
            traced[others[0]] = _Layer(*begun[others[0]], hidden)
        node.replace_all_uses_with(hidden)
        module.graph.erase_node(node)
    if not traced:
        return None
    in_layers = {node for node, index in indices.items() if index > start}
    _drop_unread(traced, equal, in_layers)
    equal, bound = _with_bound_tensors(module.graph, traced, equal, dict(zip(placeholders, inputs)), bound_of)
    return MarkedLayers(traced, equal, bound)


def _with_bound_tensors(
    graph: Graph, traced: dict[int, _Layer], equal: dict[int, _Layer], inputs: dict[Node, Any], bound_of: BoundOf
) -> tuple[dict[int, _Layer], tuple[BoundTensor, ...]]:
    """Add graph inputs for the tensors of the equal layers, and return these layers and the bound tensors.

    A tensor that is already an input of the graph, such as one that layers share, gets no second input.
    """
    known = {id(tensor): node for node, tensor in inputs.items()}
    last, whole = [*inputs][-1], {}
    bound: list[BoundTensor] = []
    for layer_index, layer in equal.items():
        example = next((one for one in traced.values() if one.arguments == layer.arguments), None)
        if example is None:
            raise CloneError("no traced layer of the same kind was called with the same arguments")
        nodes, examples = [], example.tensors[len(layer.tensors) :]
        for node, (spec, tensor) in zip(examples, bound_of(layer_index)[-len(examples) :] if examples else ()):
            if node not in inputs or kind_of_tensor(inputs[node]) != kind_of_tensor(tensor):
                raise CloneError("layers of one kind have tensors of different shapes")
            if id(tensor) not in known:
                with graph.inserting_after(last):
                    last = graph.placeholder(f"bound_{len(bound)}")
                last.meta["example_value"] = value_of(node)
                known[id(tensor)] = last
                bound.append(spec)
            nodes.append(known[id(tensor)])
        if len(nodes) < len(examples):
            raise CloneError("an untraced layer has fewer tensors than the traced ones")
        whole[layer_index] = replace(layer, tensors=(*layer.tensors, *nodes))
    return whole, tuple(bound)


def _drop_unread(traced: dict[int, _Layer], equal: dict[int, _Layer], in_layers: set[Node]) -> None:
    """Drop the inputs of placeholders that the traced layers of the same kind do not read."""
    others = {layer.result for layer in equal.values()}
    read: dict[str, set[int]] = {}
    for layer in traced.values():
        read.setdefault(layer.arguments, set()).update(
            index
            for index, node in enumerate(layer.tensors)
            if any(user in in_layers and user not in others for user in node.users)
        )
    for layer in equal.values():
        hidden, *_ = layer.tensors
        kept = [
            layer.tensors[index] for index in sorted(read.get(layer.arguments, ())) if 0 < index < len(layer.tensors)
        ]
        layer.result.args = (hidden, kept, *layer.result.args[2:])


def _described(node: Any) -> str:
    return described(value_of(node))
