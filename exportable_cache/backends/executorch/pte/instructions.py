"""Check the instructions and names of a `.pte`, which ExecuTorch's own verification does not read.

The runtime (1.4.1) aborts the process if an instruction names an operator that does not exist, if a kernel gets a value
of the wrong kind ("a value that is not a Double"), if a tensor exceeds its buffer, or if a name in an error message is
not UTF-8. These checks read every instruction and name, those of weights in XNNPACK's payloads included, with the
flatbuffers library, by the fields of ExecuTorch's `program.fbs` and XNNPACK's `schema.fbs`. They compare the kinds of
values with the schemas of the operators.
"""

from __future__ import annotations

import functools
import math
import mmap
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ....common.compat.torch import schema_of
from ....errors import BundleError

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


# Fields of the schema's tables, by their place in it.
_PLANS, _SEGMENTS, _NAMED_DATA = 1, 4, 7
_NAME, _VALUES, _INPUTS, _OUTPUTS, _CHAINS, _OPERATORS, _DELEGATES = 0, 2, 3, 4, 5, 6, 7
_INSTRUCTIONS = 2
_PROCESSED, _COMPILE_SPECS = 1, 2
_PLANNED = 8
#: Fields of a tensor.
_SCALAR_TYPE, _SIZES, _DIM_ORDER, _ALLOCATION, _TENSOR_INFO, _TENSOR_NAME = 0, 2, 3, 6, 9, 1
#: Lists of values: the kinds that these may be of, and the least index, where -1 represents a missing tensor.
_LISTS = {INTS: ({INT}, 0), TENSORS: ({TENSOR}, 0), OPTIONAL_TENSORS: ({TENSOR, NULL}, -1)}
#: Bytes of an element by ExecuTorch's number for its dtype; 0 where several elements share one.
_ITEM_SIZES = {
    0: 1, 1: 1, 2: 2, 3: 4, 4: 8, 5: 2, 6: 4, 7: 8, 8: 4, 9: 8, 10: 16, 11: 1, 12: 1, 13: 1, 14: 4, 15: 2,
    16: 1, 17: 1, 22: 0, 23: 1, 24: 1, 25: 1, 26: 1, 27: 2, 28: 4, 29: 8,
}  # fmt: skip
#: The most bytes that a tensor may claim, above every memory that there is.
_MOST_BYTES = 1 << 40
#: The union of instructions.
_KERNEL_CALL, _DELEGATE_CALL, _MOVE, _JUMP, _FREE = 1, 2, 3, 4, 5
#: Where the file's own header says that segments begin, and XNNPACK's where its tables do; names of weights in these.
_SEGMENT_BASE, _XNNPACK_TABLES = 24, 10
_XNNPACK, _XNNPACK_MAGIC = "XnnpackBackend", b"XH00"
_CONSTANTS, _CONSTANT_NAME = 8, 2
#: How often a file may be read in all: tables can share lists and names, and many that share a long one take for ever.
_TIMES, _AT_LEAST = 16, 1 << 16


def check_instructions(path: Path) -> None:
    """Refuse a program whose instructions or names would take the process down with them.

    Args:
        path: A file whose tables were verified.

    Raises:
        BundleError: If an instruction names an operator, a delegate, a value or an instruction that there is not, or a
            name is no UTF-8, or tables share more than any program's do.
        OSError: If it cannot be read.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        with _one_sentence(path):
            _check(_root(_Bytes(data), 0))


def called_operators(path: Path) -> frozenset[str]:
    """Operators that the methods of a program call, such as "aten::add.out", without what delegates took.

    Args:
        path: A file whose tables were verified.

    Raises:
        BundleError: As `check_instructions`.
        OSError: If it cannot be read.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        with _one_sentence(path):
            operators = (one for plan in _root(_Bytes(data), 0).tables(_PLANS) for one in plan.tables(_OPERATORS))
            return frozenset(f"{operator.text(0)}.{operator.text(1)}".rstrip(".") for operator in operators)


@contextmanager
def _one_sentence(path: Path) -> Iterator[None]:
    try:
        yield
    # The last three: of places that are none.
    except (ValueError, IndexError, TypeError, struct.error) as error:
        raise BundleError(
            f"{path.name} is damaged, or made to do harm: {error}; get it again, or export the model again"
        ) from None


