"""`exportable-cache chat`, and how it reads messages from a terminal or a pipe."""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, TextIO, TypeGuard

import typer

from ..common.fs.user_files import home_folder, user_folder
from ..errors import CacheFullError, InputError
from ..session.opening import Use
from .options import (
    AdapterOption,
    BundleOrModelArgument,
    DraftModelOption,
    DraftOption,
    OnFullOption,
    SeededSampling,
    SplitSpecialTokensOption,
    number,
)
from .runtime import Opening, open_completer, opens
from .terminal import Terminal

if TYPE_CHECKING:
    from ..decoding.completion import AnyCompleter, CompletionOptions

PROMPT, _MORE = "> ", ". "
#: What is before and after a message of several lines.
_QUOTE = '"""'
#: File of earlier messages in the user's folder.
_HISTORY = "chat_history"
_HELP = '''\
/undo         remove the last message and its response
/reset        start again; the system prompt stays
/context      show how full the cache is, what was dropped, and the speed of the last response
/fork NAME    continue in a copy of the conversation
/switch NAME  go to another conversation; without a name, list them
/save FILE    save the conversation as JSON
/load FILE    continue a saved conversation
/help         show this list
/quit         end the conversation, as the end of the input does
A message of several lines begins and ends with """.'''


@opens
def chat(
    ctx: typer.Context,
    folder: BundleOrModelArgument,
    opening: Opening,
    *,
    system: Annotated[
        str | None,
        typer.Option("--system", metavar="TEXT", help="System prompt: instructions before the first message."),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        number("--max-new-tokens", "Most tokens of a response.", default="the checkpoint's limit, or what fits"),
    ] = None,
    given: SeededSampling,
    split_special_tokens: SplitSpecialTokensOption = True,
    adapter: AdapterOption = None,
    draft: DraftOption = None,
    draft_model: DraftModelOption = None,
    on_full: OnFullOption = "shift",
) -> None:
    """Chat with a model in the terminal.

    Each line of the input is a message. Three double quotes begin and end a message of several lines. Lines that begin
    with / are commands; /help lists them. At a terminal, several lines that are pasted at once are one message.
    """
    terminal: Terminal = ctx.obj
    from ..decoding.completion import CompletionOptions
    from ..generation.text import check_text

    use = Use(draft=draft, draft_model=draft_model, adapter=adapter)
    completer = open_completer(terminal, folder, opening, split_special_tokens, use)
    if not completer.takes_messages:
        raise InputError(
            f"chat needs a tokenizer with a chat template, and {folder} has none; use generate, or set "
            "tokenizer.chat_template before exporting"
        )
    if system:
        check_text(system)
    options = CompletionOptions(given.over(completer.settings.sampling), max_new_tokens)
    terminal.note_all(given.lines(completer.settings, max_new_tokens))
    # Invalid bytes spoil only one message; a strict stream could not be read after them.
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    questions = Questions(terminal.stdout)
    conversation = _Conversation(terminal, completer, options, system, on_full, questions.is_typed)
    terminal.note("/help lists commands")
    _answer_all(conversation, questions)


