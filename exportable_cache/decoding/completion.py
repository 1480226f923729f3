"""Answers to one prompt after another over one session, which is fed only what it does not hold yet."""

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

#: Longest chunk in which a prompt is fed, because an answer can be given up between chunks only.
MOST_A_CHUNK = 256


@dataclass(frozen=True)
class Piece:
    """One token of an answer.

    Attributes:
        text: What it completes; a character of several tokens comes with its last.
        token: Its id.
        logprob: Its log probability under the model, before temperature and the like; None unless asked for.
        alternatives: The most probable tokens at its place, each with its log probability.
    """

    text: str
    token: int
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class CompletionOptions:
    """How a prompt is answered; checked when it is made.

    Attributes:
        sampling: How tokens are chosen.
        max_new_tokens: Most tokens; None for the checkpoint's own limit, or else as many as fit.
        stop: Texts that end the answer, and are not part of it.
        alternatives: How many of the most probable tokens are given at each place; None for no log probabilities.
        constraint: The form of the answer; None for any. It ends where its form is complete.
        continues: True if the text goes on from the prompt's, so that it may begin with a space. False if it is a text
            of its own, as the answer to chat messages is.

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
                raise InputError(f"{name} is {value!r}; it must be an int of at least {least}, or None")
        check_stops(self.stop)


class _GivenUp(Exception):
    """Nobody waits for the answer whose prompt is being fed."""


class Completion(Iterator[Piece]):
    """An answer as it comes; steps run as it is consumed.

    Attributes:
        prompt_tokens: Of the prompt.
        reused_tokens: Of them, those that the session held already.
        new_tokens: Given so far.
        finish_reason: "stop" for an end token, a text of `stop` or a form that is complete, "length" for the most
            tokens; None before the end.
    """

    def __init__(
        self, completer: Completer, ids: Sequence[int], options: CompletionOptions, follower: Follower | None = None
    ) -> None:
        if follower is None and options.constraint is not None:
            follower = completer.follow(options.constraint)
        self._follower = follower
        self.prompt_tokens, self.reused_tokens, self.new_tokens = len(ids), 0, 0
        self.finish_reason: FinishReason | None = None
        self._is_given_up = threading.Event()
        self._pieces = self._run(completer, list(ids), options)

    def __next__(self) -> Piece:
        try:
            return next(self._pieces)
        except BaseException:  # StopIteration, too: no other piece comes
            self._close_form()
            raise

    def close(self) -> None:
        """Give it up; the session keeps what it holds."""
        self._pieces.close()
        self._close_form()

    def _close_form(self) -> None:
        if self._follower is not None:
            self._follower.close()

    def give_up(self) -> None:
        """End it from any thread, also while another one computes a piece: after the chunk of the prompt, or the step,
        that is running. The piece being computed is then the last, or there is none.
        """
        self._is_given_up.set()

    def _check_wanted(self) -> None:
        if self._is_given_up.is_set():
            raise _GivenUp

    def _run(self, completer: Completer, ids: list[int], options: CompletionOptions) -> Generator[Piece]:
        from ..session.generate import sampler_after
        from ..session.rows import TokenRows

        session = completer.session
        limit = completer.limit(len(ids), options.max_new_tokens)
        try:
            self.reused_tokens, logits = completer.feed(ids, self._check_wanted)
        except _GivenUp:
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
            yield Piece(text, token, *_judged(logits[0], token, options.alternatives))
            if self.finish_reason is not None or self._is_given_up.is_set():
                return
            try:
                logits = completer.step(token, self._check_wanted)
            except _GivenUp:
                return

    def _completes(self, token: int) -> bool:
        if self._follower is None:
            return False
        self._follower.take(token)
        return self._follower.ended


class Completer:
    """Answers prompts over one session, from one thread, one after another.

    What a prompt has in common with what the session holds is not fed again: a conversation that goes on costs its new
    turn only. Where a layer cannot take back what is behind that (a ring past its window, a state), the prompt is fed
    whole.

    Args:
        session: A text decoder at batch size 1 with a tokenizer. It is used by nobody else meanwhile.
        split_special_tokens: True if control tokens that are spelled in messages are text; see `encode_prompt`.

    Raises:
        InputError: If it is another.
    """

    def __init__(self, session: Session, split_special_tokens: bool = True) -> None:
        if session.has_encoder:
            raise InputError("this is an encoder-decoder, which answers one input; completions are for text decoders")
        if session.batch_size != 1:
            raise InputError(
                f"completions run at batch size 1, this session has {session.batch_size}; export it with batch_size=1"
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
        # Tokens that the session holds; None while that is not known.
        self._held: list[int] | None = None
        self._constraints: ConstraintCompiler | None = None
        self._compiling = threading.Lock()

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | TextTokenizer:
        """Of the session."""
        tokenizer = self.session.text_tokenizer
        assert tokenizer is not None
        return tokenizer

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a generation, by the model's generation config or else its tokenizer."""
        return frozenset(self.session.generation_settings.ends)

    @property
    def takes_messages(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def encode(self, prompt: str | Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of text or of chat messages.

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
        """The answer to a prompt. An answer that was not taken to its end is given up.

        Args:
            ids: Token ids of the whole prompt.
            options: How it is answered.
            follower: What `follow` gave for the constraint, where that was compiled before. The completion closes it.

        Raises:
            InputError: If it is empty, an id is out of the vocabulary, or the constraint cannot be read.
            MissingDependencyError: If it has a constraint, and llguidance is not installed.
            CacheFullError: If it does not fit, or not with `max_new_tokens`.
        """
        if not ids:
            raise InputError("the prompt is empty; pass at least one token")
        wrong = next((token for token in ids if not 0 <= token < self.session.vocab_size), None)
        if wrong is not None:
            raise InputError(f"token id {wrong} is outside the vocabulary of 0 to {self.session.vocab_size - 1}")
        self.limit(len(ids), options.max_new_tokens)
        return Completion(self, ids, options, follower)

    def follow(self, constraint: Constraint) -> Follower:
        """Begin to follow a constraint, for one answer. Any thread may do so, also while another answer is given.

        Raises:
            InputError, MissingDependencyError: See `complete`.
        """
        with self._compiling:
            if self._constraints is None:
                # Half a second with a large vocabulary: once, and only where a form is asked for.
                self._constraints = ConstraintCompiler(self.tokenizer, self.session.vocab_size, self.end_tokens)
        return self._constraints.follow(constraint)

    def close(self) -> None:
        """End the processes that follow forms. The session stays open."""
        if self._constraints is not None:
            self._constraints.close()

    def limit(self, prompt: int, asked: int | None) -> int | None:
        """Most tokens after a prompt of so many, None for any number. The newest token takes no slot.

        Args:
            prompt: Number of its tokens.
            asked: What was asked for; None for the checkpoint's own limit, or as many as fit.

        Raises:
            InputError: If the checkpoint's limit of all tokens leaves no room for a new one.
            CacheFullError: If there is no room for it.
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
                f"the prompt has {prompt} tokens and {asked} new ones were asked for, but the cache holds {most}; ask "
                f"for at most {most + 1 - prompt}, or shorten the prompt"
            )
        if asked is not None:
            return asked
        return most + 1 - prompt if default is None else min(most + 1 - prompt, default)

    def feed(self, ids: list[int], before_chunk: Callable[[], None] = lambda: None) -> tuple[int, torch.Tensor]:
        """Bring the session to a prompt: how many of its tokens were there, and logits [1, vocab] after it.

        Args:
            ids: Token ids of the whole prompt.
            before_chunk: Called before each chunk of at most `MOST_A_CHUNK` tokens. What it raises gives the prompt up;
                the chunks that were fed are held, for a prompt that begins with them.
        """
        session = self.session
        held = self._held if self._held is not None and len(self._held) == int(session.length[0]) else None
        common = 0
        if held is not None:
            # The last token is fed in any case, as its logits are wanted.
            most = min(len(held), len(ids) - 1)
            common = next((index for index in range(most) if held[index] != ids[index]), most)
            try:
                session.rewind(len(held) - common)
            except InputError:  # a layer has overwritten, or mixed, what would be needed again
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
        except _GivenUp:
            self._held = ids[: int(session.length[0])]
            raise
        self._held = list(ids)
        return common, logits

    def step(self, token: int, before_chunk: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Logits [1, vocab] after one more token.

        Args:
            token: Its id.
            before_chunk: See `feed`, where the sequence is computed again because RoPE changes.
        """
        session, held = self.session, self._held
        self._held = None
        try:
            with session.paced(MOST_A_CHUNK, before_chunk):
                logits = session.decode_for_generation(torch.tensor([token], device=session.device))
        except _GivenUp:
            self._held = None if held is None else [*held, token][: int(session.length[0])]
            raise
        if held is not None:
            held.append(token)
        self._held = held
        return logits


def _judged(
    logits: torch.Tensor, token: int, alternatives: int | None
) -> tuple[float | None, tuple[tuple[int, float], ...]]:
    """Log probability of a token, and of the most probable ones, under logits [vocab]."""
    if alternatives is None:
        return None, ()
    logprobs = logits.float().log_softmax(dim=-1)
    values, tokens = logprobs.topk(min(alternatives, len(logprobs)))
    return float(logprobs[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True))
