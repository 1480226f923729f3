"""Encoder-decoders in the C++ session: text and sound go through the encoder, and the decoder answers as in Python."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy
import pytest
import torch

from exportable_cache import load

from ..support.models import tokens
from ..support.seq2seq import encoder_inputs, tiny_seq2seq
from ..support.sessions import exported_bundle
from .conftest import TOLERANCE, Probe, Program, ids

pytestmark = pytest.mark.full

CAPACITY, LONGEST = 24, 32


def bundle_of(family: str) -> Path:
    sizes = {"max_encoder_len": LONGEST} if family == "t5" else {}
    return exported_bundle(tiny_seq2seq(family), "executorch", CAPACITY, prefill_chunk=8, verify=False, **sizes)


def command_of(inputs: dict[str, torch.Tensor]) -> tuple[str, str]:
    """How the probe is given an encoder's input."""
    if "input_ids" in inputs:
        return ("encode_ids", ids(inputs["input_ids"][0]))
    (values,) = inputs.values()
    return ("encode_numbers", " ".join(map(repr, values.flatten().tolist())))


# The tiny Whisper takes 24 frames, neither fewer nor more.
@pytest.mark.parametrize(("family", "lengths"), [("t5", (11, LONGEST, 1)), ("whisper", (24, 24))])
def test_the_decoder_answers_as_in_python(probe: Probe, family: str, lengths: tuple[int, ...]) -> None:
    bundle = bundle_of(family)
    session, model = load(bundle), tiny_seq2seq(family)
    commands: list[tuple[object, ...]] = [("open", bundle)]
    expected: list[torch.Tensor | None] = [None]
    decoded = tokens(14)[0].tolist()
    for seed, length in enumerate(lengths):
        inputs = encoder_inputs(model, length, seed=seed)
        session.encode(**inputs)
        commands += [command_of(inputs), ("prefill", ids(decoded[:3])), *(("decode", token) for token in decoded[3:])]
        expected += [None, session.prefill(torch.tensor([decoded[:3]]))]
        expected += [session.decode(torch.tensor([token])) for token in decoded[3:]]
    # The same input anew, its first step a single token.
    session.reset()
    commands += [("reset",), ("decode", 5), ("decode", 6)]
    expected += [None, *(session.decode(torch.tensor([token])) for token in (5, 6))]
    for reply, logits in zip(probe(*commands), expected, strict=True):
        assert reply.ok, reply
        if logits is not None:
            assert (torch.tensor(reply.numbers()) - logits[0]).abs().max() <= TOLERANCE


def test_what_an_encoder_does_not_take_is_refused(probe: Probe) -> None:
    replies = probe(
        ("open", bundle_of("t5")), ("prefill", "5"), ("encode_ids", ids([5] * (LONGEST + 1))), ("encode_ids", ""),
        ("encode_numbers", "1 2"), ("encode_ids", "5 6"), ("prefill", "5"),
    )[1:]  # fmt: skip
    said = ["nothing was encoded yet", f"at most {LONGEST} tokens, got {LONGEST + 1}", "the prompt is empty",
            "takes token ids, not numbers"]  # fmt: skip
    for reply, message in zip(replies, said):
        assert not reply.ok and message in reply.values[1], reply
    assert replies[4].ok and replies[5].ok
    sound = probe(("open", bundle_of("whisper")), ("encode_ids", "5"), ("encode_numbers", "1 2 3"))[1:]
    assert "takes numbers, not token ids" in sound[0].values[1]
    assert "input_features [1, 8, 24]" in sound[1].values[1] and "got 3 numbers" in sound[1].values[1]


def test_a_state_without_its_input_is_refused_where_each_step_needs_that(probe: Probe, tmp_path: Path) -> None:
    """Of a manifest that has no step but those that take what the encoder gave."""
    bundle, state = tmp_path / "bundle", tmp_path / "t5.state"
    shutil.copytree(bundle_of("t5"), bundle)
    manifest = json.loads((bundle / "manifest.json").read_text())
    del manifest["program"]["methods"]["decode"]
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    begun = probe(("open", bundle), ("encode_ids", "5 6"), ("prefill", "5"), ("save", state))
    assert all(reply.ok for reply in begun)
    reply = probe(("open", bundle), ("load", state), ("decode", 6))[2]
    assert not reply.ok and "nothing was encoded yet" in reply.values[1]


def test_the_program_takes_sound_from_a_file(program: Program, tmp_path: Path) -> None:
    bundle = bundle_of("whisper")
    inputs = encoder_inputs(tiny_seq2seq("whisper"), 24)
    path = tmp_path / "sound.f32"
    inputs["input_features"].numpy().astype(numpy.float32).tofile(path)
    session = load(bundle)
    session.encode(**inputs)
    expected = list(session.generate(torch.tensor([[5]]), 6))
    command = [
        *program("exportable_cache_generate"),
        bundle,
        "--encode-file",
        path,
        "--tokens",
        "5",
        "--max-new-tokens",
        "6",
    ]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [int(token) for token in done.stdout.split()] == expected
