"""What the C++ session saves and loads, and how a generation is ended from outside."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from exportable_cache import load

from .conftest import TOLERANCE, Probe, ids
from .test_cpp import VOCAB, prompt_of

# Past the window of 16, and a good deal less than the 512 that the full layers hold.
HELD = 70


@pytest.fixture(scope="module")
def state(demo_bundle: Path, probe: Probe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a session that holds `prompt_of(HELD)`."""
    path = tmp_path_factory.mktemp("state") / "prefix.state"
    assert all(reply.ok for reply in probe(("open", demo_bundle), ("prefill", ids(prompt_of(HELD))), ("save", path)))
    return path


def test_another_process_goes_on_from_a_saved_state(demo_bundle, probe: Probe, state: Path) -> None:
    session = load(demo_bundle)
    session.prefill(torch.tensor([prompt_of(HELD)]))
    expected = [session.decode(torch.tensor([token])) for token in range(30, 50)]
    # What the loading session held before is gone.
    commands = [("prefill", ids(prompt_of(200, seed=8))), ("load", state), ("length",)]
    replies = probe(("open", demo_bundle), *commands, *(("decode", token) for token in range(30, 50)))[2:]
    assert replies[0].ok and replies[1].tokens() == [HELD]
    for reply, logits in zip(replies[2:], expected, strict=True):
        assert (torch.tensor(reply.numbers()) - logits[0]).abs().max() <= TOLERANCE
    assert not list(state.parent.glob("*.part"))


def test_a_state_is_as_large_as_what_is_filled(demo_bundle, probe: Probe, state: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole.state"
    probe(("open", demo_bundle), ("prefill", ids(prompt_of(500))), ("save", whole))
    assert state.stat().st_size < whole.stat().st_size / 2


def test_the_newest_token_and_the_limits_are_kept(demo_bundle, probe: Probe, tmp_path: Path) -> None:
    path = tmp_path / "talk.state"
    text = b"the code of amber is 4821. it took about 12 days. amber?".hex()
    begun = probe(
        ("open", demo_bundle), ("text", text, "max_new_tokens=2"), ("save", path), ("text", "", "max_new_tokens=3")
    )
    gone_on = probe(("open", demo_bundle), ("load", path), ("text", "", "max_new_tokens=3"), ("rewind", 10))
    assert gone_on[2].tokens() == begun[3].tokens()
    assert not gone_on[3].ok and "sliding window" in gone_on[3].values[1]


#: What is wrong with a file: edit of a good one -> what is said.
EDITS: list[tuple[Callable[[bytes], bytes], str]] = [
    (lambda state: state[:100], "it ends early"),
    (lambda state: state[:-3], "it ends early"),
    (lambda state: state + b"x", "its checksum does not match"),
    (lambda state: state + bytes(2**22), "it is larger than the cache"),
    (lambda state: b"PK" + state[2:], "it is not a state of this version"),
    (lambda state: state[:4000] + bytes([state[4000] ^ 1]) + state[4001:], "its checksum does not match"),
    (lambda state: state[:104] + struct.pack("<Q", 2**60) + state[112:], "it ends early"),
    (lambda state: state[:112] + struct.pack("<Q", 2**60) + state[120:], "it ends early"),
    (lambda state: state[:120] + struct.pack("<Q", 2**63) + state[128:], "a run lies outside the cache"),
    (lambda state: sealed(state[:72] + struct.pack("<q", 600) + state[80:]), "its lengths are invalid"),
    (lambda state: sealed(state[:80] + struct.pack("<q", 2**40) + state[88:]), "its lengths are invalid"),
    (lambda state: sealed(state[:88] + struct.pack("<q", VOCAB) + state[96:]), "its lengths are invalid"),
    (lambda state: sealed(state[:8] + b"0" * 64 + state[72:]), "is the state of another program"),
]


def test_a_file_that_is_no_state_of_this_program_changes_nothing(
    demo_bundle, probe: Probe, state: Path, tmp_path: Path
) -> None:
    good, commands = state.read_bytes(), []
    for index, (edit, _) in enumerate(EDITS):
        path = tmp_path / f"{index}.state"
        path.write_bytes(edit(good))
        commands.append(("load", path))
    prompt = ids(prompt_of(30, seed=4))
    _, _, *refused, after, length = probe(
        ("open", demo_bundle), ("prefill", prompt), *commands, ("decode", 7), ("length",)
    )
    for reply, (_, message) in zip(refused, EDITS, strict=True):
        assert not reply.ok and message in reply.values[1], (message, reply)
    unharmed = probe(("open", demo_bundle), ("prefill", prompt), ("decode", 7))[2]
    assert after.numbers() == unharmed.numbers() and length.tokens() == [31]


def sealed(state: bytes) -> bytes:
    """The same with a checksum that fits: what is refused then is what it says."""

    def add(value: int, data: bytes) -> int:
        whole = len(data) - len(data) % 8
        for (word,) in struct.iter_unpack("<Q", data[:whole]):
            value = (value ^ word) * 0x100000001B3 % 2**64
        for byte in data[whole:]:
            value = (value ^ byte) * 0x100000001B3 % 2**64
        return value

    images = 120 + 24 * struct.unpack_from("<Q", state, 112)[0]
    value, at = add(add(0xCBF29CE484222325, state[:120]), state[120:images]), images
    for _ in range(struct.unpack_from("<Q", state, 104)[0]):
        (size,) = struct.unpack_from("<Q", state, at + 8)
        value = add(add(value, state[at : at + 16]), state[at + 16 : at + 16 + size])
        at += 16 + size
    return state[:-8] + struct.pack("<Q", value)


def test_files_that_cannot_be_are_refused(demo_bundle, probe: Probe, tmp_path: Path) -> None:
    _, read, folder, written = probe(
        ("open", demo_bundle), ("load", tmp_path / "none"), ("load", tmp_path), ("save", tmp_path / "no" / "where"),
    )  # fmt: skip
    assert not read.ok and "cannot read" in read.values[1]
    assert not folder.ok and "it is not a regular file" in folder.values[1]
    assert not written.ok and "cannot write" in written.values[1]
    # What is no file is not replaced by one.
    queue = tmp_path / "queue"
    os.mkfifo(queue)
    _, queued = probe(("open", demo_bundle), ("save", queue))
    assert not queued.ok and "it is not a regular file, and would be replaced" in queued.values[1] and queue.is_fifo()


def test_a_generation_is_cancelled_between_steps(demo_bundle, probe: Probe) -> None:
    prompt = ids(prompt_of(20, seed=1))
    whole, _, cancelled, length, again = probe(
        ("open", demo_bundle), ("generate", prompt, "max_new_tokens=12"), ("reset",),
        ("cancelled", prompt, 4, "max_new_tokens=12"), ("length",), ("generate", "5", "max_new_tokens=2"),
    )[1:]  # fmt: skip
    assert cancelled.tokens() == whole.tokens()[:4] and cancelled.values[1] == "cancelled"
    # The newest token was not fed; the next generation is not cancelled.
    assert length.tokens() == [23]
    assert len(again.tokens()) == 2 and again.values[1] == "max_new_tokens"
