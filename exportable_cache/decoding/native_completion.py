"""Completions by the native runner, without torch."""

from __future__ import annotations

import math
import threading
from collections.abc import Generator, Iterator
from dataclasses import replace
from heapq import nlargest
from itertools import pairwise
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .completion import AnyCompleter, Choice, Completion, FinishReason, Piece, check_decoder

if TYPE_CHECKING:
    from ..generation.checkpoint_settings import CheckpointSettings
    from ..session.native import NativeSession

#: Seconds between two attempts to cancel, because one that comes before the runner begins has no effect.
_AGAIN = 0.01


class NativeCompleter(AnyCompleter):
    """Completes prompts over a `NativeSession`; see `AnyCompleter`.

    The runner generates in a thread of its own, and does not wait until a token is taken.

    Args:
        session: The session, with a tokenizer. No other code may use it meanwhile.
        split_special_tokens: See `AnyCompleter`.
        draft_tokens: Tokens that the bundle's draft head proposes at once; None for `drafted_by_default`.

    Raises:
        InputError: If the model is an encoder-decoder, or the session has no tokenizer.
    """

    def __init__(
        self, session: NativeSession, split_special_tokens: bool = True, draft_tokens: int | None = None
    ) -> None:
        check_decoder(session.has_encoder)
        super().__init__(session.text_tokenizer, session.vocab_size, split_special_tokens)
        self.session = session
        self.draft_tokens = session.drafted_by_default if draft_tokens is None else draft_tokens
        self._max_length = session.max_length
        self._running: _Generation | None = None

    @property
    def settings(self) -> CheckpointSettings:
        """See `AnyCompleter.settings`."""
        return self.session.settings

    @property
    def length(self) -> int:
        """See `AnyCompleter.length`. While a prompt is fed, it is the number of tokens that were held before."""
        running = self._running
        return self.session.length if running is None else running.length

    @property
    def max_length(self) -> int | None:
        """See `AnyCompleter.max_length`."""
        return self._max_length

    @property
    def layers(self) -> list[tuple[str, int | None]]:
        """See `AnyCompleter.layers`."""
        return self.session.layers

    def pieces(self, completion: Completion) -> Generator[tuple[Piece, FinishReason | None]]:
        """See `AnyCompleter.pieces`."""
        self._stop()
        self.protect(completion.options)
        ids, completion.reused_tokens = self.place(completion.ids)
        self._held = None
        running = self._running = _Generation(self, completion, ids)
        try:
            yield from running.pieces()
        finally:
            if self._running is running:
                self._stop()

    def score(self, completion: Completion) -> Iterator[tuple[float, tuple[tuple[int, float], ...]]]:
        """See `AnyCompleter.score`."""
        self._stop()
        self._held = None
        self.session.reset()
        ids, alternatives = completion.ids, completion.options.alternatives or 0
        for token, target in pairwise(ids):
            completion.check_not_cancelled()
            logits = self.session.prefill([token])
            # Without numpy, which takes longer to import than most prompts to score.
            most = max(logits)
            total = most + math.log(math.fsum(math.exp(one - most) for one in logits))
            best = nlargest(alternatives, range(len(logits)), key=logits.__getitem__)
            yield logits[target] - total, tuple((index, logits[index] - total) for index in best)
        self._held = list(ids[: self.session.length])

    def close(self) -> None:
        """See `AnyCompleter.close`; a running generation is ended."""
        self._stop()
        super().close()

    def most_dropped(self, first: int) -> int:
        """See `Context.most_dropped`."""
        return self.session.most_dropped(first)

    def _drop(self, count: int, first: int, reaching: int = 0) -> None:
        self.session.shift(count, first)

    def _keep(self, count: int) -> int:
        if count:
            try:
                self.session.rewind(self.session.length - count)
            except InputError:  # a layer has overwritten slots that would be needed again, or keeps a state
                count = 0
        if not count:
            self.session.reset()
        return count

    def _stop(self) -> None:
        """End the generation that is running, and note the tokens that the session holds."""
        running, self._running = self._running, None
        if running is not None:
            self._held = running.end()


