"""`exportable-cache chat`: a conversation on stdin."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from exportable_cache import export, load
from exportable_cache.cli.chat import _editor
from exportable_cache.decoding import Completer, Completion

from ..conftest import DEMO_MAX_CACHE_LEN
from ..support.letters import letter_tokenizer
from ..support.models import tiny_model
from ..support.native import require_native

QUESTION = "the code of amber is 4821. amber?"
#: A response to a question without its fact ends only where the cache is full.
SHORT = ("--max-new-tokens", 12)

pytestmark = pytest.mark.usefixtures("fake_backend")


@pytest.fixture(scope="module", params=["session", "native"])
def runtime(request: pytest.FixtureRequest) -> str:
    return request.param


#: What is done before a runtime is asked: a process of the native one, for each test, with --full.
SESSION_IN_THE_FAST_LANE = pytest.mark.parametrize(
    "runtime", ["session", pytest.param("native", marks=pytest.mark.full)], indirect=True
)


@pytest.fixture(scope="module")
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, runtime: str) -> Path:
    if runtime == "native":
        require_native()
        return request.getfixturevalue("demo_bundle")
    folder = tmp_path_factory.mktemp("bundles") / "demo"
    return export("demo", "fake", DEMO_MAX_CACHE_LEN, folder, prefill_chunk=16, verify=False).path


@dataclass
class Done:
    """A finished command of another process."""

    exit_code: int
    stdout: str
    stderr: str


@pytest.fixture
def chat(run: Any, runtime: str) -> Callable[..., Any]:
    """`chat(bundle, ..., input=...)` -> result, in this process or by the native runner."""

    def in_process(*arguments: object, input: str | bytes) -> Any:
        return run("chat", *arguments, input=input)

    def natively(*arguments: object, input: str | bytes) -> Done:
        command = [sys.executable, "-m", "exportable_cache", "chat", *map(str, arguments)]
        environment = {**os.environ, "EXPORTABLE_CACHE_RUNTIME": "native"}
        given = input if isinstance(input, bytes) else input.encode()
        done = subprocess.run(command, input=given, capture_output=True, timeout=120, env=environment)
        return Done(done.returncode, done.stdout.decode(), done.stderr.decode())

    return natively if runtime == "native" else in_process


@functools.cache
def answers(bundle: Path, *turns: str, system: str | None = None) -> list[str]:
    """Return greedy responses to the questions of one conversation, computed once by the Python API."""
    session, found = load(bundle), []
    messages = [{"role": "system", "content": system}] if system else []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        found.append("".join(session.stream_text(messages, SHORT[1])))
        messages.append({"role": "assistant", "content": found[-1]})
    return found


def test_questions_are_answered_in_turn(chat, bundle: Path) -> None:
    result = chat(bundle, *SHORT, input=f"{QUESTION}\n\namber?\n/quit\nnever\n")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines() == answers(bundle, QUESTION, "amber?")
    system = chat(bundle, *SHORT, "--system", "the code of amber is 7.", input="amber?\n")
    assert system.stdout.splitlines() == answers(bundle, "amber?", system="the code of amber is 7.")


def test_the_native_runner_chats_without_torch(demo_bundle: Path) -> None:
    require_native()
    command = [sys.executable, "-m", "exportable_cache", "chat", str(demo_bundle)]
    environment = {**os.environ, "EXPORTABLE_CACHE_RUNTIME": "native", "PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(command, input="amber?\n", capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "exportable_cache.decoding.native_completion" in imported
    assert imported.isdisjoint(("torch", "transformers", "numpy"))


def test_undo_reset_save_and_load(chat, bundle: Path, tmp_path: Path) -> None:
    saved = tmp_path / "conversation.json"
    lines = [
        QUESTION,
        "amber?",
        "/undo",
        "amber?",
        f"/save {saved}",
        "/reset",
        "amber?",
        f"/load {saved}",
        "/undo",
        "amber?",
    ]
    result = chat(bundle, *SHORT, input="\n".join(lines))
    assert result.exit_code == 0, result.stderr
    first, second = answers(bundle, QUESTION, "amber?")
    (alone,) = answers(bundle, "amber?")
    assert result.stdout.splitlines() == [first, second, second, alone, second]
    messages = json.loads(saved.read_text())["messages"]
    assert [message["content"] for message in messages] == [QUESTION, first, "amber?", second]


def test_conversations_are_forked_and_switched(chat, bundle: Path, tmp_path: Path) -> None:
    """A fork has the same beginning, and neither sees the other's later messages."""
    lines = [QUESTION, "/fork side", "paper?", "/switch", "/switch main", f"/save {tmp_path}/main.json"]
    lines += ["amber?", "/switch side", "paper?"]
    refused = ["/fork side", "/fork", "/switch other"]
    result = chat(bundle, *SHORT, input="\n".join([*lines, *refused]) + "\n")
    assert result.exit_code == 0, result.stderr
    first, side, main, again = result.stdout.splitlines()
    assert [first, main] == answers(bundle, QUESTION, "amber?")
    assert [first, side, again] == answers(bundle, QUESTION, "paper?", "paper?")
    assert "side (this one), main" in result.stderr
    saved = json.loads((tmp_path / "main.json").read_text())["messages"]
    assert [message["content"] for message in saved] == [QUESTION, first]
    for said in ("got 'side': /fork NAME", "got '': /fork NAME", "no other conversation 'other'; there is main"):
        assert said in result.stderr, result.stderr


