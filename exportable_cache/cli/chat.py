"""`exportable-cache chat`"""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, TypeGuard

import typer

from ..errors import CacheFullError, InputError
from .options import (
    BundleArgument,
    CheckOption,
    IgnoreVersionsOption,
    KeyOption,
    SeedOption,
    SplitSpecialTokensOption,
    TemperatureOption,
    TopPOption,
    TrustOption,
    at_least,
)
from .output.terminal import Terminal

if TYPE_CHECKING:
    from ..decoding.completion import Completer, CompletionOptions

PROMPT = "> "
_HELP = """\
/undo         take back the last question and its answer
/reset        begin anew; the system prompt stays
/save FILE    write the conversation as JSON
/load FILE    go on with one that was saved
/help         this list
/quit         end, as does the end of the input"""


def chat(
    ctx: typer.Context,
    folder: BundleArgument,
    system: Annotated[
        str | None,
        typer.Option("--system", metavar="TEXT", help="System prompt: instructions before the first message."),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            metavar="N",
            callback=at_least(1),
            help="Most tokens an answer.",
            show_default="the checkpoint's limit, or what fits",
        ),
    ] = None,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    split_special_tokens: SplitSpecialTokensOption = True,
    trust: TrustOption = False,
    key: KeyOption = None,
    ignore_versions: IgnoreVersionsOption = False,
    check: CheckOption = False,
) -> None:
    """Talk with a model: each line of the input is a question, lines that begin with / are commands (/help).

    At a terminal, text of several lines that is pasted at once is one question.
    """
    terminal: Terminal = ctx.obj
    with terminal.opening(folder):
        from ..decoding.completion import Completer, CompletionOptions
        from ..generation.sampling import Sampling
        from ..generation.text import check_text
        from ..session.session import load

        options = CompletionOptions(Sampling(temperature, top_p=top_p, seed=seed), max_new_tokens)
        session = load(folder, check_versions=not ignore_versions, trust=trust, key=key, check=check)
        completer = Completer(session, split_special_tokens)
    terminal.note_all(session.generation_settings.remarks())
    if not completer.takes_messages:
        raise InputError(
            "the tokenizer has no chat template, so this model answers no messages; use generate, or set "
            "tokenizer.chat_template before exporting"
        )
    if system:
        check_text(system)
    # Bytes that are no text are one question's: a strict stream would be lost behind them.
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    conversation = _Conversation(terminal, completer, options, system)
    questions = Questions(terminal.stdout)
    terminal.note("/help lists commands")
    _answer_all(conversation, questions)


def _answer_all(conversation: _Conversation, questions: Questions) -> None:
    """Take questions until the end of the input; two interrupts in a row end a conversation at a terminal."""
    was_interrupted = False
    while True:
        try:
            question = questions.next()
            was_interrupted = False
            if question is None or not conversation.take(question):
                return
        except KeyboardInterrupt:
            if not questions.is_typed:
                raise
            conversation.terminal.write("\n")
            if was_interrupted:
                return
            was_interrupted = True
            conversation.terminal.note("the conversation is kept; Ctrl+C again, or Ctrl+D, ends it")
        except (InputError, CacheFullError) as error:
            conversation.terminal.error(f"error: {error}")


@dataclass
class _Conversation:
    """A conversation.

    Attributes:
        messages: Of the user and the assistant in turn; the last is the assistant's.
    """

    terminal: Terminal
    completer: Completer
    options: CompletionOptions
    system: str | None
    messages: list[dict[str, str]] = field(default_factory=list)

    def take(self, line: str) -> bool:
        """Do what a line says; False if it ends the conversation.

        Raises:
            InputError: If it cannot be done; the conversation is as it was.
        """
        if not line.strip():
            return True
        # Pasted text of several lines is a question, even if it begins like a command.
        if not line.startswith("/") or "\n" in line:
            self._ask(line)
            return True
        command, _, argument = line.strip().partition(" ")
        if command in ("/quit", "/exit"):
            return False
        commands: dict[str, Any] = {"/undo": self._undo, "/reset": self.messages.clear, "/help": self._help}
        files: dict[str, Any] = {"/save": self._save, "/load": self._load}
        if command in files:
            if not argument:
                raise InputError(f"{command} needs a file: {command} FILE")
            files[command](Path(argument.strip()))
        elif command in commands:
            commands[command]()
        else:
            raise InputError(f"there is no command {command!r}; /help lists them")
        return True

    def _ask(self, question: str) -> None:
        """An answer as it comes. Interrupted, it stays as far as it is there; before it began, nothing does."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        asked = {"role": "user", "content": question}
        answer, completion = "", None
        try:
            ids = self.completer.encode([*system, *self.messages, asked])
            completion = self.completer.complete(ids, self.options)
            for piece in completion:
                answer += piece.text
                self.terminal.generated(piece.text)
        except KeyboardInterrupt:
            self.terminal.note(" interrupted")
        finally:
            if completion is not None:
                completion.close()
                self.terminal.write("\n")
        if completion is None:
            return
        self.messages += [asked, {"role": "assistant", "content": answer}]
        is_full = self.completer.session.room == 0
        if completion.finish_reason == "length" and self.options.max_new_tokens is None and is_full:
            self.terminal.note("the cache is full: /undo or /reset, or export with a larger --max-cache-len")

    def _undo(self) -> None:
        if not self.messages:
            raise InputError("there is nothing to take back")
        del self.messages[-2:]

    def _help(self) -> None:
        self.terminal.note(_HELP)

    def _save(self, path: Path) -> None:
        document = {"system": self.system, "messages": self.messages}
        try:
            path.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from error
        except ValueError as error:
            raise InputError(f"{str(path)!r} is no name of a file: {error}") from error

    def _load(self, path: Path) -> None:
        from ..generation.text import check_text

        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} is no JSON: {str(error)[:200]}") from error
        system = document.get("system") if isinstance(document, dict) else None
        messages = document.get("messages") if isinstance(document, dict) else None
        if (system is not None and not isinstance(system, str)) or not _is_conversation(messages):
            raise InputError(f"{path} holds no conversation; /save writes one")
        for text in (system or "", *(message["content"] for message in messages)):
            check_text(text)
        self.system, self.messages = system, list(messages)


def _is_conversation(messages: Any) -> TypeGuard[list[dict[str, str]]]:
    """Whether it is messages of the user and the assistant in turn."""
    return (
        isinstance(messages, list)
        and len(messages) % 2 == 0
        and all(
            isinstance(message, dict)
            and set(message) == {"role", "content"}
            and message["role"] == ("user", "assistant")[index % 2]
            and isinstance(message["content"], str)
            for index, message in enumerate(messages)
        )
    )


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
