"""Specs of classes that `register_node` registered, made specs of dicts, so that programs open without this package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.utils._pytree as pytree

from .registry import is_ours, named_children

if TYPE_CHECKING:
    from torch.export import ExportedProgram


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
