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

# Members of the union of values in ExecuTorch's `program.fbs`.
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
#: Letters of the kinds in `_UNKNOWN_TO_TORCH`.
_LETTERS = {
    "T": TENSOR, "L": TENSORS, "I": INTS, "i": INT, "f": DOUBLE, "b": BOOL,
}  # fmt: skip
#: Forms of integers in groups, see `native.linears.GROUPED_FORMS`, which would import torch.
_GROUPS = tuple(f"{bits}bit_{form}" for bits in (4, 8) for form in ("float", "float16", "shifted"))
#: Kinds of operators whose schemas torch lacks when a program is opened; `?` marks an optional value.
_UNKNOWN_TO_TORCH = {
    "executorch_prim::et_view.default": "T I T",
    "executorch_prim::et_copy_index.tensor": "T T i",
    **dict.fromkeys(
        ("exportable_cache::attention.out", "exportable_cache::attention_rounded.out"), "T L L T f i i i f T? T? T T"
    ),
    "exportable_cache::write.out": "T T T i T? T T",
    **{
        f"exportable_cache::{name}_{kind}.out": kinds
        for name, kinds in (("linear", "T T T? i T T"), ("linears", "T L L I L L"))
        for kind in ("4bit", *_GROUPS, "float", "bfloat16", "float16", "bfloat16_rounded")
    },
    **{
        f"exportable_cache::experts_{kind}.out": "T T T? T T? i T T"
        for kind in ("4bit", "float", "bfloat16", "float16")
    },
    **dict.fromkeys(("exportable_cache::to_float16.out", "exportable_cache::to_bfloat16.out"), "T T T"),
    "exportable_cache::rms_norm.out": "T T? f T T",
    "exportable_cache::rotate.out": "T T T b T T",
    "exportable_cache::gate.out": "T T f f T T",
    **{f"exportable_cache::embedding_{kind}.out": "T T i i T T" for kind in (*_GROUPS, "bfloat16", "float16")},
    "quantized_decomposed::embedding_byte.out": "T T T? i i T T T",
}
#: Scalar arithmetic of the runtime, such as `executorch_prim::add.Scalar`.
_ON_NUMBERS, _OF_NUMBERS = "executorch_prim::", ".Scalar"


def check_call(operator: str, kinds: Sequence[int], what: str) -> None:
    """Check the kinds of the values that an instruction passes to a kernel: arguments, then results.

    Operators that neither torch nor this module knows are not checked.

    Raises:
        ValueError: If the number of values is wrong, or one has the wrong kind.
    """
    if operator.startswith(_ON_NUMBERS) and operator.endswith(_OF_NUMBERS):
        wanted: _Kinds | None = (_NUMBER,) * len(kinds)
    else:
        wanted = _expected_kinds(operator)
    if wanted is None:
        return
    if len(kinds) != len(wanted):
        raise ValueError(f"{what} calls {operator} with {len(kinds)} values, expected {len(wanted)}")
    for index, (kind, allowed) in enumerate(zip(kinds, wanted, strict=True)):
        if kind not in allowed:
            names = " or ".join(NAMES[one] for one in sorted(allowed))
            raise ValueError(
                f"value {index} of {operator} in {what} must be {names}, got {NAMES.get(kind, f'kind {kind}')}"
            )


def _expected_kinds(operator: str) -> _Kinds | None:
    """Return the allowed kinds of each argument and result of an operator, or None for an unknown one."""
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
    # The last value is the result: one tensor, or one list of several results. Operators without a result in the
    # schema, such as `split_with_sizes_copy.out`, write to a list of tensors.
    single = len(schema.returns) == 1
    return (*arguments, _kinds(str(schema.returns[0].type)) if single else frozenset({TENSORS}))


@functools.cache
def _kinds(type_: str) -> frozenset[int]:
    if type_.startswith("Optional["):
        return _kinds(type_.removeprefix("Optional[").removesuffix("]")) | {NULL}
    return _BY_TYPE.get(type_, frozenset(NAMES))


