"""Completions of one prompt after another, which reuse the common prefix: their options, pieces, and the interface."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..errors import CacheFullError, InputError
from ..generation.constraint import Constraint, ConstraintCompiler, Follower
from ..generation.sampling_options import SamplingOptions
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
    from ..generation.sampling import TokenBias
    from ..models.tokenizers.text import TextTokenizer

FinishReason = Literal["stop", "length"]

#: Token of a piece without one.
NO_TOKEN = -1
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
