"""Replacing a function once, and knowing later what it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, TypeVar

from torch import nn

#: Attribute of a replacement: the function that it stands for.
ORIGINAL = "_exportable_cache_original"

_Entry = TypeVar("_Entry")


def marked(patch: Callable[[Callable], Callable], original: Callable) -> Callable:
    """What `patch` makes of a function, under its name; an original that is such a replacement already is returned as it is."""
    if hasattr(original, ORIGINAL):
        return original
    replacement = wraps(original)(patch(original))
    setattr(replacement, ORIGINAL, original)
    return replacement


def classes_in(model: nn.Module, table: Mapping[str, _Entry]) -> Iterator[tuple[type[nn.Module], _Entry]]:
    """transformers' classes that a model is made of and that a table names, with what the table has for them."""
    for kind in {type(module) for module in model.modules()}:
        if kind.__name__ in table and kind.__module__.startswith("transformers."):
            yield kind, table[kind.__name__]


def patch_forwards(model: nn.Module, table: Mapping[str, Any], patch: Callable[[Any, Callable], Callable]) -> set[str]:
    """Replace `forward` of the classes that a table names by `patch(entry, forward)`. Calling it again changes nothing.

    Returns:
        Names of those that the model has need of.
    """
    found = set()
    for kind, entry in classes_in(model, table):
        found.add(kind.__name__)
        kind.forward = marked(lambda original, entry=entry: patch(entry, original), kind.forward)
    return found