class _Generation:
    """A generation of the runner in a thread.

    Attributes:
        completion: What is generated.
        ids: Tokens of the prompt that are fed, without those that were dropped.
        tokens: The tokens so far, without those that were dropped.
    """

    def __init__(self, completer: NativeCompleter, completion: Completion, ids: list[int]) -> None:
        self.completion = completion
        self.ids = ids
        self.tokens: list[int] = []
        self._completer, self._session = completer, completer.session
        # None comes after the last one.
        self._found: SimpleQueue[tuple[Piece, FinishReason | None] | BaseException | None] = SimpleQueue()
        self._logprobs: tuple[float | None, tuple[tuple[int, float], ...]] = (None, ())
        self._failed = self._ended = False
        # Tokens of the response so far.
        self._given = 0
        self._thread = threading.Thread(target=self._generate, name="generation", daemon=True)

    def pieces(self) -> Generator[tuple[Piece, FinishReason | None]]:
        """Yield the pieces, each with the reason why it is the last one, or None."""
        self.completion.when_given_up = self._give_up
        self._thread.start()
        while (found := self._found.get()) is not None and not self.completion.is_given_up:
            if isinstance(found, BaseException):
                raise found
            yield found

    @property
    def length(self) -> int:
        """Number of cached tokens; the newest token of a generation is not cached."""
        return len(self.ids) + len(self.tokens) - 1 if self.tokens else self.completion.reused_tokens

    def end(self) -> list[int] | None:
        """End the generation after the running step or chunk of the prompt, and wait for that.

        Returns:
            The tokens that the session holds then; None if they are not known.
        """
        self.completion.when_given_up = lambda: None
        while self._thread.is_alive():
            self._session.cancel()
            self._thread.join(_AGAIN)
        return None if self._failed else [*self.ids, *self.tokens][: self._session.length]

    def _give_up(self) -> None:
        self._session.cancel()
        self._found.put(None)

    def _generate(self) -> None:
        completion, options = self.completion, self.completion.options
        further: dict[str, Any] = {}
        if options.alternatives is not None:
            further = {"on_logprobs": self._note, "alternatives": options.alternatives}
        if options.changes_logits:
            further |= {
                "logit_bias": options.logit_bias,
                "presence_penalty": options.presence_penalty,
                "frequency_penalty": options.frequency_penalty,
            }
        last: BaseException | None = None
        cached, sampling = completion.reused_tokens, options.sampling
        try:
            while True:
                limit = self._limit()
                self._session.generate(
                    self.ids,
                    self._take,
                    max_new_tokens=limit,
                    sampling=sampling,
                    follower=completion.follower,
                    cached_tokens=cached,
                    draft_tokens=0 if completion.follower else self._completer.draft_tokens,
                    **further,
                )
                if self._ended or limit is None or len(self.tokens) < limit or completion.is_given_up:
                    break
                if options.changes_logits:
                    further["counted_tokens"] = [*further.get("counted_tokens", ()), *self.tokens]
                cached = self._make_room()
                if sampling.seed is not None:
                    # The runner starts its generator again.
                    sampling = replace(sampling, seed=sampling.seed + 1)
        except BaseException as error:
            last, self._failed = error, True
        self._found.put(last)

    def _limit(self) -> int | None:
        """Return the number of tokens until the limit, or until the cache is full if it then drops tokens."""
        limit, most = self.completion.limit, self._completer.max_length
        if self._completer.on_full != "shift" or most is None or limit is None:
            return limit
        return min(limit - self._given, most + 1 - len(self.ids))

    def _make_room(self) -> int:
        """Drop tokens of a full cache, and return the number of tokens of the new prompt that are cached."""
        *fed, newest = [*self.ids, *self.tokens]
        completer = self._completer
        completer._held = fed
        completer.make_room(self._session.prefill)
        kept, completer._held = completer._held, None
        self.ids, self.tokens = [*kept, newest], []
        return len(kept)

    def _take(self, token: int) -> bool:
        self.tokens.append(token)
        self._given += 1
        completes = self.completion.follower is not None and self.completion.follower.ended
        piece, reason = self.completion.take(Choice(token, completes, *self._logprobs))
        self.completion.dropped_tokens = self._completer.dropped_tokens
        self._found.put((piece, reason))
        self._ended = reason is not None
        return reason is None and not self.completion.is_given_up

    def _note(self, logprob: float, alternatives: list[tuple[int, float]]) -> None:
        self._logprobs = logprob, tuple(alternatives)
