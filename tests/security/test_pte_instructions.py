"""A changed `.pte` whose instructions or names would end the process is refused."""

from __future__ import annotations

import re
import shutil
import struct
from pathlib import Path

import pytest

from exportable_cache import load
from exportable_cache.backends.executorch.pte import instructions
from exportable_cache.backends.executorch.pte.instructions import (
    BOOL,
    DOUBLE,
    INT,
    INTS,
    NULL,
    STRING,
    TENSOR,
    TENSORS,
    check_call,
    check_instructions,
)
from exportable_cache.common.compat.executorch import runtime
from exportable_cache.errors import BundleError

from ..support.shared_tables import with_one_call_for_all
from .conftest import reseal

pytest.importorskip("executorch")


@pytest.fixture(scope="module")
def program(demo_bundle: Path) -> bytes:
    # Its libraries of kernels bring the schemas of their operators.
    runtime()
    return (demo_bundle / "program.pte").read_bytes()


def _refused(program: bytes | bytearray, folder: Path) -> str:
    path = folder / "program.pte"
    path.write_bytes(program)
    with pytest.raises(BundleError, match=r"program.pte is damaged or malicious: .*download it again") as caught:
        check_instructions(path)
    return str(caught.value)


def _calls(program: bytes, kind: int) -> list[instructions._Table]:
    plans = instructions._root(instructions._Bytes(program), 0).tables(instructions._PLANS)
    chains = [chain for plan in plans for chain in plan.tables(instructions._CHAINS)]
    found = [instruction.union(0) for chain in chains for instruction in chain.tables(instructions._INSTRUCTIONS)]
    return [call for is_kind, call in found if is_kind == kind and call is not None]


def _number_at(call: instructions._Table) -> int:
    return call._table.Pos + call._at(0)


def test_a_whole_one(demo_bundle: Path) -> None:
    check_instructions(demo_bundle / "program.pte")


def test_segments_after_four_gibibytes(program: bytes, tmp_path: Path) -> None:
    """A model of 8B parameters in 4 bits is larger, and positions in its payloads do not fit into 32 bits."""
    (base,) = struct.unpack_from("<Q", program, instructions._SEGMENT_BASE)
    header = bytearray(program[:base])
    struct.pack_into("<Q", header, instructions._SEGMENT_BASE, base + 2**32)
    path = tmp_path / "program.pte"

    def write(segments: bytes) -> None:
        with path.open("wb") as file:
            file.write(header)
            file.seek(base + 2**32)
            file.write(segments)

    write(program[base:])
    check_instructions(path)
    name = re.search(rb"[0-9a-f]{64}", program[base:])
    assert name is not None
    write(program[base : base + name.start()] + b"\xff" + program[base + name.start() + 1 :])
    with pytest.raises(BundleError, match="a name is not UTF-8"):
        check_instructions(path)


@pytest.mark.parametrize("number", [-1, 500, 2**31 - 1])
def test_operators_and_delegates_that_there_are_not(program: bytes, tmp_path: Path, number: int) -> None:
    for kind in (instructions._KERNEL_CALL, instructions._DELEGATE_CALL, instructions._JUMP):
        # One whose number is not 0, which is not stored.
        call = next(call for call in _calls(program, kind) if call._at(0))
        spoiled = bytearray(program)
        struct.pack_into("<i", spoiled, _number_at(call), number if kind != instructions._JUMP else 10**6)
        assert "an instruction of 'forward': index" in _refused(spoiled, tmp_path)


def test_one_list_for_many_instructions(program: bytes, tmp_path: Path) -> None:
    """Some kilobytes that would be read as many megabytes; a hundred times as long, they would be read for days."""
    # Few of them are refused for what they call alone.
    assert "with 5 values, expected" in _refused(with_one_call_for_all(program, 3, 5), tmp_path)
    hostile = with_one_call_for_all(program, 20_000, 20_000)
    assert 16 * len(hostile) < 4 * 20_000 * 20_000
    assert "with 20000 values, expected" in _refused(hostile, tmp_path)
    file = instructions._Bytes(hostile)
    file.spend(16 * len(hostile))
    with pytest.raises(ValueError, match="share more vectors and names"):
        file.spend(1 << 20)