class _Bytes:
    """A file, and how many bytes of lists and names may still be read of it."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self._left = _TIMES * len(data) + _AT_LEAST

    def spend(self, size: int) -> None:
        """Take note of what is about to be read.

        Raises:
            ValueError: If that is too much.
        """
        self._left -= size
        if self._left < 0:
            raise ValueError("its tables share more lists and names than any program's")


def _check(program: _Table) -> None:
    for named in program.tables(_NAMED_DATA):
        named.text(0)
    segments = program.tables(_SEGMENTS)
    for plan in program.tables(_PLANS):
        name = plan.text(_NAME)
        operators, delegates, values = (plan.tables(field) for field in (_OPERATORS, _DELEGATES, _VALUES))
        for operator in operators:
            operator.text(0), operator.text(1)
        for delegate in delegates:
            if delegate.text(0) == _XNNPACK:
                _check_payload(segments, delegate.table(_PROCESSED))
            for spec in delegate.tables(_COMPILE_SPECS):
                spec.text(0)
        kinds = _check_values(values, plan.wide_numbers(_PLANNED), name)
        _within(plan.numbers(_INPUTS), len(values), f"inputs of {name!r}")
        _within(plan.numbers(_OUTPUTS), len(values), f"outputs of {name!r}")
        names = [f"{operator.text(0)}.{operator.text(1)}".rstrip(".") for operator in operators]
        ids = [delegate.text(0) for delegate in delegates]
        for chain in plan.tables(_CHAINS):
            instructions = chain.tables(_INSTRUCTIONS)
            sizes = {_KERNEL_CALL: len(operators), _DELEGATE_CALL: len(delegates)}
            for instruction in instructions:
                what = f"an instruction of {name!r}"
                _check_instruction(instruction, sizes, len(values), len(instructions), what)
                _check_call_kinds(instruction, names, ids, kinds, what)


def _check_call_kinds(
    instruction: _Table, operators: list[str], delegates: list[str], kinds: list[int], what: str
) -> None:
    """Check kinds of the values that an instruction takes, whose indices were checked."""
    kind, call = instruction.union(0)
    if call is None:
        return
    if kind == _KERNEL_CALL:
        check_call(operators[call.number(0)], [kinds[index] for index in call.numbers(1)], what)
    elif kind == _DELEGATE_CALL and delegates[call.number(0)] == _XNNPACK:
        _check_kinds(call.numbers(1), kinds, {TENSOR}, what)
    elif kind == _JUMP:
        # A comparison of numbers puts its bool where the file has a number.
        _check_kinds([call.number(0)], kinds, {TENSOR, BOOL, INT}, what)


def _check_kinds(indices: Any, kinds: list[int], allowed: set[int], what: str) -> None:
    for index in indices:
        if index >= 0 and kinds[index] not in allowed:
            names = " or ".join(NAMES[kind] for kind in sorted(allowed))
            raise ValueError(f"value {index} in {what} must be {names}, got {NAMES.get(kinds[index], 'another kind')}")


def _check_payload(segments: list[_Table], processed: _Table | None) -> None:
    """Names of the weights that XNNPACK looks for, of a payload in a segment."""
    if processed is None or processed.number(0, "<b") == 0:
        return
    file = processed.file
    data = file.data
    start = struct.unpack_from("<Q", data, _SEGMENT_BASE)[0] + segments[processed.number(1)].number(0, "<Q")
    if data[start + 4 : start + 8] != _XNNPACK_MAGIC:
        return
    tables = _root(file, start + struct.unpack_from("<I", data, start + _XNNPACK_TABLES)[0])
    for constant in tables.tables(_CONSTANTS):
        constant.text(_CONSTANT_NAME)


def _check_values(values: list[_Table], planned: Sequence[int], name: str) -> list[int]:
    """Check the values of a method, and return the kind of each.

    Args:
        planned: Sizes in bytes of the buffers that its tensors are planned into; the first one is not used.
    """
    held = [value.union(0) for value in values]
    kinds = [kind if table is not None else 0 for kind, table in held]
    for kind, table in held:
        if table is None:
            continue
        if kind == STRING:
            table.text(0)
        elif kind == TENSOR:
            _check_tensor(table, planned, name)
        elif kind in _LISTS:
            allowed, least = _LISTS[kind]
            items = table.wide_numbers(0) if kind == INTS else table.numbers(0)
            _within(items, len(values), f"a list of {name!r}", least=least)
            _check_kinds(items, kinds, allowed, f"a list of {name!r}")
        elif kind not in NAMES:
            raise ValueError(f"a value of {name!r} is of kind {kind}, which there is not")
    return kinds


def _check_tensor(tensor: _Table, planned: Sequence[int], name: str) -> None:
    """Check sizes: the runtime aborts on one below 0, and multiplies them without a look at what fits in 64 bits."""
    info = tensor.table(_TENSOR_INFO)
    if info is not None:
        info.text(_TENSOR_NAME)
    sizes, dtype = tensor.numbers(_SIZES), tensor.number(_SCALAR_TYPE, "<b")
    if dtype not in _ITEM_SIZES:
        raise ValueError(f"a tensor of {name!r} has dtype {dtype}, which there is not")
    if any(size < 0 for size in sizes):
        raise ValueError(f"sizes of a tensor of {name!r} must be at least 0, got {list(sizes)!r:.80}")
    length = math.prod(max(size, 1) for size in sizes) * _ITEM_SIZES[dtype]
    if length > _MOST_BYTES:
        raise ValueError(f"a tensor of {name!r} must have at most {_MOST_BYTES} bytes, got sizes {list(sizes)!r:.80}")
    order = tensor.small_numbers(_DIM_ORDER)
    if order and sorted(order) != list(range(len(sizes))):
        raise ValueError(f"dimensions of a tensor of {name!r} are in the order {list(order)!r:.80}")
    place = tensor.table(_ALLOCATION)
    if place is not None and 0 not in sizes:
        buffer, offset = place.number(0, "<I"), place.number(1, "<I") + (place.number(2, "<I") << 32)
        # A dtype or a delegate that packs elements takes less; what is missing is at most that.
        if not 0 < buffer < len(planned) or offset + length > planned[buffer]:
            raise ValueError(
                f"a tensor of {name!r} lies at {offset} with {length} bytes, past the end of its buffer {buffer}"
            )


def _check_instruction(instruction: _Table, sizes: dict[int, int], values: int, instructions: int, what: str) -> None:
    kind, call = instruction.union(0)
    if call is None:
        raise ValueError(f"{what} does nothing")
    if kind in sizes:
        _within([call.number(0)], sizes[kind], what)
        _within(call.numbers(1), values, what)
    elif kind == _MOVE:
        _within([call.number(0), call.number(1)], values, what)
    elif kind == _JUMP:
        _within([call.number(0)], values, what)
        # One past the last ends the method.
        _within([call.number(1)], instructions + 1, what)
    elif kind == _FREE:
        _within([call.number(0)], values, what)
    else:
        raise ValueError(f"{what} is of kind {kind}, which there is not")


def _within(indices: Any, size: int, what: str, least: int = 0) -> None:
    wrong = next((int(index) for index in indices if not least <= index < size), None)
    if wrong is not None:
        raise ValueError(f"{what} names number {wrong} of {size}")


class _Table:
    """A table in a flatbuffer; `flatbuffers.Table` finds its fields.

    Args:
        file: That it is in.
        table: That.
    """

    def __init__(self, file: _Bytes, table: Any) -> None:
        self.file = file
        self._table = table

    def _at(self, field: int) -> int:
        """Where a field is from the table's own place, 0 for one that is not stored."""
        return self._table.Offset(4 + 2 * field)

    def table(self, field: int) -> _Table | None:
        at = self._at(field)
        return _table(self.file, self._table.Indirect(at + self._table.Pos)) if at else None

    def tables(self, field: int) -> list[_Table]:
        return list(self._tables(field))

    def _tables(self, field: int) -> Iterator[_Table]:
        at = self._at(field)
        if at:
            start, count = self._table.Vector(at), self._table.VectorLen(at)
            if start + 4 * count > len(self._table.Bytes):
                raise ValueError(f"a list of {count} goes past the end")
            self.file.spend(4 * count)
            for index in range(count):
                yield _table(self.file, self._table.Indirect(start + 4 * index))

    def union(self, field: int) -> tuple[int, _Table | None]:
        """Which table a union is, and that table."""
        at = self._at(field)
        kind = self._table.Bytes[self._table.Pos + at] if at else 0
        return kind, self.table(field + 1) if kind else None

    def number(self, field: int, form: str = "<i") -> int:
        """An integer, of 32 bits unless another form is given."""
        at = self._at(field)
        return struct.unpack_from(form, self._table.Bytes, self._table.Pos + at)[0] if at else 0

    def numbers(self, field: int) -> tuple[int, ...]:
        """Return a vector of int32."""
        return self._vector(field, "i", 4)

    def wide_numbers(self, field: int) -> tuple[int, ...]:
        """Return a vector of int64."""
        return self._vector(field, "q", 8)

    def small_numbers(self, field: int) -> tuple[int, ...]:
        """Return a vector of uint8."""
        return self._vector(field, "B", 1)

    def _vector(self, field: int, form: str, size: int) -> tuple[int, ...]:
        at = self._at(field)
        if not at:
            return ()
        count = self._table.VectorLen(at)
        self.file.spend(size * count)
        return struct.unpack_from(f"<{count}{form}", self._table.Bytes, self._table.Vector(at))

    def text(self, field: int) -> str:
        """A text, "" for one that is not stored."""
        at = self._at(field)
        if not at:
            return ""
        found = self._table.String(self._table.Pos + at)
        self.file.spend(len(found))
        try:
            return found.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"a name is no UTF-8: {error.object[:40]!r}") from None


def _table(file: _Bytes, position: int) -> _Table:
    from flatbuffers.table import Table

    return _Table(file, Table(file.data, position))


def _root(file: _Bytes, start: int) -> _Table:
    return _table(file, start + struct.unpack_from("<I", file.data, start)[0])
