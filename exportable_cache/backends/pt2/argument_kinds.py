"""Kinds of values that an operator's argument may be given, by the type that its schema declares.

torch takes any number where a schema declares a dtype, a layout or a memory format, and crashes on one that is not
valid. The file names the kind of every value, so the kind is compared with the schema before anything runs.
"""

from __future__ import annotations

import functools
from typing import Any

_INTS = frozenset({"as_int", "as_sym_int"})
_FLOATS = frozenset({"as_int", "as_float", "as_sym_int", "as_sym_float"})
_NUMBERS = _FLOATS | {"as_bool", "as_sym_bool"}

#: Kinds by the schema's type. A number is valid for a tensor (`add.Tensor(x, 2)`), and one int for a list of ints.
_KINDS: dict[str, frozenset[str]] = {
    "Tensor": frozenset({"as_tensor"}) | _NUMBERS,
    "int": _INTS,
    "float": _FLOATS,
    "number": _NUMBERS,
    "bool": frozenset({"as_bool", "as_sym_bool"}),
    "str": frozenset({"as_string"}),
    # What functional collectives call the type of their group's name.
    "Any": frozenset({"as_string"}),
    "ScalarType": frozenset({"as_scalar_type"}),
    "Layout": frozenset({"as_layout"}),
    "MemoryFormat": frozenset({"as_memory_format"}),
    "Device": frozenset({"as_device"}),
    "List[Tensor]": frozenset({"as_tensors"}),
    "List[Optional[Tensor]]": frozenset({"as_tensors", "as_optional_tensors"}),
    "List[int]": _INTS | {"as_ints", "as_sym_ints"},
    "List[float]": _FLOATS | {"as_floats", "as_sym_floats", "as_ints", "as_sym_ints"},
    "List[bool]": frozenset({"as_bool", "as_bools", "as_sym_bools"}),
}


def check_kind(called: Any, argument: Any, kind: str) -> None:
    """Check that a value of `kind`, such as "as_int", is valid for an argument of an operator's schema.

    Raises:
        ValueError: If it is not.
    """
    if kind not in _kinds(str(argument.real_type)):
        raise ValueError(f"{argument.name} of {called} must be {argument.real_type}, got {kind!r:.40}")


@functools.cache
def _kinds(type_: str) -> frozenset[str]:
    if type_.startswith("Optional["):
        inner = type_.removeprefix("Optional[").removesuffix("]")
        return _kinds(inner) | {"as_none"} | ({"as_optional_tensor"} if inner == "Tensor" else set())
    return _KINDS.get(type_, frozenset())
