"""Kinds of values that ExecuTorch's kernels may be called with, from the schemas of their operators.

The runtime (seen in 1.4.1) hands a kernel whatever values an instruction names, and aborts the process where a kernel
asks a value for what it is not: "a value that is not a Double".
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ....common.compat.torch import schema_of

# The union of values in ExecuTorch's `program.fbs`.
NULL, INT, BOOL, DOUBLE, TENSOR, STRING = 1, 2, 3, 4, 5, 6
INTS, DOUBLES, BOOLS, TENSORS, OPTIONAL_TENSORS = 7, 8, 9, 10, 11
NAMES = dict(
    enumerate(("nothing", "Null", "Int", "Bool", "Double", "Tensor", "String", "IntList", "DoubleList", "BoolList"))
) | {TENSORS: "TensorList", OPTIONAL_TENSORS: "OptionalTensorList"}

_Kinds = tuple[frozenset[int], ...]
_NUMBER = frozenset({INT, BOOL, DOUBLE})
_BY_TYPE: dict[str, frozenset[int]] = {
    "Tensor": frozenset({TENSOR}),
    "number": _NUMBER,
    "float": frozenset({DOUBLE}),
    "bool": frozenset({BOOL}),
    "str": frozenset({STRING}),
    "List[int]": frozenset({INTS}),
    "List[float]": frozenset({DOUBLES}),
    "List[bool]": frozenset({BOOLS}),
    "List[Tensor]": frozenset({TENSORS}),
    "List[Optional[Tensor]]": frozenset({OPTIONAL_TENSORS}),
    **dict.fromkeys(("int", "ScalarType", "MemoryFormat", "Layout", "Device"), frozenset({INT})),
}
#: Of operators whose schemas torch does not know where a program runs, by letters; `?` for a value that may be missing.
_LETTERS = {
    "T": TENSOR, "L": TENSORS, "I": INTS, "i": INT, "f": DOUBLE, "b": BOOL,
}  # fmt: skip
_UNKNOWN_TO_TORCH = {
    "executorch_prim::et_view.default": "T I T",
    "executorch_prim::et_copy_index.tensor": "T T i",
    "exportable_cache::attention.out": "T L L T f i i i f T? T? T T",
    "exportable_cache::write.out": "T T T i T? T T",
    "exportable_cache::linear_4bit.out": "T T T? i T T",
    "exportable_cache::linear_float.out": "T T T? i T T",
    "exportable_cache::linears_4bit.out": "T L L I L L",
    "exportable_cache::linears_float.out": "T L L I L L",
    "quantized_decomposed::embedding_byte.out": "T T T? i i T T T",
}
#: Arithmetic of the runtime on single numbers: `executorch_prim::add.Scalar` and the like.
_ON_NUMBERS, _OF_NUMBERS = "executorch_prim::", ".Scalar"


def check_call(operator: str, kinds: Sequence[int], what: str) -> None:
    """Check the kinds of the values that an instruction hands to a kernel: arguments, then results.

    Kernels of operators that neither torch nor this module knows are not checked.

    Raises:
        ValueError: If there are more or fewer than the operator takes, or one is of another kind.
    """
    if operator.startswith(_ON_NUMBERS) and operator.endswith(_OF_NUMBERS):
        wanted: _Kinds | None = (_NUMBER,) * len(kinds)
    else:
        wanted = _wanted(operator)
    if wanted is None:
        return
    if len(kinds) != len(wanted):
        raise ValueError(f"{what} calls {operator} with {len(kinds)} values, of {len(wanted)}")
    for index, (kind, allowed) in enumerate(zip(kinds, wanted, strict=True)):
        if kind not in allowed:
            names = " or ".join(NAMES[one] for one in sorted(allowed))
            raise ValueError(
                f"value {index} of {operator} in {what} must be {names}, got {NAMES.get(kind, f'kind {kind}')}"
            )


def _wanted(operator: str) -> _Kinds | None:
    """Return the kinds of each argument and each result of an operator, None for one that is not known."""
    letters = _UNKNOWN_TO_TORCH.get(operator)
    if letters is not None:
        return tuple(
            frozenset({_LETTERS[one[0]]}) | ({NULL} if one.endswith("?") else set()) for one in letters.split()
        )
    try:
        schema = schema_of(operator)
    except (AttributeError, ValueError):
        return None
    arguments = tuple(_kinds(str(one.real_type)) for one in schema.arguments)
    # The last value is the result. Several results are one value, the list of them, and so is the list of tensors that
    # an operator without a result in its schema writes to, such as `split_with_sizes_copy.out`.
    single = len(schema.returns) == 1
    return (*arguments, _kinds(str(schema.returns[0].type)) if single else frozenset({TENSORS}))


@functools.cache
def _kinds(type_: str) -> frozenset[int]:
    if type_.startswith("Optional["):
        return _kinds(type_.removeprefix("Optional[").removesuffix("]")) | {NULL}
    return _BY_TYPE.get(type_, frozenset(NAMES))