def _answer_all(conversation: _Conversation, questions: Questions) -> None:
    """Answer messages until the end of the input; at a terminal, two interrupts in a row end the conversation."""
    was_interrupted = False
    while True:
        try:
            question = questions.next()
            was_interrupted = False
            if question is None or not conversation.take(question, questions.is_quoted):
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
    """A conversation with a model.

    Attributes:
        messages: Messages of user and assistant, alternating; the last one is the assistant's.
        on_full: Policy for a full cache, one of `ON_FULL`.
        shows_fill: True to show after each response how full the cache is.
        dropped: Number of oldest turns that the model does not see, by `on_full`.
        is_protected: True once the number of tokens of the system prompt is known.
        name: Name of this conversation among those of `/fork`.
        others: System prompt, messages and dropped turns of the other conversations, by name.
        rate: Tokens a second of the last response; None before the first.
    """

    terminal: Terminal
    completer: AnyCompleter
    options: CompletionOptions
    system: str | None
    on_full: str
    shows_fill: bool = False
    messages: list[dict[str, str]] = field(default_factory=list)
    dropped: int = 0
    is_protected: bool = False
    name: str = "main"
    others: dict[str, tuple[str | None, list[dict[str, str]], int]] = field(default_factory=dict)
    rate: float | None = None

    def _prompt(self, message: dict[str, str]) -> list[int]:
        """Return the token ids of the conversation and its next message, without turns that are dropped.

        Raises:
            CacheFullError: If the message does not fit, even alone.
            InputError: If a text cannot be encoded.
        """
        from ..decoding.context import fitting_turns, protected_tokens

        completer, most = self.completer, self.completer.max_length
        if not self.is_protected:
            protected = protected_tokens(completer.encode, self._system)
            on_full = self.on_full
            if on_full == "shift" and most is not None and protected > most // 2:
                self.terminal.note(f"the system prompt takes {protected} of {most} tokens, so whole turns are dropped")
                on_full = "drop-turns"
            completer.use(on_full, protected)
            self.is_protected = True
        # A quarter of the cache is left for the response where no limit was given.
        reserve = self.options.max_new_tokens or (0 if most is None else most // 4)
        messages = [*self.messages, message]
        ids, dropped = fitting_turns(completer.encode, completer, self._system, messages, reserve, self.dropped)
        if most is not None and completer.on_full == "shift" and len(ids) > most:
            completer.check_fits(len(completer.encode([*self._system, message])))
        if dropped > self.dropped:
            self.terminal.note(f"the cache is full: {dropped - self.dropped} more turns are dropped")
        self.dropped = dropped
        return ids

    @property
    def _system(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def take(self, line: str, is_quoted: bool = False) -> bool:
        """Answer a message or run a command; return False if it ends the conversation.

        Raises:
            InputError: If that fails; the conversation is unchanged.
        """
        if not line.strip():
            return True
        # Quoted text, and pasted text of several lines, is a message, even if it begins like a command.
        if is_quoted or not line.startswith("/") or "\n" in line:
            self._ask(line)
            return True
        command, _, argument = line.strip().partition(" ")
        if command in ("/quit", "/exit"):
            return False
        commands: dict[str, Any] = {
            "/undo": self._undo,
            "/reset": self._reset,
            "/help": self._help,
            "/context": self._context,
        }
        files: dict[str, Any] = {"/save": self._save, "/load": self._load}
        if command == "/fork":
            self._fork(argument.strip())
        elif command == "/switch":
            self._switch(argument.strip())
        elif command in files:
            if not argument:
                raise InputError(f"{command} needs a file: {command} FILE")
            files[command](Path(argument.strip()))
        elif command in commands:
            commands[command]()
        else:
            raise InputError(f"there is no command {command!r}; /help lists all commands")
        return True

    def _ask(self, question: str) -> None:
        """Print the response. An interrupted one is kept, unless the interrupt came before it began."""
        completer, before = self.completer, self.completer.dropped_tokens
        message = {"role": "user", "content": question}
        answer, completion = "", None
        try:
            ids, began = self._prompt(message), monotonic()
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
        self.messages += [message, {"role": "assistant", "content": answer}]
        if completer.dropped_tokens > before:
            self.terminal.note(f"the cache is full: {completer.dropped_tokens - before} more tokens are dropped")
        self.rate = completion.new_tokens / max(monotonic() - began, 1e-9)
        if self.shows_fill:
            self.terminal.note(self._fill())
        was_cut = completion.finish_reason == "length" and self.options.max_new_tokens is None
        if was_cut and self.completer.is_full:
            self.terminal.note("the cache is full; use /undo or /reset, --on-full, or a larger --max-cache-len")

    def _undo(self) -> None:
        if not self.messages:
            raise InputError("there is no message to remove")
        del self.messages[-2:]
        self.dropped = min(self.dropped, len(self.messages) // 2)

    def _reset(self) -> None:
        self.messages.clear()
        self.dropped = 0

    def _context(self) -> None:
        self.terminal.note(self._fill())

    def _fill(self) -> str:
        """Return how full the cache is, and what was dropped."""
        held, most = self.completer.length, self.completer.max_length
        found = [f"{held} tokens" if most is None else f"{held} of {most} tokens"]
        dropped = {"turns": self.dropped, "tokens": self.completer.dropped_tokens}
        found += [f"{count} {what} dropped" for what, count in dropped.items() if count]
        found += [] if self.rate is None else [f"{self.rate:.0f} tokens/s"]
        return ", ".join(found)

    def _fork(self, name: str) -> None:
        """Continue in a copy; the cache holds the same tokens."""
        if not name or name == self.name or name in self.others:
            taken = ", ".join([self.name, *self.others])
            raise InputError(f"/fork needs a new name (there is {taken}), got {name!r:.100}: /fork NAME")
        self.others[self.name] = self.system, [*self.messages], self.dropped
        self.name = name

    def _switch(self, name: str) -> None:
        """Go to another conversation, of which the cache keeps what the two begin with."""
        if not name:
            self.terminal.note(", ".join([f"{self.name} (this one)", *self.others]))
            return
        if name not in self.others:
            known = ", ".join(self.others) or "none, /fork makes one"
            raise InputError(f"there is no other conversation {name!r:.100}; there is {known}")
        self.others[self.name] = self.system, self.messages, self.dropped
        self.name = name
        self.system, self.messages, self.dropped = self.others.pop(name)
        self.is_protected = False

    def _help(self) -> None:
        self.terminal.note(_HELP)

    def _save(self, path: Path) -> None:
        document = {"system": self.system, "messages": self.messages}
        try:
            path.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from error
        except ValueError as error:
            raise InputError(f"FILE must be a file name, got {str(path)!r}: {error}") from error

    def _load(self, path: Path) -> None:
        from ..generation.text import check_text

        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} must hold JSON: {str(error)[:200]}; pass a file that /save wrote") from error
        system = document.get("system") if isinstance(document, dict) else None
        messages = document.get("messages") if isinstance(document, dict) else None
        if (system is not None and not isinstance(system, str)) or not _is_conversation(messages):
            raise InputError(f"{path} must hold a conversation; pass a file that /save wrote")
        for text in (system or "", *(message["content"] for message in messages)):
            check_text(text)
        self.system, self.messages, self.dropped, self.is_protected = system, list(messages), 0, False


def _is_conversation(messages: Any) -> TypeGuard[list[dict[str, str]]]:
    """Return True for a list of alternating messages of user and assistant."""
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
    """Messages of a user.

    At a terminal prompt_toolkit, if it is installed, edits messages of several lines (Escape and then Enter begins
    another line) and keeps their history in a file. Otherwise the standard library's readline provides arrow keys, a
    history of this conversation, and pasted text of several lines as one message.

    Args:
        stdout: Stream of the terminal; `sys.stdout` may be redirected while a command runs.

    Attributes:
        is_quoted: True if the newest message was in quotes.
    """

    def __init__(self, stdout: TextIO) -> None:
        if sys.stdin is None:
            raise InputError("stdin must be open, because chat reads questions from it; pipe them in, or type them")
        self._stdout, self.is_quoted = stdout, False
        self.is_typed = sys.stdin.isatty() and stdout.isatty()
        self._editor = _editor(stdout) if self.is_typed else None
        if self.is_typed and self._editor is None:
            _edit_lines()

    def next(self) -> str | None:
        """Return the next message without its line break, or None at the end of the input.

        Raises:
            KeyboardInterrupt: If the user interrupts it.
        """
        line = self._line(PROMPT)
        self.is_quoted = line is not None and line.startswith(_QUOTE)
        if line is None or not self.is_quoted:
            return line
        lines = [line.removeprefix(_QUOTE)]
        while not lines[-1].rstrip().endswith(_QUOTE) and (more := self._line(_MORE)) is not None:
            lines.append(more)
        return "\n".join(lines).rstrip().removesuffix(_QUOTE)

    def _line(self, prompt: str) -> str | None:
        if not self.is_typed:
            line = sys.stdin.readline()
            return line.rstrip("\n") if line else None
        if self._editor is not None:
            try:
                return str(self._editor.prompt(prompt))
            except EOFError:
                return None
        # input() uses readline only if both streams are the process's standard streams.
        with redirect_stdout(self._stdout):
            try:
                return input(prompt)
            except EOFError:
                # Let the shell's prompt begin on a new line.
                print()
                return None


def _editor(stdout: TextIO) -> Any:
    """Return an editor of lines with a history in a file; None without prompt_toolkit."""
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import FileHistory, InMemoryHistory
        from prompt_toolkit.key_binding import KeyBindings
    except ImportError:
        return None

    class Kept(FileHistory):
        def store_string(self, string: str) -> None:
            # A full disk, or text that is not UTF-8, costs one line of the history.
            with suppress(OSError, ValueError):
                super().store_string(string)

    history: Any = InMemoryHistory()
    try:
        path = user_folder(home_folder(), make=True) / _HISTORY
        # For this user only, because messages may be private.
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        history = Kept(path)
    except (OSError, RuntimeError, InputError):  # there is no folder that only this user can write
        pass
    keys = KeyBindings()
    keys.add("enter")(lambda event: event.current_buffer.validate_and_handle())
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    with redirect_stdout(stdout):
        return PromptSession(history=history, multiline=True, key_bindings=keys)


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