@SESSION_IN_THE_FAST_LANE
def test_a_loaded_system_prompt_is_that_of_one_conversation_only(chat, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps({"system": "the code of paper is 7.", "messages": []}))
    lines = ["/fork side", f"/load {tmp_path}/other.json", "/switch main", f"/save {tmp_path}/main.json"]
    lines += ["/switch side", f"/save {tmp_path}/side.json"]
    result = chat(bundle, "--system", "the code of amber is 7.", input="\n".join(lines) + "\n")
    assert result.exit_code == 0 and "error" not in result.stderr, result.stderr
    saved = [json.loads((tmp_path / f"{name}.json").read_text())["system"] for name in ("main", "side")]
    assert saved == ["the code of amber is 7.", "the code of paper is 7."]


@SESSION_IN_THE_FAST_LANE
def test_a_message_of_several_lines_is_quoted(chat, bundle: Path) -> None:
    """The first line would otherwise be a command, and an end of the input ends the message."""
    given = f'"""/help\n{QUESTION}"""\n"""/one line"""\n/context\n"""paper?\n\n'
    result = chat(bundle, *SHORT, input=given)
    assert result.exit_code == 0 and "/undo" not in result.stderr, result.stderr
    assert result.stdout.splitlines() == answers(bundle, f"/help\n{QUESTION}", "/one line", "paper?")
    assert re.search(rf"of {DEMO_MAX_CACHE_LEN} tokens, \d+ tokens/s", result.stderr), result.stderr


def test_an_editor_keeps_a_history_of_messages_of_several_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("prompt_toolkit", reason="prompt_toolkit, which chat uses where it is installed, is not")
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    monkeypatch.setenv("EXPORTABLE_CACHE_HOME", str(tmp_path / "home"))
    escape, up = "\x1b", "\x1b[A"
    for typed in (f"one{escape}\rtwo\r", f"{up}\r"):
        with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
            keys.send_text(typed)
            assert _editor(sys.stdout).prompt("> ") == "one\ntwo"
    _editor(sys.stdout).history.store_string("half of a character: \ud83d")
    assert (tmp_path / "home" / "chat_history").stat().st_mode & 0o777 == 0o600


@SESSION_IN_THE_FAST_LANE
def test_what_cannot_be_done_is_said_and_the_conversation_goes_on(chat, bundle: Path, tmp_path: Path) -> None:
    for name, text in (("no.json", "{"), ("other.json", '{"messages": [{"role": "user", "content": "x"}]}')):
        (tmp_path / name).write_text(text)
    lines = [
        "/undo", "/nonsense", "/save", f"/save {tmp_path}/none/file", f"/load {tmp_path}/none",
        f"/load {tmp_path}/no.json", f"/load {tmp_path}/other.json", "the " * 1000, QUESTION,
    ]  # fmt: skip
    result = chat(bundle, *SHORT, input="\n".join(lines) + "\n")
    assert result.exit_code == 0, result.stderr
    said = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    expected = [
        "there is no message to remove", "there is no command '/nonsense'", "/save needs a file", "cannot write",
        "cannot read", "must hold JSON", "must hold a conversation",
        f"the cache holds {DEMO_MAX_CACHE_LEN}; shorten it",
    ]  # fmt: skip
    assert len(said) == len(expected)
    assert all(part in line for part, line in zip(expected, said, strict=True)), said
    assert result.stdout.splitlines()[-1:] == answers(bundle, QUESTION)


