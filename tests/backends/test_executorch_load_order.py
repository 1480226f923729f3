"""What a `.pte` takes while it is loaded: the head is packed first, and the table's pages are not held."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ..support.memory import of_file
from ..support.models import tiny_model
from ..support.sessions import exported_bundle

pytest.importorskip("executorch", reason="the executorch extra is not installed")

from exportable_cache.backends.executorch.pte.rewrite import make_largest_first, reorder
from exportable_cache.common.compat.executorch import delegate_calls, extended_header, flat_program, load_program

VOCAB, HIDDEN = 4096, 64
TABLE = VOCAB * HIDDEN * 4


@pytest.fixture(scope="module")
def path() -> Path:
    """One method, with a head of its own."""
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 1}
    model = tiny_model("llama", **sizes, tie_word_embeddings=False)
    return exported_bundle(model, "executorch", 64, verify=False) / "program.pte"


def _plan(data: bytes | bytearray) -> Any:
    program = flat_program(data)
    plans = [program.ExecutionPlan(index) for index in range(program.ExecutionPlanLength())]
    return next(plan for plan in plans if plan.Name() == b"forward")


def _payloads(data: bytes) -> list[bytes]:
    """What each delegate is made from, in the order in which they are made."""
    base, program, plan = extended_header(data[:64]).segment_base_offset, flat_program(data), _plan(data)
    found = []
    for index in range(plan.DelegatesLength()):
        segment = program.Segments(plan.Delegates(index).Processed().Index())
        found.append(data[base + segment.Offset() : base + segment.Offset() + segment.Size()])
    return found


def _weights(data: bytes) -> list[int]:
    """Bytes that each payload names."""
    program = flat_program(data)
    named = [program.NamedData(index) for index in range(program.NamedDataLength())]
    sizes = {entry.Key(): program.Segments(entry.SegmentIndex()).Size() for entry in named}
    return [sum(size for key, size in sizes.items() if key in payload) for payload in _payloads(data)]


def _called(data: bytes) -> list[bytes]:
    """Payloads in the order of the calls."""
    payloads = _payloads(data)
    return [payloads[call.DelegateIndex()] for call in delegate_calls(_plan(data))]


def _logits(path: Path) -> torch.Tensor:
    method = load_program(path).load_method("forward")
    return method([torch.arange(9)[None], torch.zeros(1, dtype=torch.long)])[0].clone()


def test_the_head_is_made_first_but_for_the_first_call(path: Path) -> None:
    weights = _weights(path.read_bytes())
    # With what its delegate has of the last layer.
    assert TABLE < weights[1] == max(weights) < 1.1 * TABLE
    assert weights[1:] == sorted(weights[1:], reverse=True)


def test_any_order_runs_the_same(path: Path, tmp_path: Path) -> None:
    turned = Path(shutil.copy(path, tmp_path))
    whole = path.read_bytes()
    data = bytearray(whole)
    # But for the first, whose number is not stored.
    reorder(data, _plan(data), [0, *range(len(_weights(whole)) - 1, 0, -1)])
    turned.write_bytes(data)
    assert _weights(bytes(data))[-1] == max(_weights(whole)) and _called(bytes(data)) == _called(whole)
    make_largest_first(turned)
    assert _weights(turned.read_bytes()) == _weights(whole) and _called(turned.read_bytes()) == _called(whole)
    assert torch.equal(_logits(turned), _logits(path))


@pytest.mark.skipif(sys.platform != "linux", reason="pages are counted by Linux")
def test_the_table_is_not_held(path: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copy(path, tmp_path))
    program = load_program(copied)
    assert of_file(copied, "Size") > TABLE > 4 * of_file(copied, "Rss")
    assert program.load_method("forward") is not None and of_file(copied, "Locked") == 0