def test_values_that_there_are_not(program: bytes, tmp_path: Path) -> None:
    for kind in (instructions._KERNEL_CALL, instructions._DELEGATE_CALL):
        call = next(call for call in _calls(program, kind) if call.numbers(1))
        spoiled = bytearray(program)
        struct.pack_into("<i", spoiled, call._table.Vector(call._at(1)), 10**6)
        assert "index 1000000 is out of range" in _refused(spoiled, tmp_path)


def test_the_last_value_there_is_and_one_past_it(program: bytes, tmp_path: Path) -> None:
    call = next(call for call in _calls(program, instructions._KERNEL_CALL) if call.numbers(1))
    at = call._table.Vector(call._at(1))
    spoiled = bytearray(program)
    struct.pack_into("<i", spoiled, at, 10**6)
    size = int(re.search(r"index 1000000 is out of range \((\d+)", _refused(spoiled, tmp_path))[1])
    struct.pack_into("<i", spoiled, at, size)
    assert f"index {size} is out of range ({size} entries)" in _refused(spoiled, tmp_path)
    struct.pack_into("<i", spoiled, at, size - 1)
    # It exists, and is of another kind than the kernel takes.
    assert "must be" in _refused(spoiled, tmp_path)


# An operator's; the method's; what XNNPACK calls its weights.
@pytest.mark.parametrize("name", [rb"aten::\w+", rb"forward", rb"[0-9a-f]{64}", rb"XnnpackBackend"])
def test_names_that_are_no_text(program: bytes, tmp_path: Path, name: bytes) -> None:
    places = [match.start() for match in re.finditer(name, program)]
    assert places
    for place in places[:3]:
        spoiled = bytearray(program)
        spoiled[place + 3] = 0xFF
        assert "a name is not UTF-8" in _refused(spoiled, tmp_path)


def test_lists_past_the_end(program: bytes, tmp_path: Path) -> None:
    plans = instructions._root(instructions._Bytes(program), 0)
    spoiled = bytearray(program)
    at = plans._table.Vector(plans._at(instructions._PLANS)) - 4
    struct.pack_into("<I", spoiled, at, 2**31)
    assert "exceeds the file" in _refused(spoiled, tmp_path)


def test_a_bundle_with_one(demo_bundle: Path, program: bytes, tmp_path: Path) -> None:
    """Its tables are whole, so ExecuTorch's own verification lets it through, and the process would end."""
    bundle = Path(shutil.copytree(demo_bundle, tmp_path / "bundle"))
    call = next(call for call in _calls(program, instructions._KERNEL_CALL) if call._at(0))
    spoiled = bytearray(program)
    struct.pack_into("<i", spoiled, _number_at(call), 2**30)
    (bundle / "program.pte").write_bytes(spoiled)
    reseal(bundle)
    with pytest.raises(BundleError, match="index 1073741824 is out of range"):
        load(bundle)


def _plan(program: bytes | bytearray) -> instructions._Table:
    return instructions._root(instructions._Bytes(program), 0).tables(instructions._PLANS)[0]


def _tensors(program: bytes | bytearray) -> list[instructions._Table]:
    held = [value.union(0) for value in _plan(program).tables(instructions._VALUES)]
    return [table for kind, table in held if kind == instructions.TENSOR and table is not None]


def _with_kind(program: bytes, index: int, kind: int) -> bytearray:
    """The program with another kind of a value; what it holds is left."""
    value = _plan(program).tables(instructions._VALUES)[index]
    spoiled = bytearray(program)
    spoiled[value._table.Pos + value._at(0)] = kind
    return spoiled


@pytest.mark.parametrize(
    ("name", "argument", "kind", "wanted"),
    [
        ("aten::embedding", 0, instructions.INT, "must be Tensor, got Int"),
        ("aten::unsqueeze_copy", 1, instructions.BOOL, "must be Int, got Bool"),
        ("aten::view_copy", 1, instructions.TENSOR, "must be IntList, got Tensor"),
        ("llama::custom_sdpa", 5, instructions.INT, "must be Double, got Int"),
        ("executorch_prim::", 0, instructions.NULL, "got Null"),
        ("executorch_prim::et_view", 1, instructions.INT, "must be IntList, got Int"),
    ],
)
def test_values_of_another_kind_than_the_kernel_takes(
    program: bytes, tmp_path: Path, name: str, argument: int, kind: int, wanted: str
) -> None:
    """The kernel would ask the value for what it is not, and the process would end."""
    operators = [f"{one.text(0)}.{one.text(1)}" for one in _plan(program).tables(instructions._OPERATORS)]
    called = _calls(program, instructions._KERNEL_CALL)
    call = next((call for call in called if operators[call.number(0)].startswith(name)), None)
    if call is None:
        pytest.skip(f"the demo's program does not call {name}")
    assert wanted in _refused(_with_kind(program, call.numbers(1)[argument], kind), tmp_path)