# Indices of fields in the schema's tables.
_PLANS, _SEGMENTS, _NAMED_DATA = 1, 4, 7
_NAME, _VALUES, _INPUTS, _OUTPUTS, _CHAINS, _OPERATORS, _DELEGATES = 0, 2, 3, 4, 5, 6, 7
_INSTRUCTIONS = 2
_PROCESSED, _COMPILE_SPECS = 1, 2
_PLANNED = 8
#: Fields of a tensor.
_SCALAR_TYPE, _SIZES, _DIM_ORDER, _ALLOCATION, _TENSOR_INFO, _TENSOR_NAME = 0, 2, 3, 6, 9, 1
#: Allowed kinds and the least index of a list's values; -1 represents a missing tensor.
_LISTS = {INTS: ({INT}, 0), TENSORS: ({TENSOR}, 0), OPTIONAL_TENSORS: ({TENSOR, NULL}, -1)}
#: Bytes of an element by ExecuTorch's scalar type; 0 if several elements share a byte.
_ITEM_SIZES = {
    0: 1, 1: 1, 2: 2, 3: 4, 4: 8, 5: 2, 6: 4, 7: 8, 8: 4, 9: 8, 10: 16, 11: 1, 12: 1, 13: 1, 14: 4, 15: 2,
    16: 1, 17: 1, 22: 0, 23: 1, 24: 1, 25: 1, 26: 1, 27: 2, 28: 4, 29: 8,
}  # fmt: skip
#: Limit of a tensor's bytes, larger than any memory.
_MAX_BYTES = 1 << 40
#: Members of the union of instructions.
_KERNEL_CALL, _DELEGATE_CALL, _MOVE, _JUMP, _FREE = 1, 2, 3, 4, 5
#: Offsets of the segment base in the file's header, and of the tables in XNNPACK's header.
_SEGMENT_BASE, _XNNPACK_TABLES = 24, 10
_XNNPACK, _XNNPACK_MAGIC = "XnnpackBackend", b"XH00"
_CONSTANTS, _CONSTANT_NAME = 8, 2
#: Limit of bytes read, as a multiple of the file: tables may share vectors, and shared long ones would take forever.
_READ_FACTOR, _MIN_READ = 16, 1 << 16


def check_instructions(path: Path) -> None:
    """Refuse a program whose instructions or names would abort the process.

    Args:
        path: File whose flatbuffer was verified.

    Raises:
        BundleError: If an instruction has an index out of range or an unknown kind, if a name is not UTF-8, or if
            tables are shared more than in any exported program.
        OSError: If the file cannot be read.
    """
    with _opened(path) as program:
        _check(program)


def called_operators(path: Path) -> frozenset[str]:
    """Return the operators that the methods of a program call, such as "aten::add.out"; delegated ones are not listed.

    Args:
        path: File whose flatbuffer was verified.

    Raises:
        BundleError: As `check_instructions`.
        OSError: If the file cannot be read.
    """
    with _opened(path) as program:
        operators = (one for plan in program.tables(_PLANS) for one in plan.tables(_OPERATORS))
        return frozenset(f"{operator.text(0)}.{operator.text(1)}".rstrip(".") for operator in operators)


def called_delegates(path: Path) -> frozenset[str]:
    """Return the ids of the delegates that the methods of a program call, such as "XnnpackBackend".

    Args:
        path: File whose flatbuffer was verified.

    Raises:
        BundleError: As `check_instructions`.
        OSError: If the file cannot be read.
    """
    with _opened(path) as program:
        return frozenset(one.text(0) for plan in program.tables(_PLANS) for one in plan.tables(_DELEGATES))


def method_names(path: Path) -> frozenset[str]:
    """Return the names of the methods of a program, with those that return a constant, such as "get_vocab_size".

    Args:
        path: File whose flatbuffer was verified.

    Raises:
        BundleError: As `check_instructions`.
        OSError: If the file cannot be read.
    """
    with _opened(path) as program:
        return frozenset(plan.text(_NAME) for plan in program.tables(_PLANS))