@SESSION_IN_THE_FAST_LANE
def test_bytes_that_are_no_text_cost_one_question(chat, bundle: Path) -> None:
    lines = [b"a\xff\xfeb", QUESTION.encode(), b"/save a\0b", b"/load a\0b", b"amber?"]
    result = chat(bundle, *SHORT, input=b"\n".join(lines))
    assert result.exit_code == 0, result.stderr
    said = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 3 and "the prompt must be UTF-8, got" in said[0], said
    assert all("embedded null" in line for line in said[1:]), said
    assert result.stdout.splitlines() == answers(bundle, QUESTION, "amber?")


@pytest.mark.parametrize("amid", ["the question", "the answer"])
def test_an_interrupt_ends_an_answer_and_not_the_conversation(
    run, runtime: str, bundle: Path, monkeypatch: pytest.MonkeyPatch, amid: str
) -> None:
    if runtime == "native":
        pytest.skip("the interrupt is raised in this process")
    interrupts = iter([KeyboardInterrupt])

    def once(original):
        def method(self, *args):
            for interrupt in interrupts:
                raise interrupt
            return original(self, *args)

        return method

    owner, name = (Completer, "encode") if amid == "the question" else (Completion, "__next__")
    monkeypatch.setattr(owner, name, once(getattr(owner, name)))
    result = run("chat", bundle, input=f"amber?\n/undo\n{QUESTION}\n")
    assert result.exit_code == 0 and "interrupted" in result.stderr, result.stderr
    assert ("no message to remove" in result.stderr) == (amid == "the question")
    assert result.stdout.split("\n")[-2] == answers(bundle, QUESTION)[0]


@SESSION_IN_THE_FAST_LANE
def test_a_conversation_that_is_no_text_is_not_loaded(chat, bundle: Path, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "x"}]
    (tmp_path / "conversation.json").write_text(json.dumps({"messages": turns}))
    result = chat(bundle, input=f"/load {tmp_path}/conversation.json\n{QUESTION}\n/save {tmp_path}/saved.json\n")
    assert result.exit_code == 0 and "must be UTF-8" in result.stderr, result.stderr
    assert json.loads((tmp_path / "saved.json").read_text())["messages"][0]["content"] == QUESTION
    assert chat(bundle, "--system", "\udcff", input="").exit_code == 2


def test_a_model_without_a_template_is_refused(run, tmp_path: Path) -> None:
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = None
    bundle = export(tiny_model("llama"), "fake", 32, tmp_path / "letters", verify=False, tokenizer=tokenizer).path
    result = run("chat", bundle, input="x\n")
    assert result.exit_code == 2 and "chat needs a tokenizer with a chat template" in result.stderr


@SESSION_IN_THE_FAST_LANE
@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("shift", "the cache is full: .* more tokens are dropped"),
        ("drop-turns", "the cache is full: 1 more turns are dropped"),
        ("restart", "the cache is full: .* more turns are dropped"),
        ("refuse", "error: the prompt has .* tokens"),
    ],
)
def test_a_full_cache_ends_no_conversation(chat, bundle: Path, policy: str, said: str) -> None:
    """Check what each policy says, and that only `refuse` refuses."""
    lines = ["the " * 60] * 12
    result = chat(bundle, "--on-full", policy, "--max-new-tokens", "4", input="\n".join([*lines, "/context"]) + "\n")
    assert result.exit_code == 0, result.stderr
    assert re.search(said, result.stderr), result.stderr
    assert ("error: " in result.stderr) is (policy == "refuse"), result.stderr
    assert f" of {DEMO_MAX_CACHE_LEN} tokens" in result.stderr.splitlines()[-1], result.stderr


@SESSION_IN_THE_FAST_LANE
def test_a_long_system_prompt_is_kept(chat, bundle: Path) -> None:
    """Check that turns are dropped where the system prompt leaves too little room to shift."""
    lines = ["the " * 60] * 4
    result = chat(bundle, "--system", "the " * 300, "--max-new-tokens", "4", input="\n".join(lines) + "\n")
    assert result.exit_code == 0 and "error: " not in result.stderr, result.stderr
    assert f"of {DEMO_MAX_CACHE_LEN} tokens, so whole turns are dropped" in result.stderr, result.stderr
    assert "more turns are dropped" in result.stderr, result.stderr
