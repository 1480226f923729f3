"""Takes a transformers cache or layer apart into named children and a JSON context, and puts it together again.

One rule for every class and release: each attribute of the instance is exactly one of

* a child: what `CHILDREN` names (tensors, or lists and dicts of tensors, layers or caches);
* a counter: what `COUNTERS` names while it holds an int, see below;
* derived: what `DERIVED` names and a child determines (dtype, device, head counts, ...), recomputed from the children,
  so a program that moves or casts its tensors rebuilds a layer that agrees with them;
* context: everything else, which must be JSON, None, a dtype or a device of a layer that has no tensors yet (written
  as text), or the class of the layers to come.

An attribute of another kind is an error that names it: a new transformers release is noticed, not lost.
The object is rebuilt without calling its constructor, whose arguments (a config) are not part of the state.

Several transformers layers count their tokens in a Python int. In the context it would change the tree spec at every
step, and a program traced at one length would refuse the next. So a counter is a child: a 0-D int64 tensor on the CPU,
made into what the class needs when the object is rebuilt:

* a tensor with a value gives the int, so the rebuilt layer is the layer it was;
* while a graph is traced it gives `tensor.item()`, a symbol: the graph reads the length from its input, adds to it, and
  returns it, and one program serves every step. Where the class *branches* on the length (`StaticSlidingWindowLayer`,
  or the mask sizes of a `DynamicSlidingWindowLayer` past its window), tracing stops with torch's data-dependent error
  rather than keep the branch of the example;
* anything else (fake tensors before tracing, None, strings) is held and returned unchanged.

A child that is an int was the alternative. torch.export bakes it in as a constant, so the program runs at one length
only, unless every user marks it dynamic; and `tree_map(torch.clone, cache)` breaks on it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from . import _torch_private

# Order of the children. A name that an object lacks, or has as None, is skipped.
CHILDREN = (
    "layers",
    "keys",
    "values",
    "key_cache",
    "value_cache",
    "self_attention_cache",
    "cross_attention_cache",
    "cumulative_length",
    "indexer_keys",
    "indexer_position_ids",
    "indexer_cumulative_length",
    "conv_states",
    "recurrent_states",
    "ssm_states",
)
# `cumulative_length` is a tensor in some layers, an int in others, a list of ints in the HybridChunkedCache of 4.52.
COUNTERS = ("cumulative_length", "cumulative_length_int", "_previous_number_of_accepted_tokens")
_ORDER = (*CHILDREN, *(name for name in COUNTERS if name not in CHILDREN))


@dataclass(frozen=True)
class Held:
    """A placeholder of a counter or tensor without a value; arithmetic on it is a TypeError."""

    leaf: Any
    counter: bool = True


def is_counter(value: Any) -> bool:
    """Return True if a value is a counter, because some classes keep a tensor under the same name."""
    if isinstance(value, Held):
        return value.counter
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _counter_leaf(value: int | torch.SymInt | Held) -> Any:
    """Return the pytree child of a counter."""
    if isinstance(value, Held):
        return value.leaf
    return torch.scalar_tensor(value, dtype=torch.int64, device="cpu")  # type: ignore[arg-type]


def _counter_from(leaf: Any) -> Any:
    """Return the counter of a pytree child: an int, a symbol while tracing, or `Held`."""
    if _torch_private.is_plain(leaf):
        return int(leaf)
    if _torch_private.is_traced(leaf):
        return leaf.item()
    return Held(leaf)


def _tensors(state: Mapping[str, Any]) -> Iterator[Any]:
    for name in ("keys", "key_cache", "conv_states", "recurrent_states"):
        value = state.get(name)
        if isinstance(value, list):  # allocated, with any elements
            yield from value
        else:
            items = value.values() if isinstance(value, dict) else (value,)
            yield from (item for item in items if item is not None)


def _has_tensors(state: Mapping[str, Any]) -> bool:
    return any(True for _ in _tensors(state))


def _of_first(attribute: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda state: getattr(next(_tensors(state), None), attribute, None)


def _size_of(name: str, dim: int) -> Callable[[Mapping[str, Any]], Any]:
    def size(state: Mapping[str, Any]) -> Any:
        tensor = state[name]
        return tensor.shape[dim] if isinstance(tensor, torch.Tensor) and tensor.dim() == 4 else None

    return size


def _tokens_in_first_layer(state: Mapping[str, Any]) -> Any:
    first = state["key_cache"][0] if state["key_cache"] else None
    return first.shape[-2] if isinstance(first, torch.Tensor) and first.dim() == 4 else 0


def _sliding_window_tensor(state: Mapping[str, Any]) -> torch.Tensor:
    # `full` rather than `tensor`: traced by make_fx, the latter leaves an unused constant in the graph.
    device = state["keys"].device if isinstance(state.get("keys"), torch.Tensor) else "cpu"
    return torch.full((), state["sliding_window"], dtype=torch.long, device=device)


# Attribute -> (state it needs, how it follows from it). Sizes can be symbols while tracing, so they may not be context.
DERIVED: dict[str, tuple[str | None, Callable[[Mapping[str, Any]], Any]]] = {
    "dtype": (None, _of_first("dtype")),
    "device": (None, _of_first("device")),
    "_dtype": (None, _of_first("dtype")),
    "batch_size": ("keys", _size_of("keys", 0)),
    "max_batch_size": ("keys", _size_of("keys", 0)),
    "num_heads": ("keys", _size_of("keys", 1)),
    "head_dim": ("keys", _size_of("keys", -1)),
    "k_head_dim": ("keys", _size_of("keys", -1)),
    "v_head_dim": ("values", _size_of("values", -1)),
    "indexer_dtype": ("indexer_keys", lambda state: getattr(state["indexer_keys"], "dtype", None)),
    "indexer_device": ("indexer_keys", lambda state: getattr(state["indexer_keys"], "device", None)),
    "_seen_tokens": ("key_cache", _tokens_in_first_layer),
    "_sliding_window_tensor": ("sliding_window", _sliding_window_tensor),
}


def flatten_object(obj: Any) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    """Return the children by name, and the JSON context that `unflatten_object` needs as well.

    Raises:
        TypeError: If an attribute fits in neither; the message names it.
    """
    state = vars(obj)
    if state.get("offloading"):
        raise TypeError(
            f"{type(obj).__qualname__} has offloading=True and holds a device stream, which no program can take or "
            "return; build it with offloading=False"
        )
    # A layer without tensors has seen nothing: its counter is zero, and no symbol for programs that start from it.
    counted = _has_tensors(state) or "layers" in state
    children: list[tuple[str, Any]] = []
    context: dict[str, Any] = {"children": [], "counters": [], "derived": [], "missing": {}, "attributes": {}}
    for name in _ORDER:
        value = state.get(name)
        if value is None:
            continue
        if name in COUNTERS and _holds_counters(value):
            if counted:
                context["counters"].append(name)
                children.append((name, _map(_counter_leaf, value)))
            continue
        if isinstance(value, dict):
            context["missing"][name] = [key for key, item in value.items() if item is None]
            value = {key: _release(item) for key, item in value.items() if item is not None}
        context["children"].append(name)
        children.append((name, _release(value)))
    placed = {name for name, _ in children}
    for name in sorted(state.keys() - placed):
        if _is_derived(name, state):
            context["derived"].append(name)
        else:
            context["attributes"][name] = _encode(state[name], type(obj), name)
    return children, {part: content for part, content in context.items() if content}


def unflatten_object(cls: type, children: list[Any], context: Mapping[str, Any]) -> Any:
    """Return the object that `flatten_object` took apart, with these children, which may be any objects."""
    obj: Any = cls.__new__(cls)  # type: ignore[call-overload]
    state: dict[str, Any] = {name: _decode(value, cls) for name, value in context.get("attributes", {}).items()}
    counted, missing = context.get("counters", ()), context.get("missing", {})
    names = [name for name in _ORDER if name in counted or name in context.get("children", ())]
    for name, child in zip(names, children, strict=True):
        if name in counted:
            state[name] = _map(_counter_from, child)
        elif name in missing:
            present = {key: _hold(item, name) for key, item in child.items()}
            state[name] = dict(sorted({**dict.fromkeys(missing[name]), **present}.items()))
        else:
            state[name] = _hold(child, name)
    _pin_length(state)
    for name in context.get("derived", ()):
        state[name] = _hold(DERIVED[name][1](state), name)
    for name, value in state.items():
        setattr(obj, name, value)
    return obj


def _pin_length(state: dict[str, Any]) -> None:
    # A sliding layer that is not full yet has seen as many tokens as it holds. Saying so to the tracer lets the mask
    # sizes of a first pass be traced; past the window the length is only in the counter.
    length, keys = state.get("cumulative_length"), state.get("keys")
    if not isinstance(length, torch.SymInt) or "sliding_window" not in state or state.get("record_past"):
        return
    assert keys is not None
    if keys.dim() == 4 and keys.shape[-2] < state["sliding_window"] - 1:
        state["cumulative_length"] = keys.shape[-2]


def _hold(child: Any, name: str) -> Any:
    # In the next flatten, None instead of a tensor would read as "no such child", and an int as a counter.
    stands_in = child is None or (name in COUNTERS and not isinstance(child, (torch.Tensor, list)))
    return Held(child, counter=False) if stands_in else child


def _release(value: Any) -> Any:
    return value.leaf if isinstance(value, Held) else value


def _holds_counters(value: Any) -> bool:
    return all(is_counter(item) for item in value) if isinstance(value, list) else is_counter(value)


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    return [function(item) for item in value] if isinstance(value, list) else function(value)


def _is_derived(name: str, state: Mapping[str, Any]) -> bool:
    if name not in DERIVED or state[name] is None:
        return False
    needs, _ = DERIVED[name]
    return _has_tensors(state) if needs is None else state.get(needs) is not None


def _encode(value: Any, owner: type, name: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        return [_encode(item, owner, name) for item in value]
    if type(value) is dict:  # as pairs: JSON would turn the integer keys of `is_updated` and friends into strings
        return {"pairs": [[key, _encode(item, owner, name)] for key, item in value.items()]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, type):
        return {"class": value.__qualname__}
    raise TypeError(
        f"attribute {name!r} of {owner.__qualname__} is a {type(value).__qualname__}, which is neither a known tensor "
        "of a cache nor JSON; register the class with a flatten of your own (exportable_cache.pytree.register_node)"
    )


def _decode(value: Any, owner: type) -> Any:
    if isinstance(value, list):
        return [_decode(item, owner) for item in value]
    if isinstance(value, dict):
        ((kind, content),) = value.items()
        if kind == "pairs":
            return {key: _decode(item, owner) for key, item in content}
        if kind == "dtype":
            return getattr(torch, content)
        if kind == "device":
            return torch.device(content)
        return _class_in_bases(owner, content)
    return value


def _class_in_bases(owner: type, qualname: str) -> type:
    # Only classes of the modules the cache itself is made of: a context read from a file cannot name anything else.
    for base in owner.__mro__:
        found = getattr(sys.modules[base.__module__], qualname, None)
        if isinstance(found, type):
            return found
    raise ValueError(f"{owner.__qualname__} was saved with layers of class {qualname!r}, unknown to this release")
