"""The command `exportable-cache generate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ..session.opening import NO_DRAFT, Use
from .command import prompt_from_stdin
from .options import (
    AdapterOption,
    BundleOrModelArgument,
    DraftModelOption,
    DraftOption,
    JsonOption,
    JsonSchemaOption,
    RegexOption,
    SeededSampling,
    SplitSpecialTokensOption,
    number,
)
from .runtime import Opened, Opening, open_session, opens
from .terminal import Terminal

if TYPE_CHECKING:
    from torch import Tensor

    from ..decoding.completion import CompletionOptions
    from ..generation.checkpoint_settings import CheckpointSettings
    from ..generation.constraint import Constraint
    from ..session.native import NativeSession
    from ..session.session import Session

_MOST_BY_DEFAULT = 128


@opens
def generate(
    ctx: typer.Context,
    folder: BundleOrModelArgument,
    opening: Opening,
    *,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt",
            "-p",
            metavar="TEXT",
            help="The prompt, or - for stdin. With an encoder of a file, the beginning of the response.",
        ),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            "--image",
            metavar="FILE",
            help="Image for the prompt; may be repeated. Its position is set by the prompt or the chat template.",
        ),
    ] = None,
    audio: Annotated[
        list[Path] | None,
        typer.Option("--audio", metavar="FILE", help="Audio for the prompt, a WAV file; may be repeated."),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        number("--max-new-tokens", "Most tokens to generate.", default="the checkpoint's limit, or 128, or what fits"),
    ] = None,
    given: SeededSampling,
    prompt_lookup: Annotated[
        int | None,
        number(
            "--prompt-lookup",
            "Propose N tokens per step from earlier text. A bundle needs -O score_length=N+1 in its export.",
        ),
    ] = None,
    draft: DraftOption = None,
    draft_model: DraftModelOption = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="Stop at this text; may be repeated.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template to the prompt.")] = False,
    split_special_tokens: SplitSpecialTokensOption = True,
    json_schema: JsonSchemaOption = None,
    regex: RegexOption = None,
    adapter: AdapterOption = None,
    json: JsonOption = False,
) -> None:
    """Generate text from a prompt: text on stdout, speed on stderr."""
    terminal: Terminal = ctx.obj
    if prompt is None and not (image or audio):
        raise typer.BadParameter("must be given, unless --image or --audio is", param_hint="'--prompt' / '-p'")
    text = prompt_from_stdin() if prompt == "-" else prompt or ""
    form = _constraint_of(json_schema, regex)
    if form is not None and prompt_lookup:
        raise typer.BadParameter("cannot be combined with --json-schema or --regex", param_hint="'--prompt-lookup'")
    if (draft not in (None, NO_DRAFT) or draft_model is not None) and (prompt_lookup or form is not None):
        raise typer.BadParameter(
            "cannot be combined with --prompt-lookup, --json-schema or --regex",
            param_hint="'--draft'" if draft_model is None else "'--draft-model'",
        )
    files = {"image": image or (), "audio": audio or ()}
    kinds = tuple(kind for kind, paths in files.items() if paths)
    use = Use(kinds, prompt_lookup or 0, draft, draft_model, adapter=adapter, files=files)
    asked = _Asked(
        text, files, chat, split_special_tokens, form, tuple(stop or ()), max_new_tokens, prompt_lookup or 0, given
    )
    opened = open_session(terminal, folder, opening, use)
    from ..session.native import NativeSession

    start = _over_native if isinstance(opened.session, NativeSession) else _over_torch
    settings, most, timed, run = start(opened, asked)
    terminal.note_all([*settings.remarks(), *given.lines(settings, max_new_tokens)])
    try:
        # With --json, the whole text is printed at the end.
        run(terminal.generated if not json else lambda piece: None)
    finally:
        # End the line of an interrupted response.
        if not json and timed.text and not timed.text.endswith("\n"):
            terminal.write("\n")
    if json:
        applied = given.settings(settings, most)
        terminal.json({"path": str(Path(folder)), "prompt": text, **timed.to_dict(), "settings": applied})
    else:
        terminal.note(str(timed))


@dataclass(frozen=True)
class _Asked:
    """A request for a generation.

    Attributes:
        text: The prompt.
        files: Files of each kind for the prompt.
        is_chat: True if the prompt is a message.
        splits: True to encode control tokens of the prompt as plain text.
        form: Constraint of the response, or None.
        stop: Texts that end the response.
        most: Most tokens to generate, if the user gave a limit.
        lookup: Tokens that prompt lookup proposes at once; 0 for none.
        sampling: Options of sampling.
    """

    text: str
    files: Mapping[str, Sequence[Path]]
    is_chat: bool
    splits: bool
    form: Constraint | None
    stop: tuple[str, ...]
    most: int | None
    lookup: int
    sampling: SeededSampling

    @property
    def prompt(self) -> str | list[dict[str, str]]:
        """The prompt as text, or as messages."""
        return [{"role": "user", "content": self.text}] if self.is_chat else self.text


class _Started(NamedTuple):
    """A generation that can run.

    Attributes:
        settings: Settings of the checkpoint.
        most: Most tokens to generate; None for the checkpoint's limit, or what fits.
        timed: The response and its timing.
        run: Runs it, and gives the text in pieces.
    """

    settings: CheckpointSettings
    most: int | None
    timed: _Timed
    run: Callable[[Callable[[str], object]], None]


def _over_native(opened: Opened, asked: _Asked) -> _Started:
    """Start a generation in the native runner."""
    from ..generation.text import encode_ids

    session = opened.session
    settings = session.settings
    ids = encode_ids(session.text_tokenizer, asked.prompt, split_special_tokens=asked.splits)
    # The decoder of an encoder-decoder is fed one token.
    fed = len(ids) if session.start_token is None else 1
    most = asked.most or _default_new_tokens(settings, session.max_length, fed)
    timed = _Timed(len(ids), fed)
    how = {
        "stop": asked.stop,
        "continues": not asked.is_chat or (asked.form is None and not asked.splits),
        "max_new_tokens": most,
        "sampling": asked.sampling.over(settings.sampling),
        "prompt_lookup": asked.lookup,
        "draft_tokens": opened.draft_tokens if not asked.lookup and asked.form is None else 0,
    }
    return _Started(settings, most, timed, partial(_run_native, timed, session, ids, asked.form, how))


def _over_torch(opened: Opened, asked: _Asked) -> _Started:
    """Start a generation in torch's runtime."""
    from ..generation.speculative import PromptLookup

    session = opened.session
    prepared = _prompt_of(opened, asked)
    settings = session.generation_settings
    tokenised = _tokenised(session, prepared, asked.splits)
    prompt_tokens, fed_tokens = _counts(session, tokenised)
    room = None if session.room is None else int(session.room)
    most = asked.most or _default_new_tokens(settings, room, fed_tokens)
    sampling = asked.sampling.over(settings.sampling)
    if asked.form is None:
        proposer = PromptLookup(asked.lookup) if asked.lookup else opened.draft
        # Messages are tokenised again, because the response to them is a separate text and does not continue theirs.
        prepared = prepared if asked.is_chat and asked.splits else tokenised
        pieces = session.stream_text(prepared, most, **asdict(sampling), stop=asked.stop or None, draft=proposer)
    else:
        # Imported here, because generation without a constraint starts sooner without them.
        from ..decoding.completion import CompletionOptions

        options = CompletionOptions(sampling, most, asked.stop, constraint=asked.form, continues=not asked.is_chat)
        pieces = _constrained_text(session, tokenised, options)
    timed = _Timed(prompt_tokens, fed_tokens, lambda: int(session.length[0]))
    return _Started(settings, most, timed, partial(_run_pieces, timed, pieces))


