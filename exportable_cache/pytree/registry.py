"""One call that makes a class a pytree node everywhere torch looks: pytree, C++ pytree, FX, and the `.pt2` serialiser.

    def flatten(layer):
        return [("keys", layer.keys), ("values", layer.values)], {"capacity": layer.capacity}

    def unflatten(children, context):
        return Layer(*children, capacity=context["capacity"])

    register_node(Layer, flatten, unflatten)

`flatten` names its children; `keystr` then prints `.layers[0].keys`, and `torch.export` names its placeholders
`cache_layers_0_keys`. The context is compared, stored in programs and written as JSON, so it holds JSON values only and
nothing that changes from one step to the next: what changes is a child.

Leaves are not always tensors. torch unflattens with None, strings, shapes, fake tensors or wrapped ints while it maps,
prints and traces, so `unflatten` must accept any object as a leaf and `flatten` must give that object back.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.fx._pytree as fx_pytree
import torch.utils._pytree as pytree

from . import _torch_private

if TYPE_CHECKING:
    from torch.export import ExportedProgram

T = TypeVar("T")
Key = str | int | pytree.KeyEntry
Context = Any
Flatten = Callable[[T], tuple[Sequence[tuple[Key, Any]], Context]]
Unflatten = Callable[[list[Any], Context], T]


class Action(str, Enum):
    """An action of `register_node` on one registry."""

    REGISTERED = "registered"  # the class was not registered: ours is set
    UNCHANGED = "unchanged"  # ours was already set
    REPLACED = "replaced"  # another registration was removed, ours is set
    KEPT = "kept"  # another package's is set and was left alone


@dataclass(frozen=True)
class Registration:
    """A record of what one call of `register_node` found and did.

    Args:
        cls: the class registered.
        name: serialised type name now in force, None when the specs of a kept registration cannot be serialised.
        pytree: what happened in `torch.utils._pytree` (and its C++ mirror).
        fx: what happened in `torch.fx._pytree`. `REGISTERED` next to a kept pytree registration means the missing
            flatten spec was added, made of that foreign registration so both flatten alike.
        owner: package whose function flattens the class now, e.g. "exportable_cache", "transformers", "tico".
    """

    cls: type
    name: str | None
    pytree: Action
    fx: Action
    owner: str

    def __str__(self) -> str:
        return f"{self.cls.__qualname__}: pytree {self.pytree.value}, fx {self.fx.value}, flattened by {self.owner}"


@dataclass(frozen=True)
class _Ours:
    flatten: Flatten
    unflatten: Unflatten
    name: str
    node_flatten: Callable[[Any], tuple[list[Any], Context]]


_ours: dict[type, _Ours] = {}
_lock = threading.RLock()


def register_node(
    cls: type[T], flatten: Flatten[T], unflatten: Unflatten[T], *, name: str | None = None, replace: bool = False
) -> Registration:
    """Make `cls` a pytree node with named children in every registry of torch.

    Calling it again with the same functions changes nothing; with other functions, ours is replaced. A class that
    another package registered is kept, except that a missing FX flatten spec is added in agreement with it,
    unless `replace=True`. Specs made before a replacement describe the old children and must be made again.

    A later `torch.utils._pytree.register_pytree_node` raises its ValueError ("already registered"), which transformers'
    and TICO's own functions expect and ignore. The next call undoes a later change of only the FX flatten spec.

    Args:
        cls: the class, exactly: subclasses are registered one by one, as in torch.
        flatten: gives `([(key, child), ...], context)`. A `str` key is an attribute (`.keys`), an `int` key an index
            (`[0]`); anything else is a torch key entry, e.g. `MappingKey`. The context is made of JSON values.
        unflatten: gives the object back from `(children, context)`, with any object as a leaf.
        name: serialised type name, default `module.qualname` of the class.
        replace: whether to remove another package's registration first.

    Raises:
        TypeError: `cls` is not a class.
        ValueError: another class already carries `name`.

    Upstream: `torch/utils/_pytree.py`, `torch/fx/_pytree.py` (the FX spec is still read by generated code in 2.13).
    """
    if not isinstance(cls, type):
        raise TypeError(f"register_node got {cls!r} of type {type(cls).__name__}; pass the class, not an instance")
    name = name or f"{cls.__module__}.{cls.__qualname__}"
    holder = _torch_private.class_named(name)
    if holder is not None and holder is not cls:
        raise ValueError(f"the serialised name {name!r} of {cls!r} already belongs to {holder!r}; pass another `name`")

    with _lock:
        fx_before = _torch_private.fx_flatten_of(cls)
        action = _register_pytree(cls, flatten, unflatten, name, replace)
        fx = _register_fx(cls, fx_before)
        if action is not Action.KEPT:
            torch.serialization.add_safe_globals([cls])
    return Registration(cls, _torch_private.serialized_name_of(cls), action, fx, owner_of(cls) or "nobody")


def unregister_node(cls: type) -> bool:
    """Remove our registration of `cls` from every registry; returns False, and does nothing, when it is not ours."""
    with _lock:
        if not is_ours(cls):
            return False
        _torch_private.remove_node(cls)
        del _ours[cls]
        return True


def is_ours(cls: type) -> bool:
    """Return True if the registration of `cls` that torch uses now was made by `register_node`."""
    node, ours = _torch_private.node_of(cls), _ours.get(cls)
    return node is not None and ours is not None and node.flatten_fn is ours.node_flatten


def named_children(value: Any) -> Sequence[tuple[Key, Any]]:
    """Return the children of an object of a class that `is_ours`, each with its key."""
    return _ours[type(value)].flatten(value)[0]


def owner_of(cls: type) -> str | None:
    """Return the top-level package whose function flattens `cls` now, such as "tico", or None if unregistered."""
    node = _torch_private.node_of(cls)
    if node is None:
        return None
    function = _ours[cls].flatten if is_ours(cls) else node.flatten_fn
    return (getattr(function, "__module__", None) or "unknown").partition(".")[0]


def _register_pytree(cls: type, flatten: Flatten, unflatten: Unflatten, name: str, replace: bool) -> Action:
    action = Action.REGISTERED
    if is_ours(cls):
        ours = _ours[cls]
        if (ours.flatten, ours.unflatten, ours.name) == (flatten, unflatten, name):
            return Action.UNCHANGED
        action = Action.REPLACED
    elif _torch_private.node_of(cls) is not None:
        if not replace:
            return Action.KEPT
        action = Action.REPLACED
    if action is Action.REPLACED:
        _torch_private.remove_node(cls)

    def node_flatten(obj: Any) -> tuple[list[Any], Context]:
        children, context = flatten(obj)
        return [child for _, child in children], context

    def node_flatten_with_keys(obj: Any) -> tuple[list[tuple[pytree.KeyEntry, Any]], Context]:
        children, context = flatten(obj)
        return [(_key_entry(key), child) for key, child in children], context

    def node_unflatten(children: Any, context: Context) -> Any:
        return unflatten(list(children), context)

    def to_json(context: Context) -> str:
        return _dump_context(cls, context)

    pytree.register_pytree_node(
        cls,
        node_flatten,
        node_unflatten,
        serialized_type_name=name,
        to_dumpable_context=to_json,
        from_dumpable_context=json.loads,
        flatten_with_keys_fn=node_flatten_with_keys,
    )
    _ours[cls] = _Ours(flatten, unflatten, name, node_flatten)
    return action


def _register_fx(cls: type, before: Any | None) -> Action:
    if before is not None and before is not _flatten_by_spec and not is_ours(cls):
        return Action.KEPT
    fx_pytree.register_pytree_flatten_spec(cls, _flatten_by_spec, _matches_spec)
    if before is None:
        return Action.REGISTERED
    return Action.UNCHANGED if before is _flatten_by_spec else Action.REPLACED


def _flatten_by_spec(obj: Any, spec: pytree.TreeSpec) -> list[Any]:
    # One function for every class, and it asks the pytree registration in force at the time of the call: the two
    # registries agree by construction, for foreign registrations too. torch zips these children with those of the
    # spec and drops what is left over, so a mismatch has to be caught here.
    node = _torch_private.node_of(type(obj))
    if node is None or type(obj) is not spec.type:
        raise TypeError(f"the program was traced with a {spec.type.__qualname__} but got a {type(obj).__qualname__}")
    children, context = node.flatten_fn(obj)
    if len(children) != spec.num_children or context != spec.context:
        raise ValueError(
            f"this {type(obj).__qualname__} has {len(children)} children and context {context}, but the program was "
            f"traced with {spec.num_children} and {spec.context}; pass one of that form or export again with this one"
        )
    return list(children)


def _matches_spec(obj: Any, spec: pytree.TreeSpec) -> bool:
    node = _torch_private.node_of(type(obj))
    if node is None or type(obj) is not spec.type:
        return False
    children, context = node.flatten_fn(obj)
    return len(children) == spec.num_children and context == spec.context


def _key_entry(key: Key) -> pytree.KeyEntry:
    if isinstance(key, str):
        return pytree.GetAttrKey(key)
    if isinstance(key, int):
        return pytree.SequenceKey(key)
    return key


def _dump_context(cls: type, context: Context) -> str:
    try:
        text = json.dumps(context)
    except TypeError as error:
        raise TypeError(f"the context {context!r} of {cls.__qualname__} is not JSON: {error}") from None
    # Tuples and integer keys are written but come back as lists and strings, and the loaded spec would match nothing.
    if json.loads(text) != context:
        raise TypeError(
            f"the context {context!r} of {cls.__qualname__} reads back from JSON as {json.loads(text)!r}; "
            "use lists for tuples and strings for keys"
        )
    return text


def plain_spec(serialized: str) -> str:
    """Return a serialised spec in which each object of a class of ours is a dict of its named children.

    The leaves and their order are the same, so that the program is.

    Args:
        serialized: As `torch.utils._pytree.treespec_dumps` gives it.
    """
    spec = pytree.treespec_loads(serialized)
    leaves = list(range(spec.num_leaves))
    found, plain = pytree.tree_flatten(_plain(pytree.tree_unflatten(leaves, spec)))
    assert found == leaves
    return pytree.treespec_dumps(plain)


def takes_own_classes(program: ExportedProgram) -> bool:
    """Return True if an argument of the program is an object of a class of ours, or holds one."""
    spec = program.call_spec.in_spec
    return spec is not None and _holds_own(pytree.tree_unflatten(list(range(spec.num_leaves)), spec))


def _plain(value: Any) -> Any:
    if is_ours(type(value)):
        return {key: _plain(child) for key, child in named_children(value)}
    if type(value) is dict:
        return {name: _plain(child) for name, child in value.items()}
    return type(value)(_plain(child) for child in value) if type(value) in (list, tuple) else value


def _holds_own(value: Any) -> bool:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return is_ours(type(value)) or any(_holds_own(child) for child in children)
