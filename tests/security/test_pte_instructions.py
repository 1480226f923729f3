"""A changed `.pte` whose instructions or names would end the process is refused."""

from __future__ import annotations

import re
import shutil
import struct
from pathlib import Path

import pytest

from exportable_cache import load
from exportable_cache.backends.executorch import instructions
from exportable_cache.backends.executorch.instructions import check_instructions
from exportable_cache.errors import BundleError

from ..support.shared_tables import with_one_call_for_all
from .conftest import reseal

pytest.importorskip("executorch")


@pytest.fixture(scope="module")
def program(demo_bundle: Path) -> bytes:
    return (demo_bundle / "program.pte").read_bytes()


def _refused(program: bytes | bytearray, folder: Path) -> str:
    path = folder / "program.pte"
    path.write_bytes(program)
    with pytest.raises(BundleError, match=r"program.pte is damaged, or made to do harm: .*get it again") as caught:
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


@pytest.mark.parametrize("number", [-1, 500, 2**31 - 1])
def test_operators_and_delegates_that_there_are_not(program: bytes, tmp_path: Path, number: int) -> None:
    for kind in (instructions._KERNEL_CALL, instructions._DELEGATE_CALL, instructions._JUMP):
        # One whose number is not 0, which is not stored.
        call = next(call for call in _calls(program, kind) if call._at(0))
        spoiled = bytearray(program)
        struct.pack_into("<i", spoiled, _number_at(call), number if kind != instructions._JUMP else 10**6)
        assert "an instruction of 'forward' names number" in _refused(spoiled, tmp_path)


def test_one_list_for_many_instructions(program: bytes, tmp_path: Path) -> None:
    """Some kilobytes that would be read as many megabytes; a hundred times as long, they would be read for days."""
    path = tmp_path / "few.pte"
    path.write_bytes(with_one_call_for_all(program, 3, 5))
    check_instructions(path)
    hostile = with_one_call_for_all(program, 20_000, 20_000)
    assert 16 * len(hostile) < 4 * 20_000 * 20_000
    assert "share more lists and names" in _refused(hostile, tmp_path)


def test_values_that_there_are_not(program: bytes, tmp_path: Path) -> None:
    for kind in (instructions._KERNEL_CALL, instructions._DELEGATE_CALL):
        call = next(call for call in _calls(program, kind) if call.numbers(1))
        spoiled = bytearray(program)
        struct.pack_into("<i", spoiled, call._table.Vector(call._at(1)), 10**6)
        assert "names number 1000000 of" in _refused(spoiled, tmp_path)


def test_the_last_value_there_is_and_one_past_it(program: bytes, tmp_path: Path) -> None:
    call = next(call for call in _calls(program, instructions._KERNEL_CALL) if call.numbers(1))
    at = call._table.Vector(call._at(1))
    spoiled = bytearray(program)
    struct.pack_into("<i", spoiled, at, 10**6)
    size = int(re.search(r"names number 1000000 of (\d+)", _refused(spoiled, tmp_path))[1])
    struct.pack_into("<i", spoiled, at, size)
    assert f"names number {size} of {size}" in _refused(spoiled, tmp_path)
    struct.pack_into("<i", spoiled, at, size - 1)
    (tmp_path / "program.pte").write_bytes(spoiled)
    check_instructions(tmp_path / "program.pte")


# An operator's; the method's; what XNNPACK calls its weights.
@pytest.mark.parametrize("name", [rb"aten::\w+", rb"forward", rb"[0-9a-f]{64}", rb"XnnpackBackend"])
def test_names_that_are_no_text(program: bytes, tmp_path: Path, name: bytes) -> None:
    places = [match.start() for match in re.finditer(name, program)]
    assert places
    for place in places[:3]:
        spoiled = bytearray(program)
        spoiled[place + 3] = 0xFF
        assert "a name is no UTF-8" in _refused(spoiled, tmp_path)


def test_lists_past_the_end(program: bytes, tmp_path: Path) -> None:
    plans = instructions._root(instructions._Bytes(program), 0)
    spoiled = bytearray(program)
    at = plans._table.Vector(plans._at(instructions._PLANS)) - 4
    struct.pack_into("<I", spoiled, at, 2**31)
    assert "goes past the end" in _refused(spoiled, tmp_path)


def test_a_bundle_with_one(demo_bundle: Path, program: bytes, tmp_path: Path) -> None:
    """Its tables are whole, so ExecuTorch's own verification lets it through, and the process would end."""
    bundle = Path(shutil.copytree(demo_bundle, tmp_path / "bundle"))
    call = next(call for call in _calls(program, instructions._KERNEL_CALL) if call._at(0))
    spoiled = bytearray(program)
    struct.pack_into("<i", spoiled, _number_at(call), 2**30)
    (bundle / "program.pte").write_bytes(spoiled)
    reseal(bundle)
    with pytest.raises(BundleError, match="names number 1073741824 of"):
        load(bundle)
