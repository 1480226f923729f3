"""What a user types at `chat`, one question after another: edited at a terminal, or read from a pipe."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import TextIO

from ..errors import InputError

PROMPT = "> "


class Questions:
    """Questions of a user.

    At a terminal the standard library's readline edits them: arrow keys, a history of this conversation, and pasted
    text of several lines, which stays one question.

    Args:
        stdout: Stream of the terminal; `sys.stdout` may point elsewhere while a command runs.
    """

    def __init__(self, stdout: TextIO) -> None:
        if sys.stdin is None:
            raise InputError("stdin must be open, because chat reads questions from it; pipe them in, or type them")
        self._stdout = stdout
        self.is_typed = sys.stdin.isatty() and stdout.isatty()
        if self.is_typed:
            _edit_lines()

    def next(self) -> str | None:
        """Return the next question without its line break, or None at the end of the input.

        Raises:
            KeyboardInterrupt: If the user interrupts it.
        """
        if not self.is_typed:
            line = sys.stdin.readline()
            return line.rstrip("\n") if line else None
        # readline serves input() only where both streams are the process's own.
        with redirect_stdout(self._stdout):
            try:
                return input(PROMPT)
            except EOFError:
                # The shell's next line is not to begin behind the prompt.
                print()
                return None


def _edit_lines() -> None:
    try:
        import readline
    except ImportError:
        # On Windows the console edits lines itself.
        return
    readline.clear_history()
    readline.set_completer(lambda text, state: None)
    if "libedit" not in (readline.__doc__ or ""):
        readline.parse_and_bind("set enable-bracketed-paste on")
