"""Guards of graphs that are compiled by layers and not kept: what each step looks at before it runs.

Between two steps weights pass through the caches, so each object that a guard looks at is a load from memory, and a
model has thousands. Left out are those on what nobody changes while a session is open, and those that one call makes
again for all tensors together, see `TensorForms`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

#: Of a session's own objects that describe its cache, which is as it was made; what is behind them are its tensors.
_LAYERS = ("module.layout.layers[", "type(module.layout.layers[")
#: Compare a module, a class or a function that code names.
_CODE = {"MODULE_MATCH", "CLASS_MATCH", "CLOSURE_MATCH", "BUILTIN_MATCH", "DUPLICATE_INPUT"}
#: Where models find their attention, which is registered by name, and anew whenever somebody likes.
_REGISTRIES = ("ALL_ATTENTION_FUNCTIONS", "ALL_MASK_ATTENTION_FUNCTIONS")

GuardFilter = Callable[[Sequence[Any]], list[bool]]


def checked_in_each_step(checked: Callable[[], Container[int]]) -> GuardFilter:
    """Which guards stay, as `guard_filter_fn` of torch.compile.

    Args:
        checked: Ids of the tensors whose forms the newest graph checks by itself.
    """
    return lambda guards: [_stays(guard, checked()) for guard in guards]


def _stays(guard: Any, checked: Container[int]) -> bool:
    if guard.name.startswith(_LAYERS):
        return False
    if guard.guard_type == "TENSOR_MATCH":
        return id(guard.value) not in checked
    if guard.is_global and guard.guard_type in _CODE:
        return any(registry in guard.name for registry in _REGISTRIES)
    # The dictionaries in which a module has its own.
    is_plain = guard.has_value and type(guard.value) is dict
    return not (guard.guard_type == "TYPE_MATCH" and is_plain and not guard.is_global)
