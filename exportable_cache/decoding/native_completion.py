"""Completions by the native runner, without torch."""

from __future__ import annotations

import threading
from collections.abc import Generator
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

    Raises:
        InputError: If the model is an encoder-decoder, or the session has no tokenizer.
    """

    def __init__(self, session: NativeSession, split_special_tokens: bool = True) -> None:
        check_decoder(session.has_encoder)
        super().__init__(session.text_tokenizer, session.vocab_size, split_special_tokens)
        self.session = session
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
        completion.reused_tokens = self._rewound(completion.ids)
        self._held = None
        running = self._running = _Generation(self.session, completion)
        try:
            yield from running.pieces()
        finally:
            if self._running is running:
                self._stop()

    def close(self) -> None:
        """See `AnyCompleter.close`; a running generation is ended."""
        self._stop()
        super().close()

    def _rewound(self, ids: list[int]) -> int:
        """Take back what a prompt does not begin with, and return the number of its tokens that the session holds."""
        common = self.common(ids) or 0
        try:
            if common:
                self.session.rewind(self.session.length - common)
        except InputError:  # a layer has overwritten slots that would be needed again, or keeps a state
            common = 0
        if not common:
            self.session.reset()
        return common

    def _stop(self) -> None:
        """End the generation that is running, and note the tokens that the session holds."""
        running, self._running = self._running, None
        if running is not None:
            self._held = running.end()


class _Generation:
    """A generation of the runner in a thread.

    Attributes:
        completion: What is generated.
        tokens: The tokens so far.
    """

    def __init__(self, session: NativeSession, completion: Completion) -> None:
        self.completion = completion
        self.tokens: list[int] = []
        self._session = session
        # None comes after the last one.
        self._found: SimpleQueue[tuple[Piece, FinishReason | None] | BaseException | None] = SimpleQueue()
        self._logprobs: tuple[float | None, tuple[tuple[int, float], ...]] = (None, ())
        self._failed = False
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
        return len(self.completion.ids) + len(self.tokens) - 1 if self.tokens else self.completion.reused_tokens

    def end(self) -> list[int] | None:
        """End the generation after the running step or chunk of the prompt, and wait for that.

        Returns:
            The tokens that the session holds then; None if they are not known.
        """
        self.completion.when_given_up = lambda: None
        while self._thread.is_alive():
            self._session.cancel()
            self._thread.join(_AGAIN)
        return None if self._failed else [*self.completion.ids, *self.tokens][: self._session.length]

    def _give_up(self) -> None:
        self._session.cancel()
        self._found.put(None)

    def _generate(self) -> None:
        completion, options = self.completion, self.completion.options
        further: dict[str, Any] = {"cached_tokens": completion.reused_tokens}
        if options.alternatives is not None:
            further |= {"on_logprobs": self._note, "alternatives": options.alternatives}
        last: BaseException | None = None
        try:
            self._session.generate(
                completion.ids,
                self._take,
                max_new_tokens=completion.limit,
                sampling=options.sampling,
                follower=completion.follower,
                **further,
            )
        except BaseException as error:
            last, self._failed = error, True
        self._found.put(last)

    def _take(self, token: int) -> bool:
        self.tokens.append(token)
        completes = self.completion.follower is not None and self.completion.follower.ended
        piece, reason = self.completion.take(Choice(token, completes, *self._logprobs))
        self._found.put((piece, reason))
        return reason is None and not self.completion.is_given_up

    def _note(self, logprob: float, alternatives: list[tuple[int, float]]) -> None:
        self._logprobs = logprob, tuple(alternatives)