@contextmanager
def _opened(path: Path) -> Iterator[_Table]:
    """Map a file and yield the table of its program. Damage that is found in the block is a `BundleError`."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            yield _root(_Bytes(data), 0)
        # The last three are raised for offsets outside the file.
        except (ValueError, IndexError, TypeError, struct.error) as error:
            raise BundleError(
                f"{path.name} is damaged or malicious: {error}; download it again, or export the model again"
            ) from None


class _Bytes:
    """Contents of a file, with a limit on the bytes of vectors and names that may be read."""

    def __init__(self, data: Any, whole: _Bytes | None = None) -> None:
        self.data = data
        self._whole = whole or self
        self._left = _READ_FACTOR * len(data) + _MIN_READ

    def spend(self, size: int) -> None:
        """Count bytes that are about to be read.

        Raises:
            ValueError: If the limit is exceeded.
        """
        self._whole._left -= size
        if self._whole._left < 0:
            raise ValueError("its tables share more vectors and names than those of any exported program")

    @contextmanager
    def part(self, start: int) -> Iterator[_Bytes]:
        """Yield the contents from an offset on; positions in them count from there, and the limit is shared."""
        with memoryview(self.data) as view, view[start:] as rest:
            yield _Bytes(rest, self._whole)


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
        _check_range(plan.numbers(_INPUTS), len(values), f"inputs of {name!r}")
        _check_range(plan.numbers(_OUTPUTS), len(values), f"outputs of {name!r}")
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
    """Check the kinds of an instruction's values, whose indices were checked."""
    kind, call = instruction.union(0)
    if call is None:
        return
    if kind == _KERNEL_CALL:
        check_call(operators[call.number(0)], [kinds[index] for index in call.numbers(1)], what)
    elif kind == _DELEGATE_CALL and delegates[call.number(0)] == _XNNPACK:
        _check_kinds(call.numbers(1), kinds, {TENSOR}, what)
    elif kind == _JUMP:
        # A comparison writes its bool to a value that the file stores as a number.
        _check_kinds([call.number(0)], kinds, {TENSOR, BOOL, INT}, what)


def _check_kinds(indices: Any, kinds: list[int], allowed: set[int], what: str) -> None:
    for index in indices:
        if index >= 0 and kinds[index] not in allowed:
            names = " or ".join(NAMES[kind] for kind in sorted(allowed))
            raise ValueError(
                f"value {index} in {what} must be {names}, got {NAMES.get(kinds[index], 'an unknown kind')}"
            )


def _check_payload(segments: list[_Table], processed: _Table | None) -> None:
    """Check the names of weights in XNNPACK's payload, if it is in a segment."""
    if processed is None or processed.number(0, "<b") == 0:
        return
    file = processed.file
    start = struct.unpack_from("<Q", file.data, _SEGMENT_BASE)[0] + segments[processed.number(1)].number(0, "<Q")
    # The flatbuffers library takes positions of 32 bits, and segments of large models begin after 4 GiB.
    with file.part(start) as payload:
        if payload.data[4:8] != _XNNPACK_MAGIC:
            return
        tables = _root(payload, struct.unpack_from("<I", payload.data, _XNNPACK_TABLES)[0])
        for constant in tables.tables(_CONSTANTS):
            constant.text(_CONSTANT_NAME)


