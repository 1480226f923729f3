"""Images and sound in the C++ session: what a processor gives takes its places in the prompt, as in Python."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from exportable_cache import load

from ..support.models import tokens
from ..support.multimodal import FAMILIES, PLACEHOLDER, prompt, tiny_multimodal
from ..support.sessions import exported_bundle
from .conftest import TOLERANCE, Probe, Program, ids
from .test_cpp_bundle import edited
from .test_cpp_state import sealed

pytestmark = pytest.mark.full

CAPACITY, STEPS = 96, 6
#: What a processor gives beside what the programs take.
_BESIDE = {"input_ids", "token_type_ids", "mm_token_type_ids"}
#: Families whose steps take rotary positions of several axes, or which image a token is of.
PLACED = ("gemma3", "qwen2_5_vl")


def bundle_of(family: str) -> Path:
    kind, _, options = FAMILIES[family]
    sizes = {"modalities": [kind], "prefill_chunk": 16, **options}
    return exported_bundle(tiny_multimodal(family), "executorch", CAPACITY, verify=False, **sizes)


def added(inputs: dict[str, torch.Tensor]) -> list[tuple[str, ...]]:
    """How the probe is given what a processor gave."""
    return [add(name, tensor) for name, tensor in inputs.items() if name not in _BESIDE]


def add(name: str, tensor: torch.Tensor) -> tuple[str, ...]:
    kind = "float32" if tensor.is_floating_point() else "int64"
    return ("add", name, kind, ids(tensor.shape), " ".join(map(repr, tensor.flatten().tolist())))


def conversation(family: str) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """A prompt with two items, and the same in pieces: each item with text around it, and text by ids between."""
    _, per_item, _ = FAMILIES[family]
    whole = prompt(tiny_multimodal(family), 2, 20, per_item, start=3, apart=6)
    tensors = {name: whole[name] for name in whole if name not in _BESIDE}
    row = whole["input_ids"]
    cuts = [0, 5 + per_item, 8 + per_item, row.shape[1]]
    first, text, second = ({"input_ids": row[:, start:end]} for start, end in zip(cuts, cuts[1:]))
    for index, turn in enumerate((first, second)):
        turn |= {name: tensor.chunk(2)[index] for name, tensor in tensors.items()}
    return whole, [first, text, second]


def check_equal(replies: list, expected: list[torch.Tensor | None]) -> None:
    for reply, logits in zip(replies, expected, strict=True):
        assert reply.ok, reply
        if logits is not None:
            assert (torch.tensor(reply.numbers()) - logits[0]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("family", ["llava", "voxtral", "gemma3", "qwen2_5_vl", "qwen3_vl"])
def test_what_is_seen_or_heard_answers_as_in_python(probe: Probe, family: str) -> None:
    """One item and two, at the start and amid text, in prompts of one chunk and of more."""
    bundle, model = bundle_of(family), tiny_multimodal(family)
    session = load(bundle)
    commands: list[tuple[object, ...]] = [("open", bundle)]
    expected: list[torch.Tensor | None] = [None]
    for items, length, start in ((1, 5, 0), (1, 14, 9), (2, 30, 2)):
        inputs = prompt(model, items, length, FAMILIES[family][1], seed=items + length, start=start, apart=5)
        following = tokens(STEPS, seed=items).clamp(max=100)
        session.reset()
        given = added(inputs)
        commands += [("reset",), *given, ("prefill", ids(inputs["input_ids"][0]))]
        expected += [None, *(None for _ in given), session.prefill(**inputs)]
        # Of several tokens, then of one at a time.
        commands += [("prefill", ids(following[0, :3])), *(("decode", int(token)) for token in following[0, 3:])]
        expected += [session.prefill(following[:, :3]), *(session.decode(token[None]) for token in following[0, 3:])]
    check_equal(probe(*commands), expected)


@pytest.mark.parametrize("family", ["llava", *PLACED])
def test_a_conversation_goes_on_from_what_it_holds(probe: Probe, tmp_path: Path, family: str) -> None:
    """An image, text by ids, a second image: at once, in turns, and by another process from a saved state."""
    bundle, (whole, turns) = bundle_of(family), conversation(family)
    session, state = load(bundle), tmp_path / "talk.state"
    following = tokens(4, seed=5).clamp(max=100)[0].tolist()
    last = [session.prefill(**whole), *(session.decode(torch.tensor([token])) for token in following)]
    steps = [("decode", token) for token in following]
    at_once = probe(("open", bundle), *added(whole), ("prefill", ids(whole["input_ids"][0])), *steps)
    check_equal(at_once[-5:], last)
    fed = [command for turn in turns for command in (*added(turn), ("prefill", ids(turn["input_ids"][0])))]
    in_turns = probe(("open", bundle), *fed, ("save", state), *steps)
    check_equal(in_turns[-6:], [last[0], None, *last[1:]])
    check_equal(probe(("open", bundle), ("load", state), *steps), [None, None, *last[1:]])
