"""Completions of one prompt after another over one session, which reuses the common prefix."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..errors import CacheFullError, InputError
from ..generation.constraint import Constraint, ConstraintCompiler, Follower
from ..generation.sampling import Sampling
from ..generation.text import TextPieces, encode_prompt
from ..session.checks import check_stops

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..models.tokenizers.text import TextTokenizer
    from ..session.session import Session

FinishReason = Literal["stop", "length"]

#: Longest chunk of a prompt, because a completion can be cancelled only between chunks.
MOST_A_CHUNK = 256


@dataclass(frozen=True)
class Piece:
    """A token of a completion.

    Attributes:
        text: Text that it completes. A character of several tokens comes with its last token.
        token: Token id.
        logprob: Log probability under the model, before temperature and other settings; None unless requested.
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

    Raises:
        InputError: If a value is out of range.
    """

    sampling: Sampling = Sampling()
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    alternatives: int | None = None
    constraint: Constraint | None = None
    continues: bool = False

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("alternatives", 0)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise InputError(f"{name} must be an int of at least {least}, or None, got {value!r}")
        check_stops(self.stop)


class _Cancelled(Exception):
    """Signals that the completion whose prompt is being fed was cancelled."""


class Completion(Iterator[Piece]):
    """Yields the pieces of a completion, and runs a step for each.

    Attributes:
        prompt_tokens: Number of tokens in the prompt.
        reused_tokens: Number of these that the session held already.
        new_tokens: Number of tokens generated so far.
        finish_reason: "stop" for an end token, a stop text or a complete constraint, "length" for the limit of tokens;
            None before the end.
    """

    def __init__(
        self, completer: Completer, ids: Sequence[int], options: CompletionOptions, follower: Follower | None = None
    ) -> None:
        if follower is None and options.constraint is not None:
            follower = completer.follow(options.constraint)
        self._follower = follower
        self.prompt_tokens, self.reused_tokens, self.new_tokens = len(ids), 0, 0
        self.finish_reason: FinishReason | None = None
        self._is_cancelled = threading.Event()
        self._pieces = self._run(completer, list(ids), options)

    def __next__(self) -> Piece:
        try:
            return next(self._pieces)
        except BaseException:  # including StopIteration, because no piece follows
            self._close_follower()
            raise

    def close(self) -> None:
        """End the completion; the session keeps its tokens."""
        self._pieces.close()
        self._close_follower()

    def _close_follower(self) -> None:
        if self._follower is not None:
            self._follower.close()

    def give_up(self) -> None:
        """Cancel the completion from any thread, after the running step or chunk of the prompt.

        A piece that is being computed is the last one.
        """
        self._is_cancelled.set()

    def _check_not_cancelled(self) -> None:
        if self._is_cancelled.is_set():
            raise _Cancelled

    def _run(self, completer: Completer, ids: list[int], options: CompletionOptions) -> Generator[Piece]:
        from ..session.generate import sampler_after
        from ..session.rows import TokenRows

        session = completer.session
        limit = completer.limit(len(ids), options.max_new_tokens)
        try:
            self.reused_tokens, logits = completer.feed(ids, self._check_not_cancelled)
        except _Cancelled:
            return
        rows = TokenRows.whole(torch.tensor([ids], device=session.device))
        sampler = sampler_after(session, options.sampling, rows, limit)
        before = ids if options.continues else ()
        pieces = TextPieces(completer.tokenizer, completer.end_tokens, options.stop, before)
        allowed = None if self._follower is None else self._follower.only_allowed
        while True:
            token = int(sampler.choose(logits, allowed)[0])
            self.new_tokens += 1
            text = pieces.push(token)
            if pieces.ended:
                self.finish_reason = "stop"
            elif self._completes(token):
                self.finish_reason, text = "stop", text + pieces.finish()
            elif self.new_tokens == limit:
                self.finish_reason, text = "length", text + pieces.finish()
            yield Piece(text, token, *_logprobs(logits[0], token, options.alternatives))
            if self.finish_reason is not None or self._is_cancelled.is_set():
                return
            try:
                logits = completer.step(token, self._check_not_cancelled)
            except _Cancelled:
                return

    def _completes(self, token: int) -> bool:
        if self._follower is None:
            return False
        self._follower.take(token)
        return self._follower.ended


class Completer:
    """Completes prompts over one session, from one thread, one after another.

    The prefix that a prompt shares with the session is not fed again, so a conversation costs its new message only. If
    a layer cannot take back the tokens after the prefix (a ring past its window, a state), the prompt is fed whole.

    Args:
        session: A text decoder at batch size 1 with a tokenizer. No other code may use it meanwhile.
        split_special_tokens: True to encode control tokens that are spelled in messages as text; see `encode_prompt`.

    Raises:
        InputError: If the session is another one.
    """

    def __init__(self, session: Session, split_special_tokens: bool = True) -> None:
        if session.has_encoder:
            raise InputError("completions need a text decoder, got an encoder-decoder; use generate_text")
        if session.batch_size != 1:
            raise InputError(
                f"batch_size must be 1 for completions, got {session.batch_size}; export the model with batch_size=1"
            )
        if session.stepper.ranks is not None:
            raise InputError(
                f"this session runs on {session.stepper.ranks.size} ranks, which must all get the same requests in the "
                "same order; completions are for sessions of one process, use generate_text"
            )
        if session.text_tokenizer is None:
            raise InputError("completions need a tokenizer and this session has none; export the model with its own")
        self.session = session
        self._split_special_tokens = split_special_tokens
        # Tokens that the session holds; None while they are not known.
        self._held: list[int] | None = None
        self._constraints: ConstraintCompiler | None = None
        self._compiling = threading.Lock()

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | TextTokenizer:
        """Tokenizer of the session."""
        tokenizer = self.session.text_tokenizer
        assert tokenizer is not None
        return tokenizer

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a generation, from the model's generation config or else its tokenizer."""
        return frozenset(self.session.generation_settings.ends)

    @property
    def takes_messages(self) -> bool:
        """True if the tokenizer has a chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def encode(self, prompt: str | Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the token ids of text or of chat messages.

        Raises:
            InputError: See `encode_prompt`.
        """
        return encode_prompt(self.tokenizer, prompt, split_special_tokens=self._split_special_tokens)[0].tolist()

    def complete(
        self,
        ids: Sequence[int],
        options: CompletionOptions = CompletionOptions(),
        follower: Follower | None = None,
    ) -> Completion:
        """Return the completion of a prompt. It drops the previous one, if that has not ended.

        Args:
            ids: Token ids of the whole prompt.
            options: Options of the completion.
            follower: Result of `follow` for the constraint, if it was compiled before. The completion closes it.

        Raises:
            InputError: If the prompt is empty, an id is outside the vocabulary, or the constraint is not valid.
            MissingDependencyError: If there is a constraint, and llguidance is not installed.
            CacheFullError: If the prompt, or the prompt with `max_new_tokens`, does not fit.
        """
        if not ids:
            raise InputError("the prompt is empty; pass at least one token")
        wrong = next((token for token in ids if not 0 <= token < self.session.vocab_size), None)
        if wrong is not None:
            raise InputError(f"token ids must be from 0 to {self.session.vocab_size - 1}, got {wrong}")
        self.limit(len(ids), options.max_new_tokens)
        return Completion(self, ids, options, follower)

    def follow(self, constraint: Constraint) -> Follower:
        """Start to follow a constraint for one completion. Any thread may call it while another completion runs.

        Raises:
            InputError, MissingDependencyError: See `complete`.
        """
        with self._compiling:
            if self._constraints is None:
                # Made on first use, because it takes half a second with a large vocabulary.
                self._constraints = ConstraintCompiler(self.tokenizer, self.session.vocab_size, self.end_tokens)
        return self._constraints.follow(constraint)

    def close(self) -> None:
        """End the processes that follow constraints. The session stays open."""
        if self._constraints is not None:
            self._constraints.close()

    def limit(self, prompt: int, asked: int | None) -> int | None:
        """Return the limit of new tokens after a prompt, or None for any number. The newest token needs no slot.

        Args:
            prompt: Number of tokens in the prompt.
            asked: Requested limit; None for the checkpoint's limit, or else as many as fit.

        Raises:
            InputError: If the checkpoint's limit of all tokens leaves no room for a new one.
            CacheFullError: If the prompt and the requested tokens do not fit.
        """
        most, default = self.session.max_length, None
        if asked is None:
            default = self.session.generation_settings.limit(prompt)
        if most is None:
            return default if asked is None else asked
        if prompt > most:
            raise CacheFullError(
                f"the prompt has {prompt} tokens, but the cache holds {most}; shorten it, or export with a larger "
                "max_cache_len"
            )
        if asked is not None and prompt + asked > most + 1:
            raise CacheFullError(
                f"the prompt has {prompt} tokens and {asked} new ones were requested, but the cache holds {most}; "
                f"request at most {most + 1 - prompt}, or shorten the prompt"
            )
        if asked is not None:
            return asked
        return most + 1 - prompt if default is None else min(most + 1 - prompt, default)

    def feed(self, ids: list[int], before_chunk: Callable[[], None] = lambda: None) -> tuple[int, torch.Tensor]:
        """Feed the rest of a prompt, and return the number of tokens reused and logits [1, vocab].

        Args:
            ids: Token ids of the whole prompt.
            before_chunk: Called before each chunk of at most `MOST_A_CHUNK` tokens. An exception that it raises ends
                the prompt; the chunks that were fed are kept, for a prompt that begins with them.
        """
        session = self.session
        held = self._held if self._held is not None and len(self._held) == int(session.length[0]) else None
        common = 0
        if held is not None:
            # The last token is always fed, because its logits are needed.
            most = min(len(held), len(ids) - 1)
            common = next((index for index in range(most) if held[index] != ids[index]), most)
            try:
                session.rewind(len(held) - common)
            except InputError:  # a layer has overwritten slots that would be needed again, or keeps a state
                held = None
        if held is not None and not session.stepper.continues(common, len(ids)):
            held = None
        if held is None or common == 0:
            common = 0
            session.reset()
        self._held = None
        try:
            with session.paced(MOST_A_CHUNK, before_chunk):
                logits = session.prefill(torch.tensor([ids[common:]], device=session.device))
        except _Cancelled:
            self._held = ids[: int(session.length[0])]
            raise
        self._held = list(ids)
        return common, logits

    def step(self, token: int, before_chunk: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Feed one token, and return logits [1, vocab].

        Args:
            token: Token id.
            before_chunk: See `feed`; it is called if the sequence is computed again because RoPE changes.
        """
        session, held = self.session, self._held
        self._held = None
        try:
            with session.paced(MOST_A_CHUNK, before_chunk):
                logits = session.decode_for_generation(torch.tensor([token], device=session.device))
        except _Cancelled:
            self._held = None if held is None else [*held, token][: int(session.length[0])]
            raise
        if held is not None:
            held.append(token)
        self._held = held
        return logits


def _logprobs(
    logits: torch.Tensor, token: int, alternatives: int | None
) -> tuple[float | None, tuple[tuple[int, float], ...]]:
    """Return the log probability of a token, and those of the most probable ones, under logits [vocab]."""
    if alternatives is None:
        return None, ()
    logprobs = logits.float().log_softmax(dim=-1)
    values, tokens = logprobs.topk(min(alternatives, len(logprobs)))
    return float(logprobs[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True))
