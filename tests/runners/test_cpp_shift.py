"""The C++ session drops old tokens as the Python session does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exportable_cache import export, load
from exportable_cache.decoding import Completer, CompletionOptions

from ..support.models import tiny_model, tokens
from .conftest import TOLERANCE, Probe, ids

SLOTS, PROTECTED = 40, 4


@pytest.mark.full
def test_logits_after_shifts_are_the_sessions(tmp_path: Path, probe: Probe) -> None:
    """Check a full layer and a ring over several shifts, a pending room, and refused numbers."""
    bundle = export(tiny_model("gemma3_text"), "executorch", SLOTS, tmp_path / "x", verify=False, shift=True).path
    given, session = tokens(120)[0], load(bundle)
    commands: list[tuple[object, ...]] = [("prefill", ids(given[:SLOTS]))]
    expected = [session.prefill(given[None, :SLOTS])]
    at = SLOTS
    for count in (5, 11, 28, 28):
        commands += [("shift", count, PROTECTED), ("prefill", ids(given[at : at + count]))]
        session.shift(count, PROTECTED)
        expected += [None, session.prefill(given[None, at : at + count])]
        at += count
    refused = [("shift", 30, PROTECTED), ("shift", 0, 0), ("shift", 1, -1), ("shift", 1, SLOTS + 1), ("length",)]
    replies = probe(("open", bundle), *commands, *refused)[1:]
    for reply, logits in zip(replies, expected, strict=False):
        assert reply.ok, reply
        if logits is not None:
            assert torch.allclose(torch.tensor(reply.numbers()), logits[0], atol=TOLERANCE, rtol=0)
    assert [reply.ok for reply in replies[-5:]] == [False, False, False, False, True]
    assert "count must be at most" in replies[-5].values[1]
    assert replies[-1].values == [str(SLOTS), "0"]


@pytest.mark.full
def test_a_long_generation_shifts_as_a_completer_does(tmp_path: Path, probe: Probe) -> None:
    """Compare 1,000 tokens of a cache of 128 slots, with end tokens made unlikely, and a prompt that needs room."""
    bundle = export("demo", "executorch", 128, tmp_path / "x", verify=False, shift=True).path
    session = load(bundle)
    completer = Completer(session)
    completer.use("shift", protected=PROTECTED)
    prompt, bias = tokens(40)[0].tolist(), dict.fromkeys(completer.end_tokens, -100.0)
    options = CompletionOptions(max_new_tokens=1000, logit_bias=bias, frequency_penalty=0.5)
    expected = [piece.token for piece in completer.complete(prompt, options)]
    fields = ["shift_when_full=1", f"protected={PROTECTED}", "frequency_penalty=0.5"]
    fields += [f"bias={token}:{value}" for token, value in bias.items()]
    replies = probe(
        ("open", bundle), ("generate", ids(prompt), "max_new_tokens=1000", *fields), ("length",),
        ("generate", ids(prompt), "max_new_tokens=5", *fields), ("generate", ids(prompt), "max_new_tokens=200"),
        ("generate", ids(prompt), "shift_when_full=1", "protected=65"),
    )[1:]  # fmt: skip
    assert len(expected) == 1000 and replies[0].tokens() == expected
    assert int(replies[1].values[0]) <= 128
    assert replies[2].ok and not replies[3].ok and not replies[4].ok
    assert "protected_tokens must be from 0 to 64" in replies[4].values[1]


def test_a_bundle_without_the_method_says_so(demo_bundle: Path, probe: Probe) -> None:
    """Check the message for a program that was exported without it."""
    reply = probe(("open", demo_bundle), ("prefill", "5 6 7"), ("shift", 1, 0))[-1]
    assert not reply.ok and reply.values[0] == "bundle"
    assert "has no method shift, which drops old tokens; export the model with shift=True" in reply.values[1]
    reply = probe(("open", demo_bundle), ("generate", "5 6 7", "shift_when_full=1"))[-1]
    assert not reply.ok and "export the model with shift=True" in reply.values[1]
