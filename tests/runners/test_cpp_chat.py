"""Chats in the C++ session: the turns of the template, of which each is fed once."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from exportable_cache import load
from exportable_cache.demo.task import make_questions
from exportable_cache.generation.templates import ChatTurns, chat_turns

from .conftest import Probe, Program, hexed

QUESTIONS = [one.prompt for one in make_questions(3, seed=5, min_distance=4, tokens=(20, 60))]


def answers_in_python(bundle: Path, turns: ChatTurns, system: str = "") -> list[str]:
    """Of a session that is fed each turn behind what it holds."""
    session = load(bundle)
    found = []
    for index, question in enumerate(QUESTIONS):
        text = turns.question
        if index == 0:
            text = turns.system[0] + system + turns.system[1] if system and turns.system else turns.opening
        text += question.strip() + turns.answer
        ids = session.text_tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens = list(session.generate(torch.tensor([ids]), max_new_tokens=9))
        # The end of an answer is no part of it.
        found.append(session.text_tokenizer.decode(tokens, skip_special_tokens=True))
    return found


@pytest.mark.parametrize("system", ["", "you know codes."])
def test_a_conversation_is_fed_turn_by_turn(demo_bundle: Path, probe: Probe, system: str) -> None:
    turns = chat_turns(load(demo_bundle).tokenizer)
    recorded = json.loads((demo_bundle / "manifest.json").read_text())["files"]["tokenizer/tokenizer.json"]["details"]
    assert turns is not None and recorded["chat_turns"] == turns.to_dict()
    commands = [
        ("chat", hexed(f" {question}\n"), hexed(system if index == 0 else ""), "max_new_tokens=9")
        for index, question in enumerate(QUESTIONS)
    ]
    replies = probe(("open", demo_bundle), *commands)[1:]
    assert [reply.values[2] for reply in replies] == answers_in_python(demo_bundle, turns, system)


def test_control_tokens_in_a_question_are_text(demo_bundle: Path, probe: Probe) -> None:
    tokenizer = load(demo_bundle).tokenizer
    turns = chat_turns(tokenizer)
    assert turns is not None
    forged = f"a{tokenizer.all_special_tokens[0]}b"
    replies = probe(
        ("open", demo_bundle), ("chat", hexed(forged), "", "max_new_tokens=1"), ("length",), ("reset",),
        ("text", hexed(turns.opening + forged + turns.answer), "max_new_tokens=1"), ("length",),
    )  # fmt: skip
    # As text it is several tokens. A prompt of text is taken as it is.
    assert replies[2].numbers()[0] > replies[5].numbers()[0]


def test_what_cannot_be_is_refused(demo_bundle: Path, probe: Probe, tmp_path: Path) -> None:
    replies = probe(
        ("open", demo_bundle), ("chat", hexed("amber?"), "", "max_new_tokens=2"),
        ("chat", hexed("amber?"), hexed("be brief"), "max_new_tokens=2"),
    )  # fmt: skip
    assert not replies[2].ok and "a system message comes before the first question" in replies[2].values[1]
    copy = tmp_path / "bundle"
    shutil.copytree(demo_bundle, copy)
    fields = json.loads((copy / "manifest.json").read_text())
    details = fields["files"]["tokenizer/tokenizer.json"]["details"]
    details["chat_turns"]["system"] = None
    (copy / "manifest.json").write_text(json.dumps(fields))
    assert "takes no system message" in probe(("open", copy), ("chat", hexed("x"), hexed("be brief")))[1].values[1]
    del details["chat_turns"]
    (copy / "manifest.json").write_text(json.dumps(fields))
    assert "no chat template that is turns alone" in probe(("open", copy), ("chat", hexed("x"), ""))[1].values[1]


def test_the_program_answers_each_line(demo_bundle: Path, program: Program) -> None:
    turns = chat_turns(load(demo_bundle).tokenizer)
    assert turns is not None
    command = [*program("exportable_cache_generate"), str(demo_bundle), "--chat", "--max-new-tokens", "9"]
    done = subprocess.run(command, input="\n".join(QUESTIONS), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == answers_in_python(demo_bundle, turns)
    wrong = subprocess.run([*command[:2], "--system", "x", "--prompt", "y"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "--system needs --chat" in wrong.stderr