def test_a_kernel_called_with_too_few_values(program: bytes, tmp_path: Path) -> None:
    call = next(call for call in _calls(program, instructions._KERNEL_CALL) if len(call.numbers(1)) > 3)
    spoiled = bytearray(program)
    at = call._table.Vector(call._at(1)) - 4
    struct.pack_into("<I", spoiled, at, len(call.numbers(1)) - 1)
    assert re.search(r"with \d+ values, expected \d+", _refused(spoiled, tmp_path))


@pytest.mark.parametrize(
    ("size", "said"), [(-294967296, "must be at least 0"), (2**31 - 1, "exceeds its buffer|must have at most")]
)
def test_sizes_that_no_tensor_has(program: bytes, tmp_path: Path, size: int, said: str) -> None:
    tensor = next(
        one for one in _tensors(program) if one.numbers(instructions._SIZES) and one.table(instructions._ALLOCATION)
    )
    spoiled = bytearray(program)
    struct.pack_into("<i", spoiled, tensor._table.Vector(tensor._at(instructions._SIZES)), size)
    assert re.search(said, _refused(spoiled, tmp_path))


def test_a_tensor_past_the_end_of_its_buffer_and_one_of_no_dtype(program: bytes, tmp_path: Path) -> None:
    place = next(found for one in _tensors(program) if (found := one.table(instructions._ALLOCATION)) and found._at(1))
    spoiled = bytearray(program)
    struct.pack_into("<I", spoiled, place._table.Pos + place._at(1), 2**31)
    assert "exceeds its buffer" in _refused(spoiled, tmp_path)
    tensor = next(one for one in _tensors(program) if one._at(instructions._SCALAR_TYPE))
    spoiled = bytearray(program)
    spoiled[tensor._table.Pos + tensor._at(instructions._SCALAR_TYPE)] = 99
    assert "has the unknown dtype 99" in _refused(spoiled, tmp_path)


def test_a_list_of_ints_that_names_tensors(program: bytes, tmp_path: Path) -> None:
    values = _plan(program).tables(instructions._VALUES)
    held = [value.union(0) for value in values]
    tensor = next(index for index, (kind, _) in enumerate(held) if kind == instructions.TENSOR)
    ints = next(table for kind, table in held if kind == instructions.INTS and table.wide_numbers(0))
    for index, said in ((tensor, "must be Int, got Tensor"), (10**6, "index 1000000 is out of range")):
        spoiled = bytearray(program)
        struct.pack_into("<q", spoiled, ints._table.Vector(ints._at(0)), index)
        assert said in _refused(spoiled, tmp_path)


@pytest.mark.parametrize(
    ("operator", "kinds"),
    [
        # Several results, and results that the schema does not declare, are one list.
        ("aten::native_layer_norm.out", (TENSOR, INTS, TENSOR, NULL, DOUBLE, TENSOR, TENSOR, TENSOR, TENSORS)),
        ("aten::split_with_sizes_copy.out", (TENSOR, INTS, INT, TENSORS, TENSORS)),
        ("aten::topk.values", (TENSOR, INT, INT, BOOL, BOOL, TENSOR, TENSOR, TENSORS)),
        ("aten::add.out", (TENSOR, TENSOR, DOUBLE, TENSOR, TENSOR)),
    ],
)
def test_results_of_every_form_are_taken_and_others_are_not(operator: str, kinds: tuple[int, ...]) -> None:
    check_call(operator, kinds, "an instruction of 'forward'")
    with pytest.raises(
        ValueError, match=f"calls {re.escape(operator)} with {len(kinds) - 1} values, expected {len(kinds)}"
    ):
        check_call(operator, kinds[:-1], "an instruction of 'forward'")
    with pytest.raises(ValueError, match="must be .*, got String"):
        check_call(operator, (*kinds[:-1], STRING), "an instruction of 'forward'")
