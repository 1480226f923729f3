"""Completions of one prompt after another over one session, which reuses the common prefix."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..errors import BundleError, CacheFullError, InputError, MissingDependencyError, UnsupportedModelError
from ..generation.constraint import Constraint, ConstraintCompiler, Follower
from ..generation.host_sampling import SamplingOptions
from ..generation.text import TextPieces, encode_ids
from ..generation.token_text import TokenTexts
from ..models.tokenizers.text import most_characters
from ..program.inputs.kinds import kinds_in
from ..session.checks import check_stops
from .context import Context

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from ..generation.checkpoint_settings import CheckpointSettings
    from ..generation.loop import Chosen
    from ..generation.sampling import Sampler, TokenBias
    from ..generation.speculative import Draft, Speculation, SpeculationStatistics
    from ..models.tokenizers.text import TextTokenizer
    from ..session.session import Session

FinishReason = Literal["stop", "length"]

#: Token of a piece without one.
NO_TOKEN = -1
#: Longest chunk of a prompt, because a completion can be cancelled only between chunks.
MOST_A_CHUNK = 256
#: Limit of images and audio in one prompt, because a tiny one becomes a large tensor.
_MOST_ITEMS = 64


@dataclass(frozen=True)
class Piece:
    """A token of a completion.

    Attributes:
        text: Text that it completes. A character of several tokens comes with its last token.
        token: Token id.
        logprob: Log probability under the model, before temperature and other settings; None unless requested, and for
            the first token of a prompt.
        alternatives: The most probable tokens at its index, each with its log probability.
    """

    text: str
    token: int
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class CompletionOptions:
    """Options of a completion.

    Attributes:
        sampling: Settings of the sampler.
        max_new_tokens: Most tokens; None for the checkpoint's limit, or else as many as fit.
        stop: Texts that end the completion; they are not part of it.
        alternatives: Number of most probable tokens to return for each token; None for no log probabilities.
        constraint: JSON schema or pattern that the completion must match, which then also ends it; None for any text.
        continues: True if the text continues that of the prompt, so that it may begin with a space. False for a text of
            its own, such as the response to chat messages.
        adapter: Name of a LoRA adapter of the session; None for the one that the session used when the
            completer was made.
        shown: Special tokens that are part of the text; others are left out.
        echo: True to yield the tokens of the prompt first. `max_new_tokens` may then be 0.
        logit_bias: Numbers to be added to the logits of tokens, by token id.
        presence_penalty: Number that is subtracted from the logits of tokens that were generated.
        frequency_penalty: Number that is subtracted from a token's logit each time that it was generated.
        protected: Number of first tokens that shifts keep, such as a system prompt; None for `Context.protected`. If
            these fill more than half of the cache, nothing is dropped.

    Raises:
        InputError: If a value is out of range.
    """

    sampling: SamplingOptions = SamplingOptions()
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    alternatives: int | None = None
    constraint: Constraint | None = None
    continues: bool = False
    adapter: str | None = None
    shown: tuple[str, ...] = ()
    echo: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    protected: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 0 if self.echo else 1), ("alternatives", 0)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise InputError(f"{name} must be an int of at least {least}, or None, got {value!r}")
        check_stops(self.stop)

    @property
    def changes_logits(self) -> bool:
        """True if `logit_bias` or a penalty has an effect."""
        return bool(self.logit_bias or self.presence_penalty or self.frequency_penalty)


class Choice(NamedTuple):
    """A token that a model chose.

    Attributes:
        token: Token id.
        completes: True if the token completes the constraint.
        logprob: See `Piece`.
        alternatives: See `Piece`.
    """

    token: int
    completes: bool = False
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


class PromptItems(NamedTuple):
    """Images and audio of a prompt.

    Attributes:
        inputs: Outputs of the processor besides the token ids.
        keys: The prompt's token ids, with a negative number for each token that represents a part of an item. The
            number is another one for other items, so that tokens after them are only reused after the same ones.
    """

    inputs: Mapping[str, torch.Tensor]
    keys: list[int]


class Cancelled(Exception):
    """Signals that the completion whose prompt is being fed was cancelled."""


class Completion(Iterator[Piece]):
    """Yields the pieces of a completion.

    Attributes:
        ids: Token ids of the prompt.
        options: Options of the completion.
        items: Images and audio of the prompt; None without any.
        limit: The limit of new tokens; None for no limit.
        follower: Follows the constraint; None for any text.
        reused_tokens: Number of tokens of the prompt that the session held already.
        new_tokens: Number of tokens generated so far.
        dropped_tokens: Number of tokens of the prompt and the response that shifts dropped.
        dropped_turns: Number of turns that are not in the prompt, because `fitting_turns` left them out.
        finish_reason: "stop" for an end token, a stop text or a complete constraint, "length" for the limit of tokens;
            None before the end.
        bias: Additions to the logits, once a token was chosen with them.
        is_given_up: True once the completion was cancelled.
        is_finished: True once no piece follows.
        when_given_up: Function that ends the running step; a completer sets it.
    """

    def __init__(
        self, completer: AnyCompleter, ids: Sequence[int], options: CompletionOptions, follower: Follower | None = None
    ) -> None:
        if follower is None and options.constraint is not None:
            follower = completer.follow(options.constraint)
        self.ids, self.options, self.follower = list(ids), options, follower
        self.items: PromptItems | None = None
        self.limit = completer.limit(len(ids), options)
        self.reused_tokens, self.new_tokens, self.dropped_tokens, self.dropped_turns = 0, 0, 0, 0
        self.finish_reason: FinishReason | None = None
        self.bias: TokenBias | None = None
        self.when_given_up: Callable[[], None] = lambda: None
        self._given_up = threading.Event()
        before = self.ids if options.continues else ()
        self._texts = TextPieces(completer.tokenizer, completer.end_tokens, options.stop, before, options.shown)
        self._taken = 0
        self._pieces = self._run(completer)
        self.is_finished = False

    def __next__(self) -> Piece:
        while (piece := self.poll()) is None:
            if self.is_finished:
                raise StopIteration
        return piece

    def poll(self) -> Piece | None:
        """Return the next piece, or None if there is none yet or none follows (`is_finished`).

        A completion in a batch runs one step at most, so that a caller with several gets the pieces of all of them
        while one's prompt is fed.
        """
        try:
            return next(self._pieces)
        except StopIteration:
            self.is_finished = True
        except BaseException:
            self._close_follower()
            raise
        self._close_follower()
        return None

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens in the prompt."""
        return len(self.ids)

    @property
    def is_given_up(self) -> bool:
        """True once `give_up` was called."""
        return self._given_up.is_set()

    def close(self) -> None:
        """End the completion; the session keeps its tokens."""
        self._pieces.close()
        self._close_follower()

    def _close_follower(self) -> None:
        if self.follower is not None:
            self.follower.close()

    def give_up(self) -> None:
        """Cancel the completion from any thread, after the running step or chunk of the prompt.

        A piece that is being computed is the last one.
        """
        self._given_up.set()
        self.when_given_up()

    def check_not_cancelled(self) -> None:
        """Check that the completion was not cancelled.

        Raises:
            Cancelled: After `give_up`.
        """
        if self.is_given_up:
            raise Cancelled

    def allowed(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return a function that changes logits [1, vocab] as the options say; None if they change nothing."""
        from ..generation.sampling import TokenBias

        options, follower = self.options, self.follower
        if self.bias is None and options.changes_logits:
            self.bias = TokenBias(options.logit_bias, options.presence_penalty, options.frequency_penalty)
        bias = self.bias
        if bias is None:
            return None if follower is None else follower.only_allowed
        return bias if follower is None else lambda logits: follower.only_allowed(bias(logits))

    def take(self, choice: Choice) -> tuple[Piece, FinishReason | None]:
        """Return the piece of the next token, and why it is the last one; None if another token follows it.

        A completer calls it for each token, in the thread that runs the steps.
        """
        self._taken += 1
        text = self._texts.push(choice.token)
        reason: FinishReason | None = None
        if self._texts.ended:
            reason = "stop"
        elif choice.completes:
            reason, text = "stop", text + self._texts.finish()
        elif self._taken == self.limit:
            reason, text = "length", text + self._texts.finish()
        return Piece(text, choice.token, choice.logprob, choice.alternatives), reason

    def _run(self, completer: AnyCompleter) -> Generator[Piece | None]:
        if self.options.echo:
            yield from completer.prompt_pieces(self)
            if self.limit == 0 or self.is_given_up:
                self.finish_reason = "length"
                # The reason comes with a piece.
                yield Piece("", NO_TOKEN)
                return
        with closing(completer.pieces(self)) as pieces:
            for found in pieces:
                if found is None:
                    yield None
                    continue
                piece, reason = found
                self.new_tokens += 1
                self.finish_reason = reason
                if reason is not None:
                    # The session is at rest when the last piece is given out.
                    pieces.close()
                yield piece
                if reason is not None or self.is_given_up:
                    return


class AnyCompleter(Context):
    """Completes prompts over one session, from one thread, one after another.

    The prefix that a prompt shares with the session is not fed again, so a conversation costs its new message only. If
    a layer cannot take back the tokens after the prefix (a ring past its window, a state), the prompt is fed whole.
    `use` sets what happens when the cache is full.

    Args:
        tokenizer: Tokenizer of the model.
        vocab_size: Token ids run from 0 to vocab_size - 1.
        split_special_tokens: True to encode control tokens that are spelled in messages as text; see `encode_ids`.

    Attributes:
        rows: Number of completions that run at a time.
    """

    rows = 1

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | TextTokenizer, vocab_size: int, split_special_tokens: bool
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self._vocab_size, self._split_special_tokens = vocab_size, split_special_tokens
        self._constraints: ConstraintCompiler | None = None
        self._compiling = threading.Lock()
        # The most characters of a token: None before they are counted, 0 for no limit.
        self._most_characters: int | None = None

    @property
    @abstractmethod
    def settings(self) -> CheckpointSettings:
        """Settings of the checkpoint."""

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the LoRA adapters that a completion may use."""
        return ()

    @property
    @abstractmethod
    def layers(self) -> list[tuple[str, int | None]]:
        """Description and number of slots of each layer; None for a layer that keeps one state for any number."""

    @abstractmethod
    def pieces(self, completion: Completion) -> Generator[tuple[Piece, FinishReason | None] | None]:
        """Yield what `Completion.take` gives for each token, up to the last one, and None after a step without it.

        It ends without a further piece if the completion is given up. Closing it ends the step that is running.
        """

    def score(self, completion: Completion) -> Iterator[tuple[float, tuple[tuple[int, float], ...]]]:
        """Yield the log probability and the alternatives of each token of a completion's prompt but the first.

        Raises:
            Cancelled: If the completion is given up.
            InputError: If the completer cannot do it.
        """
        raise InputError(
            f"log probabilities of a prompt need one row, got {self.rows}; leave echo or logprobs out, or start the "
            "server without --rows"
        )

    def prompt_pieces(self, completion: Completion) -> Generator[Piece]:
        """Yield the tokens of a completion's prompt, with log probabilities if these are requested."""
        alternatives, texts = completion.options.alternatives, TokenTexts(self.tokenizer)
        pieces = TextPieces(self.tokenizer, shown=frozenset(map(texts.text, texts.specials)))
        ids = completion.ids
        nothing = ((None, ()) for _ in ids)
        scores = nothing if alternatives is None else self.score(completion)
        try:
            for index, token in enumerate(ids):
                logprob, found = (None, ()) if index == 0 else next(scores)
                text = pieces.push(token) + (pieces.finish() if index == len(ids) - 1 else "")
                yield Piece(text, token, logprob, found)
        except Cancelled:
            return

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a generation, from the model's generation config or else its tokenizer."""
        return frozenset(self.settings.ends)

    @property
    def takes_messages(self) -> bool:
        """True if the tokenizer has a chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def encode(
        self, prompt: str | Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), starts: bool = True
    ) -> list[int]:
        """Return the token ids of text or of chat messages; see `encode_ids` for the arguments and errors."""
        split = self._split_special_tokens
        return encode_ids(self.tokenizer, prompt, starts=starts, split_special_tokens=split, tools=tools)

    def encode_items(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[list[int], PromptItems]:
        """Return the token ids and the items of chat messages with images or audio.

        Args:
            messages: See `message_inputs`.
            tools: See `render_chat`.

        Raises:
            InputError: If the completer does not take them, or there are too many, or as `message_inputs` does.
        """
        self.check_items(messages, {})
        raise InputError("messages must have images or audio, got text only; use encode")

    def check_items(self, messages: Sequence[Mapping[str, Any]], most: Mapping[str, int | None]) -> None:
        """Check that a prompt with the images and audio of chat messages can be completed.

        Args:
            messages: See `encode_items`.
            most: The kinds that are taken, with the limit of each; None for no limit.

        Raises:
            InputError: If it cannot.
        """
        for kind, count in Counter(kinds_in(messages)).items():
            if kind not in most:
                takes = f"this server takes only {' and '.join(['text', *most])}"
                if self.rows > 1:
                    takes += " with several rows"
                raise InputError(f"messages must have no parts of type {kind}, got {count}; {takes}, so leave them out")
            limit = min(_MOST_ITEMS, _MOST_ITEMS if most[kind] is None else most[kind] or 0)
            if count > limit:
                raise InputError(
                    f"messages must have at most {limit} parts of type {kind}, got {count}; send fewer, or enlarge the "
                    "cache"
                )
            if self.on_full != "refuse":
                raise InputError(
                    f"messages must have no parts of type {kind} if a full cache drops tokens, got {count}; leave them "
                    f"out, or use --on-full refuse instead of {self.on_full}"
                )

    def check_characters(self, count: int) -> None:
        """Check that the tokens of so many characters may fit, because encoding a long text takes long.

        Raises:
            CacheFullError: If they cannot.
        """
        most = self.max_length
        if most is None or self.on_full != "refuse":
            return
        if self._most_characters is None:
            self._most_characters = most_characters(self.tokenizer) or 0
        if self._most_characters and count > most * self._most_characters:
            raise CacheFullError(
                f"the prompt has {count} characters, but a cache of {most} tokens holds at most "
                f"{most * self._most_characters}; shorten it, or export with a larger max_cache_len"
            )

    def complete(
        self,
        ids: Sequence[int],
        options: CompletionOptions = CompletionOptions(),
        follower: Follower | None = None,
        items: PromptItems | None = None,
    ) -> Completion:
        """Return the completion of a prompt. It drops the previous one, if that has not ended.

        Args:
            ids: Token ids of the whole prompt.
            options: Options of the completion.
            follower: Result of `follow` for the constraint, if it was compiled before. The completion closes it.
            items: Images and audio of the prompt, see `encode_items`.

        Raises:
            InputError: If the prompt is empty, an id is outside the vocabulary, or the constraint is not valid.
            MissingDependencyError: If there is a constraint, and llguidance is not installed.
            CacheFullError: If the prompt, or the prompt with `max_new_tokens`, does not fit.
        """
        if not ids:
            raise InputError("the prompt is empty; pass at least one token")
        # Tokens that represent items may be beyond the vocabulary, and have negative keys.
        text = ids if items is None else [max(0, key) for key in items.keys]
        wrong = next((token for token in text if not 0 <= token < self._vocab_size), None)
        if wrong is not None:
            raise InputError(f"token ids must be from 0 to {self._vocab_size - 1}, got {wrong}")
        if options.adapter is not None and options.adapter not in self.adapters:
            known = ", ".join(self.adapters) or "none"
            raise InputError(f"adapter must be one that was loaded ({known}), or None, got {options.adapter!r}")
        self.limit(len(ids), options)
        wrong = next((token for token in options.logit_bias if not 0 <= token < self._vocab_size), None)
        if wrong is not None:
            raise InputError(f"logit_bias must be for token ids from 0 to {self._vocab_size - 1}, got {wrong}")
        completion = Completion(self, ids, options, follower)
        completion.items = items
        return completion

    def follow(self, constraint: Constraint) -> Follower:
        """Start to follow a constraint for one completion. Any thread may call it while another completion runs.

        Raises:
            InputError, MissingDependencyError: See `complete`.
        """
        with self._compiling:
            if self._constraints is None:
                # Made on first use, because it takes half a second with a large vocabulary.
                self._constraints = ConstraintCompiler(self.tokenizer, self._vocab_size, self.end_tokens)
        return self._constraints.follow(constraint)

    def close(self) -> None:
        """End the processes that follow constraints. The session stays open."""
        if self._constraints is not None:
            self._constraints.close()

    def check_fits(self, prompt: int, protected: int | None = None) -> None:
        """Check that the cache has a slot for each token of a prompt.

        Args:
            prompt: Number of its tokens.
            protected: See `CompletionOptions.protected`.

        Raises:
            CacheFullError: If it has not.
        """
        most = self.max_length
        if most is not None and prompt > most:
            remedy = "shorten it"
            if self.on_full == "shift" and protected is not None:
                remedy = (
                    f"shorten the system prompt of {protected} to at most {most // 2}, so that others can be dropped"
                )
            raise CacheFullError(
                f"the prompt has {prompt} tokens, but the cache holds {most}; {remedy}, or export with a larger "
                "max_cache_len"
            )

    def kept_by_shifts(self, options: CompletionOptions) -> int | None:
        """Return the number of first tokens that shifts keep during a completion; None if it drops nothing."""
        protected, most = self.protected if options.protected is None else options.protected, self.max_length
        return protected if self.on_full == "shift" and most is not None and protected <= most // 2 else None

    def protect(self, options: CompletionOptions) -> None:
        """Protect the first tokens of a completion that begins."""
        if options.protected is not None and (kept := self.kept_by_shifts(options)) is not None:
            self.use(self.on_full, kept)

    def limit(self, prompt: int, options: CompletionOptions) -> int | None:
        """Return the limit of new tokens after a prompt, or None for any number. The newest token needs no slot.

        Args:
            prompt: Number of tokens in the prompt.
            options: Options of the completion.

        Raises:
            InputError: If the checkpoint's limit of all tokens leaves no room for a new one.
            CacheFullError: If the prompt and the requested tokens do not fit.
        """
        most, default, asked = self.max_length, None, options.max_new_tokens
        if asked is None:
            default = self.settings.limit(prompt)
        if most is None:
            return default if asked is None else asked
        if self.kept_by_shifts(options) is not None:
            # A response has an end: where the cache is full, or after half a cache if that is later.
            least = default or max(most + 1 - prompt, most // 2)
            return least if asked is None else asked
        self.check_fits(prompt, options.protected)
        if asked is not None and prompt + asked > most + 1:
            raise CacheFullError(
                f"the prompt has {prompt} tokens and {asked} new ones were requested, but the cache holds {most}; "
                f"request at most {most + 1 - prompt}, or shorten the prompt"
            )
        if asked is not None:
            return asked
        return most + 1 - prompt if default is None else min(most + 1 - prompt, default)


def check_decoder(has_encoder: bool) -> None:
    """Check that a model can complete prompts.

    Raises:
        InputError: If it is an encoder-decoder.
    """
    if has_encoder:
        raise InputError("completions need a text decoder, got an encoder-decoder; use generate_text")


def check_completes(session: Session) -> None:
    """Check that a session can complete prompts.

    Raises:
        InputError: If it is an encoder-decoder, is split over processes, or has no tokenizer.
    """
    check_decoder(session.has_encoder)
    if session.stepper.ranks is not None:
        raise InputError(
            f"this session runs on {session.stepper.ranks.size} ranks, which must all get the same requests in the "
            "same order; completions are for sessions of one process, use generate_text"
        )
    if session.text_tokenizer is None:
        raise InputError("completions need a tokenizer and this session has none; export the model with its own")


def layers_of(session: Session) -> list[tuple[str, int | None]]:
    """Return what `AnyCompleter.layers` gives for a session."""
    return [(layer.label, getattr(layer.policy, "capacity", None)) for layer in session.layers]


class Completer(AnyCompleter):
    """Completes prompts over a `Session`; see `AnyCompleter`.

    Args:
        session: A text decoder at batch size 1 with a tokenizer. No other code may use it meanwhile.
        split_special_tokens: True to encode control tokens that are spelled in messages as text; see `encode_ids`.
        draft: Proposes tokens, which the session verifies; None for plain decoding. A completion with images or audio,
            a constraint, log probabilities, a bias or penalties of presence and frequency is decoded without it.

    Attributes:
        statistics: Counts of proposals over all completions; None without a draft.

    Raises:
        InputError: If the session is another one, or cannot verify proposals.
    """

    def __init__(self, session: Session, split_special_tokens: bool = True, draft: Draft | None = None) -> None:
        if session.batch_size != 1:
            raise InputError(
                f"batch_size must be 1 for Completer, got {session.batch_size}; use BatchCompleter for several rows"
            )
        check_completes(session)
        assert session.text_tokenizer is not None
        super().__init__(session.text_tokenizer, session.vocab_size, split_special_tokens)
        self.session = session
        self.statistics: SpeculationStatistics | None = None
        if draft is not None:
            from ..generation.speculative import SpeculationStatistics
            from ..session.generate import check_draft

            check_draft(session, draft)
            self.statistics = SpeculationStatistics()
        self._draft = draft
        # The proposals of the newest completion that has any.
        self._speculation: Speculation | None = None
        self._own = session.stepper.adapters
        self._used = [(one, one.loads) for one in self._own if one.slot]

    @property
    def settings(self) -> CheckpointSettings:
        """See `AnyCompleter.settings`."""
        return self.session.generation_settings

    @property
    def length(self) -> int:
        """See `AnyCompleter.length`."""
        return int(self.session.length[0])

    @property
    def max_length(self) -> int | None:
        """See `AnyCompleter.max_length`."""
        return self.session.max_length

    @property
    def layers(self) -> list[tuple[str, int | None]]:
        """See `AnyCompleter.layers`."""
        return layers_of(self.session)

    def pieces(self, completion: Completion) -> Generator[tuple[Piece, FinishReason | None]]:
        """See `AnyCompleter.pieces`."""
        import torch

        from ..generation.sampling import Sampling
        from ..session.generate import sampler_after
        from ..session.rows import TokenRows

        ids = completion.ids
        self._speculation = None
        self._use(completion.options.adapter)
        self.protect(completion.options)
        try:
            completion.reused_tokens, logits = self.feed(ids, completion.check_not_cancelled, completion.items)
        except Cancelled:
            return
        rows = TokenRows.whole(torch.tensor([ids], device=self.session.device))
        sampler = sampler_after(self.session, Sampling(**asdict(completion.options.sampling)), rows, completion.limit)
        if self._may_draft(completion):
            yield from self._drafted_pieces(completion, sampler, logits)
            return
        ends = self.end_tokens
        while True:
            piece, reason = chosen_piece(completion, sampler, ends, logits)
            completion.dropped_tokens = self.dropped_tokens
            yield piece, reason
            if reason is not None:
                return
            try:
                logits = self.step(piece.token, completion.check_not_cancelled)
            except Cancelled:
                return

    def _may_draft(self, completion: Completion) -> bool:
        """Return True if the draft may propose tokens: the loop of proposals knows neither logits nor constraints."""
        options = completion.options
        return (
            self._draft is not None
            and completion.items is None
            and completion.follower is None
            and options.alternatives is None
            and not options.changes_logits
        )

    def _drafted_pieces(
        self, completion: Completion, sampler: Sampler, logits: torch.Tensor
    ) -> Generator[tuple[Piece, FinishReason | None]]:
        """Yield what `pieces` does, with the draft.

        The session may be ahead of the tokens that were given out, so the held tokens are known after the last one.
        """
        from ..generation.loop import Ending
        from ..generation.speculative import Speculation, speculative_loop

        session, draft, statistics, given = self.session, self._draft, self.statistics, 0
        while True:
            assert draft is not None and statistics is not None and self._held is not None
            speculation = self._speculation = Speculation(self._held, draft, statistics)
            self._held = None
            ending = Ending(None if completion.limit is None else completion.limit - given, self.end_tokens)
            begin = partial(speculative_loop, session.stepper, logits, sampler, ending, speculation)
            steps = session.stepper.guarded(begin)
            try:
                while (token := self._next(steps, completion)) is not None:
                    given += 1
                    piece, reason = completion.take(Choice(token))
                    completion.dropped_tokens = self.dropped_tokens
                    yield piece, reason
                    if reason is not None:
                        return
            finally:
                steps.close()
                # Unless a step failed, or another completion has begun.
                if self._speculation is speculation:
                    self._held = speculation.context[: self.length]
            if completion.is_given_up:
                return
            # The cache is full.
            try:
                logits = self.step(piece.token, completion.check_not_cancelled)
            except Cancelled:
                return

    def _next(self, steps: Iterator[Chosen], completion: Completion) -> int | None:
        """Return the next token of a loop of proposals, or None after the last one."""
        try:
            with self.session.paced(MOST_A_CHUNK, completion.check_not_cancelled):
                step = next(steps, None)
        except Cancelled:
            return None
        except BaseException:
            self._speculation = None
            raise
        return None if step is None else int(step.tokens[0])

    @property
    def adapters(self) -> tuple[str, ...]:
        """See `AnyCompleter.adapters`."""
        return self.session.adapters

    def encode_items(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[list[int], PromptItems]:
        """See `AnyCompleter.encode_items`."""
        from ..session.inputs.prompt import message_inputs

        session, digest = self.session, sha256()
        methods = session.runner.methods
        self.check_items(messages, session.stages.most_items(self.max_length, methods))
        for content in (one["content"] for one in messages if isinstance(one.get("content"), list)):
            for value in (value for part in content for value in part.values() if isinstance(value, bytes)):
                digest.update(len(value).to_bytes(8, "big") + value)
        try:
            processor = session.processor
            if processor is None:
                raise InputError("messages must have text only, because this model came without its processor")
            inputs = message_inputs(processor, methods, messages, tools, self._split_special_tokens)
        except (BundleError, MissingDependencyError) as error:
            raise InputError(str(error)) from error
        ids = inputs.pop("input_ids")[0].tolist()
        inputs.pop("attention_mask", None)
        key = -1 - int.from_bytes(digest.digest(), "big")
        return ids, PromptItems(inputs, [key if token in session.stages.placeholders else token for token in ids])

    def _use(self, adapter: str | None) -> None:
        """Use an adapter. Tokens that were computed with another one are not used again."""
        stepper = self.session.stepper
        if adapter is None:
            stepper.adapters = self._own
        else:
            self.session.use_adapter(adapter)
        used = [(one, one.loads) for one in stepper.adapters if one.slot]
        if used != self._used:
            self._held, self._used = None, used

    def score(self, completion: Completion) -> Iterator[tuple[float, tuple[tuple[int, float], ...]]]:
        """See `AnyCompleter.score`."""
        import torch

        session, ids = self.session, completion.ids
        self._speculation = None
        self._use(completion.options.adapter)
        self._held = None
        session.reset()
        every = torch.tensor([ids], device=session.device)
        size, begin, end = max(session.score_length, 1), 0, 1
        while end < len(ids):
            completion.check_not_cancelled()
            # The last token has no logits to give here.
            logits = session.score(every[:, begin:end])[0] if end - begin > 1 else session.prefill(every[:, begin:end])
            for token, row in zip(ids[begin + 1 : end + 1], logits, strict=True):
                logprob, found = _logprobs(row, token, completion.options.alternatives)
                assert logprob is not None
                yield logprob, found
            begin, end = end, min(end + size, max(end + 1, len(ids) - 1))
        self._held = list(ids[: self.length])

    def feed(
        self,
        ids: list[int],
        before_chunk: Callable[[], None] = lambda: None,
        items: PromptItems | None = None,
    ) -> tuple[int, torch.Tensor]:
        """Feed the rest of a prompt, and return the number of tokens reused and logits [1, vocab].

        Args:
            ids: Token ids of the whole prompt.
            before_chunk: Called before each chunk of at most `MOST_A_CHUNK` tokens. An exception that it raises ends
                the prompt; the chunks that were fed are kept, for a prompt that begins with them.
            items: Images and audio of the prompt.
        """
        import torch

        session, inputs = self.session, dict[str, torch.Tensor]()
        held, common = self.place(ids if items is None else items.keys)
        if items is None:
            ids = held
        elif common == 0:
            inputs = {name: tensor.to(session.device) for name, tensor in items.inputs.items()}
        self._held = None
        try:
            with session.paced(MOST_A_CHUNK, before_chunk):
                logits = session.prefill(torch.tensor([ids[common:]], device=session.device), **inputs)
        except Cancelled:
            self._held = held[: int(session.length[0])]
            raise
        self._held = list(held)
        return common, logits

    def common(self, ids: Sequence[int]) -> int | None:
        """See `Context.common`. No token is common where RoPE has other factors at the length of the prompt.

        Items are fed with the whole prompt, because processors do not tell which part of their outputs an item has.
        """
        found = super().common(ids)
        seen = [*(self._held or ()), *ids] if self.session.stages.sees_prompt else ids[found or 0 :]
        if any(key < 0 for key in seen):
            return 0
        return 0 if found and not self.session.stepper.continues(found, len(ids)) else found

    def most_dropped(self, first: int) -> int:
        """See `Context.most_dropped`."""
        stepper = self.session.stepper
        try:
            stepper.check_shifts()
        except (InputError, UnsupportedModelError):
            return 0
        return max(0, stepper.state.most_dropped(first, stepper.layers))

    def _drop(self, count: int, first: int, reaching: int = 0) -> None:
        stepper = self.session.stepper
        with stepper.guard:
            stepper.drop(first, count, reaching)
            stepper.moves += 1

    def _keep(self, count: int) -> int:
        session = self.session
        if count:
            try:
                session.rewind(self.length - count)
            except InputError:  # a layer has overwritten slots that would be needed again, or keeps a state
                count = 0
        if not count:
            session.reset()
        return count

    def step(self, token: int, before_chunk: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Feed one token, and return logits [1, vocab].

        Args:
            token: Token id.
            before_chunk: See `feed`; it is called if the sequence is computed again because RoPE changes.
        """
        import torch

        session = self.session
        if self.on_full == "shift" and self.is_full:
            self.make_room(lambda ids: session.prefill(torch.tensor([ids], device=session.device)))
        held, self._held = self._held, None
        try:
            with session.paced(MOST_A_CHUNK, before_chunk):
                logits = session.decode_for_generation(torch.tensor([token], device=session.device))
        except Cancelled:
            self._held = None if held is None else [*held, token][: int(session.length[0])]
            raise
        if held is not None:
            held.append(token)
        self._held = held
        return logits


def chosen_piece(
    completion: Completion, sampler: Sampler, ends: frozenset[int], logits: torch.Tensor
) -> tuple[Piece, FinishReason | None]:
    """Choose the next token of a completion, and return what `Completion.take` gives for it.

    Args:
        completion: The completion.
        sampler: Its sampler.
        ends: Tokens that end a generation.
        logits: [1, vocab].
    """
    follower = completion.follower
    token = int(sampler.choose(logits, completion.allowed())[0])
    if completion.bias is not None:
        completion.bias.see(token)
    if follower is not None and token not in ends:
        follower.take(token)
    completes = follower is not None and follower.ended
    return completion.take(Choice(token, completes, *_logprobs(logits[0], token, completion.options.alternatives)))


def _logprobs(
    logits: torch.Tensor, token: int, alternatives: int | None
) -> tuple[float | None, tuple[tuple[int, float], ...]]:
    """Return the log probability of a token, and those of the most probable ones, under logits [vocab]."""
    if alternatives is None:
        return None, ()
    logprobs = logits.float().log_softmax(dim=-1)
    values, tokens = logprobs.topk(min(alternatives, len(logprobs)))
    return float(logprobs[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True))
