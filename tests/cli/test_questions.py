"""What a user types at `chat`, at a terminal of its own: editing, history, pasted text, interrupts."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ..support.waiting import process_state, wait_until

pty = pytest.importorskip("pty", reason="there are no pseudo-terminals here")
fcntl, termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")
pytest.importorskip("readline", reason="this Python has no readline")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")
ROOT = Path(__file__).parents[2]
# The command's own loop, over a conversation that repeats what it is told.
SCRIPT = """
import sys
from contextlib import redirect_stdout
from exportable_cache.cli.chat import _answer_all
from exportable_cache.cli.chat import Questions
from exportable_cache.cli.terminal import Terminal

class Talk:
    terminal = Terminal(sys.stdout)
    def take(self, line, is_quoted):
        if line == "wait":
            raise KeyboardInterrupt
        self.terminal.write(f"got {line!r}\\n")
        return line != "/quit"

with redirect_stdout(sys.stderr):
    _answer_all(Talk(), Questions(Talk.terminal.stdout))
print("ended")
"""
LEFT, UP, INTERRUPT, END = "\x1b[D", "\x1b[A", "\x03", "\x04"


def own_terminal() -> None:
    """Take the terminal, and interrupts as well: a shell that starts tests in the background has them ignored."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def typed(*keys: str) -> str:
    """Return what a terminal shows of a conversation in which these are typed, each once the prompt is there."""
    controller, terminal = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    shown = b""
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment,
        cwd=ROOT,
        start_new_session=True,
        preexec_fn=own_terminal,
    ) as process:
        os.close(terminal)
        end, rest, prompts = time.monotonic() + 30, list(keys), 0
        while time.monotonic() < end:
            if rest and shown.count(b"> ") > prompts:
                prompts = shown.count(b"> ")
                # The prompt is shown before keys are read, and an interrupt between the two would be lost.
                wait_until(lambda: process_state(process.pid) == "S", 20)
                os.write(controller, rest.pop(0).encode())
            if not select.select([controller], [], [], 0.05)[0]:
                if process.poll() is not None:
                    break
                continue
            try:
                shown += os.read(controller, 4096)
            except OSError:
                break
        process.kill()
    os.close(controller)
    return shown.decode()


def test_lines_are_edited_and_remembered() -> None:
    shown = typed(f"amer{LEFT}{LEFT}b\n", f"{UP}?\n", END)
    assert "got 'amber'" in shown and "got 'amber?'" in shown and "ended" in shown, shown


def test_pasted_lines_are_one_question() -> None:
    shown = typed("\x1b[200~/one\ntwo\x1b[201~\n", "/quit\n")
    assert r"got '/one\ntwo'" in shown and "got '/quit'" in shown and "ended" in shown, shown


def test_an_interrupt_at_the_prompt_keeps_the_conversation_and_a_second_ends_it() -> None:
    shown = typed(f"half{INTERRUPT}", "whole\n", INTERRUPT, INTERRUPT)
    assert "the conversation is kept; Ctrl+C again" in shown and "got 'whole'" in shown and "ended" in shown, shown
    assert "half'" not in shown and "Traceback" not in shown
    # One outside of the prompt is the first of two as well.
    assert "ended" in typed("wait\n", "more\n", "wait\n", INTERRUPT)