def _run_pieces(timed: _Timed, pieces: Iterator[str], give: Callable[[str], object]) -> None:
    """Run a generation in torch's runtime."""
    timed.start()
    for piece in pieces:
        timed.add(piece)
        give(piece)
    timed.end()


def _run_native(
    timed: _Timed,
    session: NativeSession,
    ids: list[int],
    form: Constraint | None,
    options: Mapping[str, Any],
    give: Callable[[str], object],
) -> None:
    """Run a generation in the native runner; `options` are those of `NativeSession.generate_text`."""
    follower = None
    if form is not None:
        from ..generation.constraint import ConstraintCompiler

        follower = ConstraintCompiler(session.text_tokenizer, session.vocab_size, session.end_tokens).follow(form)

    def count(token: int) -> None:
        timed.tokens += 1

    def take(piece: str) -> None:
        timed.add(piece)
        give(piece)

    timed.start()
    session.generate_text(ids, take, on_token=count, follower=follower, **options)
    timed.end()


@dataclass
class _Timed:
    """A response and its timing.

    Attributes:
        text: The text so far.
        prompt_tokens: Tokens of the prompt.
        fed_tokens: Prompt tokens that the decoder is fed.
        held: Returns the number of cached tokens; None to derive it from `tokens`.
        tokens: Tokens generated so far, if they are counted.
        first_seconds: Seconds from the start to the first text, including the prefill.
        decode_seconds: Seconds from then to the end.
        decode_steps: Steps in that time.
    """

    prompt_tokens: int
    fed_tokens: int
    held: Callable[[], int] | None = None
    tokens: int = 0
    text: str = ""
    new_tokens: int = 0
    first_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_steps: int = 0

    def start(self) -> None:
        """Start the clock."""
        self._start, self._first, self._held_at_first = time.perf_counter(), 0.0, 0

    def add(self, piece: str) -> None:
        """Add a piece of text."""
        if not self._first:
            self._first, self._held_at_first = time.perf_counter(), self._held()
        self.text += piece

    def end(self) -> None:
        """Stop the clock."""
        end = time.perf_counter()
        # The newest token was never fed back.
        self.new_tokens = self._held() - self.fed_tokens + 1
        self.first_seconds = (self._first or end) - self._start
        if self._first:
            self.decode_seconds, self.decode_steps = end - self._first, self._held() - self._held_at_first

    def _held(self) -> int:
        return self.fed_tokens + self.tokens - 1 if self.held is None else self.held()

    @property
    def tokens_per_second(self) -> float | None:
        """Decode speed, or None if no step followed the first text."""
        return self.decode_steps / self.decode_seconds if self.decode_steps else None

    def to_dict(self) -> dict[str, object]:
        """Return text, counts and times as JSON values."""
        hidden = ("fed_tokens", "held", "tokens")
        values = {key: getattr(self, key) for key in self.__dataclass_fields__ if key not in hidden}
        return {**values, "tokens_per_second": self.tokens_per_second}

    def __str__(self) -> str:
        speed = "" if self.tokens_per_second is None else f", then {self.tokens_per_second:.1f} tokens/s"
        return (
            f"{self.prompt_tokens} prompt tokens, {self.new_tokens} new; first text after {self.first_seconds:.2f} "
            f"s{speed}"
        )


