"""A damaged or hostile `program.pte` is refused by the C++ session with a sentence, as in Python."""

from __future__ import annotations

import re
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from exportable_cache.backends.executorch.pte import instructions

from ..security.conftest import reseal
from ..support.shared_tables import with_one_call_for_all
from .conftest import Probe
from .test_cpp_items import bundle_of

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def whole() -> bytes:
    pytest.importorskip("executorch", reason="the executorch extra is not installed")
    return (bundle_of("llava") / "program.pte").read_bytes()


def _spoiled(program: bytes, at: int, form: str, value: int) -> bytes:
    spoiled = bytearray(program)
    struct.pack_into(form, spoiled, at, value)
    return bytes(spoiled)


def _calls(program: bytes, kind: int) -> Iterator[instructions._Table]:
    for plan in instructions._root(instructions._Bytes(program), 0).tables(instructions._PLANS):
        for chain in plan.tables(instructions._CHAINS):
            for instruction in chain.tables(instructions._INSTRUCTIONS):
                found, call = instruction.union(0)
                if found == kind and call is not None:
                    yield call


def _operator_that_there_is_not(program: bytes) -> bytes:
    call = next(call for call in _calls(program, instructions._KERNEL_CALL) if call._at(0))
    return _spoiled(program, call._table.Pos + call._at(0), "<i", 2**30)


def _delegate_that_there_is_not(program: bytes) -> bytes:
    call = next(call for call in _calls(program, instructions._DELEGATE_CALL) if call._at(0))
    return _spoiled(program, call._table.Pos + call._at(0), "<i", -1)


def _value_that_there_is_not(program: bytes) -> bytes:
    call = next(call for call in _calls(program, instructions._KERNEL_CALL) if call.numbers(1))
    return _spoiled(program, call._table.Vector(call._at(1)), "<i", 10**6)


def _named(pattern: bytes) -> Callable[[bytes], bytes]:
    return lambda program: _spoiled(program, re.search(pattern, program).start() + 3, "B", 0xFF)


def _segment_that_there_is_not(program: bytes) -> bytes:
    for plan in instructions._root(instructions._Bytes(program), 0).tables(instructions._PLANS):
        for delegate in plan.tables(instructions._DELEGATES):
            processed = delegate.table(instructions._PROCESSED)
            if processed._at(1):
                return _spoiled(program, processed._table.Pos + processed._at(1), "<I", 10**6)
    raise AssertionError("no delegate names a segment")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_operator_that_there_is_not, "index 1073741824 is out of range"),
        (_delegate_that_there_is_not, "index -1 is out of range"),
        (_value_that_there_is_not, "index 1000000 is out of range"),
        (_named(rb"aten::\w+"), "a name is not valid UTF-8"),
        (_named(rb"[0-9a-f]{64}"), "a name is not valid UTF-8"),
        (_named(rb"XnnpackBackend"), "a name is not valid UTF-8"),
        (_segment_that_there_is_not, "a payload is in segment 1000000"),
    ],
)
def test_what_ends_the_process_is_refused(probe: Probe, whole: bytes, tmp_path: Path, spoil, message: str) -> None:
    bundle = Path(shutil.copytree(bundle_of("llava"), tmp_path / "bundle"))
    (bundle / "program.pte").write_bytes(spoil(whole))
    (reply,) = probe(("open", bundle))
    assert not reply.ok and reply.values[0] == "bundle", reply
    assert "program.pte is damaged, or made to do harm" in reply.values[1] and message in reply.values[1]


def test_tables_that_share_a_long_list_are_refused(probe: Probe, whole: bytes, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(bundle_of("llava"), tmp_path / "bundle"))
    (bundle / "program.pte").write_bytes(with_one_call_for_all(whole, 20_000, 100_000))
    reseal(bundle)
    (reply,) = probe(("open", bundle))
    assert not reply.ok and reply.values[0] == "bundle", reply
    assert "share more lists and names than any program's" in reply.values[1]


def test_tables_that_are_cut_are_refused(probe: Probe, whole: bytes, tmp_path: Path) -> None:
    """By ExecuTorch's own verification, or here."""
    root = instructions._root(instructions._Bytes(whole), 0)
    at = root._table.Vector(root._at(instructions._PLANS)) - 4
    for index, spoiled in enumerate(
        [_spoiled(whole, at, "<I", 2**31), _spoiled(whole, 0, "<I", 2**31), whole[:2000] + bytes(len(whole) - 2000)]
    ):
        bundle = Path(shutil.copytree(bundle_of("llava"), tmp_path / str(index)))
        (bundle / "program.pte").write_bytes(spoiled)
        (reply,) = probe(("open", bundle))
        assert not reply.ok and reply.values[0] == "bundle", reply