def _check_values(values: list[_Table], planned: Sequence[int], name: str) -> list[int]:
    """Check the values of a method, and return the kind of each.

    `planned` has the sizes in bytes of the memory-planned buffers; the first is unused.
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
            _check_range(items, len(values), f"a list of {name!r}", least=least)
            _check_kinds(items, kinds, allowed, f"a list of {name!r}")
        elif kind not in NAMES:
            raise ValueError(f"a value of {name!r} has the unknown kind {kind}")
    return kinds


def _check_tensor(tensor: _Table, planned: Sequence[int], name: str) -> None:
    """Check the sizes of a tensor: the runtime aborts on negative ones, and multiplies without an overflow check."""
    info = tensor.table(_TENSOR_INFO)
    if info is not None:
        info.text(_TENSOR_NAME)
    sizes, dtype = tensor.numbers(_SIZES), tensor.number(_SCALAR_TYPE, "<b")
    if dtype not in _ITEM_SIZES:
        raise ValueError(f"a tensor of {name!r} has the unknown dtype {dtype}")
    if any(size < 0 for size in sizes):
        raise ValueError(f"sizes of a tensor of {name!r} must be at least 0, got {list(sizes)!r:.80}")
    length = math.prod(max(size, 1) for size in sizes) * _ITEM_SIZES[dtype]
    if length > _MAX_BYTES:
        raise ValueError(f"a tensor of {name!r} must have at most {_MAX_BYTES} bytes, got sizes {list(sizes)!r:.80}")
    order = tensor.small_numbers(_DIM_ORDER)
    if order and sorted(order) != list(range(len(sizes))):
        raise ValueError(f"the dim order of a tensor of {name!r} must be a permutation, got {list(order)!r:.80}")
    location = tensor.table(_ALLOCATION)
    if location is not None and 0 not in sizes:
        buffer, offset = location.number(0, "<I"), location.number(1, "<I") + (location.number(2, "<I") << 32)
        # A lower bound, because several elements may share a byte.
        if not 0 < buffer < len(planned) or offset + length > planned[buffer]:
            raise ValueError(f"a tensor of {name!r} at offset {offset} with {length} bytes exceeds its buffer {buffer}")


def _check_instruction(instruction: _Table, sizes: dict[int, int], values: int, instructions: int, what: str) -> None:
    kind, call = instruction.union(0)
    if call is None:
        raise ValueError(f"{what} is empty")
    if kind in sizes:
        _check_range([call.number(0)], sizes[kind], what)
        _check_range(call.numbers(1), values, what)
    elif kind == _MOVE:
        _check_range([call.number(0), call.number(1)], values, what)
    elif kind == _JUMP:
        _check_range([call.number(0)], values, what)
        # The index after the last instruction ends the method.
        _check_range([call.number(1)], instructions + 1, what)
    elif kind == _FREE:
        _check_range([call.number(0)], values, what)
    else:
        raise ValueError(f"{what} has the unknown kind {kind}")


def _check_range(indices: Any, size: int, what: str, least: int = 0) -> None:
    wrong = next((int(index) for index in indices if not least <= index < size), None)
    if wrong is not None:
        raise ValueError(f"{what}: index {wrong} is out of range ({size} entries)")


class _Table:
    """A flatbuffer table; `flatbuffers.Table` finds its fields."""

    def __init__(self, file: _Bytes, table: Any) -> None:
        self.file = file
        self._table = table

    def _at(self, field: int) -> int:
        """Return the offset of a field in the table, or 0 if it is not stored."""
        return self._table.Offset(4 + 2 * field)

    def table(self, field: int) -> _Table | None:
        """Return a field that is a table, or None."""
        at = self._at(field)
        return _table(self.file, self._table.Indirect(at + self._table.Pos)) if at else None

    def tables(self, field: int) -> list[_Table]:
        """Return a vector of tables."""
        return list(self._tables(field))

    def _tables(self, field: int) -> Iterator[_Table]:
        at = self._at(field)
        if at:
            start, count = self._table.Vector(at), self._table.VectorLen(at)
            if start + 4 * count > len(self._table.Bytes):
                raise ValueError(f"a vector of {count} entries exceeds the file")
            self.file.spend(4 * count)
            for index in range(count):
                yield _table(self.file, self._table.Indirect(start + 4 * index))

    def union(self, field: int) -> tuple[int, _Table | None]:
        """Return the kind of a union and its table."""
        at = self._at(field)
        kind = self._table.Bytes[self._table.Pos + at] if at else 0
        return kind, self.table(field + 1) if kind else None

    def number(self, field: int, form: str = "<i") -> int:
        """Return an integer of 32 bits, or of the given `struct` format."""
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
        """Return a string, "" if it is not stored."""
        at = self._at(field)
        if not at:
            return ""
        found = self._table.String(self._table.Pos + at)
        self.file.spend(len(found))
        try:
            return found.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"a name is not UTF-8: {error.object[:40]!r}") from None


def _table(file: _Bytes, position: int) -> _Table:
    from flatbuffers.table import Table

    return _Table(file, Table(file.data, position))


def _root(file: _Bytes, start: int) -> _Table:
    return _table(file, start + struct.unpack_from("<I", file.data, start)[0])