def _prompt_of(opened: Opened, asked: _Asked) -> str | list[dict[str, str]] | dict[str, Tensor]:
    """Return the prompt as `Session.stream_text` takes it."""
    _check_kinds(opened.session, asked.files)
    if not any(asked.files.values()):
        return asked.prompt
    from ..session.inputs.prompt import prompt_inputs

    methods = opened.session.runner.methods
    return prompt_inputs(opened.processor(), methods, asked.text, asked.files, asked.is_chat, asked.splits)


def _check_kinds(session: Session, files: Mapping[str, Sequence[Path]]) -> None:
    """Check that the program takes these files, or text without files."""
    from ..errors import InputError
    from ..program.inputs.multimodal import kinds_taken

    kinds = kinds_taken(session.runner.methods)
    for kind, given in files.items():
        if given and kind not in kinds:
            raise InputError(
                f"--{kind} {given[0]} was given, but the program takes only {' and '.join(kinds)}; leave it out, or "
                f"export with --modalities {kind} if the model supports it"
            )
    count = sum(map(len, files.values()))
    if session.has_encoder and count > 1:
        raise InputError(f"the encoder takes one file, got {count}; pass one of them")
    if "text" not in kinds and count == 0:
        raise InputError(f"the model takes {kinds[0]} and not only a prompt; pass --{kinds[0]} FILE")


def _constraint_of(json_schema: Path | None, regex: str | None) -> Constraint | None:
    """Return the constraint of the response, or None."""
    if json_schema is None and regex is None:
        return None
    if json_schema is not None and regex is not None:
        raise typer.BadParameter("cannot be combined with --json-schema; pass one of them", param_hint="'--regex'")
    from ..errors import InputError
    from ..generation.constraint import Constraint

    if json_schema is None:
        return Constraint("regex", regex or "")
    try:
        return Constraint("json_schema", json_schema.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the schema {json_schema}: {error}; pass a file of JSON") from error


def _constrained_text(
    session: Session,
    prepared: str | list[dict[str, str]] | dict[str, Tensor],
    options: CompletionOptions,
) -> Iterator[str]:
    """Yield text that follows a constraint."""
    from ..decoding.session_completion import Completer
    from ..errors import InputError

    completer = Completer(session)
    if not isinstance(prepared, dict) or set(prepared) != {"input_ids"}:
        raise InputError("--json-schema and --regex cannot be combined with --image and --audio; leave out the files")
    return (piece.text for piece in completer.complete(prepared["input_ids"][0].tolist(), options))


def _tokenised(
    session: Session, prepared: str | list[dict[str, str]] | dict[str, Tensor], split_special_tokens: bool
) -> str | list[dict[str, str]] | dict[str, Tensor]:
    """Return the prompt as token ids.

    Prompts that the session will refuse are returned unchanged, for its error message.
    """
    from ..generation.text import encode_prompt

    if isinstance(prepared, dict) or session.text_tokenizer is None or session.batch_size != 1:
        return prepared
    ids = encode_prompt(session.text_tokenizer, prepared, split_special_tokens=split_special_tokens)
    return {"input_ids": ids.to(session.device)}


def _counts(session: Session, prepared: str | list[dict[str, str]] | dict[str, Tensor]) -> tuple[int, int]:
    """Return the number of prompt tokens, and how many of them the decoder is fed."""
    ids = prepared.get("decoder_input_ids", prepared.get("input_ids")) if isinstance(prepared, dict) else None
    tokens = 0 if ids is None else ids.shape[1]
    if not session.has_encoder:
        return tokens, tokens
    # The decoder's sequence is separate and begins with one token.
    return tokens, 1 + (tokens if isinstance(prepared, dict) and "decoder_input_ids" in prepared else 0)


def _default_new_tokens(settings: CheckpointSettings, room: int | None, prompt_tokens: int) -> int | None:
    """Return `_MOST_BY_DEFAULT`, or None for the checkpoint's limit or the remaining slots, if there are fewer."""
    if settings.max_new_tokens is not None or settings.max_length is not None:
        return None
    if room is not None and prompt_tokens + _MOST_BY_DEFAULT > room:
        return None
    return _MOST_BY_DEFAULT
