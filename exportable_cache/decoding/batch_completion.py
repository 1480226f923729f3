"""Completions over the rows of a `ContinuousBatch`, in this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from ..generation.sampling import Sampling
from .batching import ContinuousBatch, Request
from .completion import AnyCompleter, Completion, FinishReason, Piece
from .session_completion import check_completes, chosen_piece, layers_of

if TYPE_CHECKING:
    from ..generation.checkpoint_settings import CheckpointSettings
    from ..session.session import Session


class _Generating(Request):
    """The request of a completion, whose pieces wait until they are taken."""

    def __init__(self, session: Session, completion: Completion, protected: int | None) -> None:
        from ..session.generate import sampler_after
        from ..session.rows import TokenRows

        ids, most = completion.ids, session.max_length
        if protected is not None and most is not None and len(ids) > most:
            # Multiples of one number, so that the next prompt of a conversation mostly begins with the same tokens.
            half = max(1, (most - protected) // 2)
            ids = ids[:protected] + ids[protected + -(-(len(ids) - most) // half) * half :]
        rows = TokenRows.whole(torch.tensor([ids], device=session.device))
        sampler = sampler_after(session, Sampling(**asdict(completion.options.sampling)), rows, completion.limit)
        super().__init__(rows.ids, completion.limit, frozenset(), sampler, protected=protected)
        self.dropped_tokens = len(completion.ids) - len(ids)
        self.completion, self._ends = completion, frozenset(session.generation_settings.ends)
        self.found: deque[tuple[Piece, FinishReason | None] | Exception] = deque()

    def choose(self, logits: torch.Tensor) -> tuple[int, bool]:
        """See `Request.choose`."""
        piece, reason = chosen_piece(self.completion, self.sampler, self._ends, logits)
        self.found.append((piece, reason))
        return piece.token, reason is not None

    def fail(self, error: Exception) -> bool:
        """See `Request.fail`. The error goes to the completion, because the others continue."""
        self.found.append(error)
        return True


class BatchCompleter(AnyCompleter):
    """Completes several prompts at a time over a `ContinuousBatch`; see `AnyCompleter`.

    Taking a piece of one completion runs steps for all, so that each has its own pace; `Completion.poll` runs one. All
    calls come from one thread.

    Args:
        batch: The batch. No other code may use it meanwhile.
        split_special_tokens: See `AnyCompleter`.

    Raises:
        InputError: If the model is an encoder-decoder, is split over processes, or has no tokenizer.
    """

    def __init__(self, batch: ContinuousBatch, split_special_tokens: bool = True) -> None:
        session = batch.decode
        check_completes(session)
        assert session.text_tokenizer is not None
        super().__init__(session.text_tokenizer, session.vocab_size, split_special_tokens)
        self.batch, self.rows = batch, session.batch_size

    @property
    def settings(self) -> CheckpointSettings:
        """See `AnyCompleter.settings`."""
        return self.batch.decode.generation_settings

    @property
    def adapters(self) -> tuple[str, ...]:
        """See `AnyCompleter.adapters`."""
        return self.batch.decode.adapters

    @property
    def length(self) -> int:
        """Number of tokens in the longest row."""
        return self.batch.decode.stepper.state.longest

    @property
    def max_length(self) -> int | None:
        """See `AnyCompleter.max_length`."""
        return self.batch.decode.max_length

    @property
    def layers(self) -> list[tuple[str, int | None]]:
        """See `AnyCompleter.layers`."""
        return layers_of(self.batch.decode)

    def pieces(self, completion: Completion) -> Generator[tuple[Piece, FinishReason | None] | None]:
        """See `AnyCompleter.pieces`."""
        request = _Generating(self.batch.decode, completion, self.kept_by_shifts(completion.options))
        if completion.options.adapter is not None:
            request.adapter = self.batch.decode.named_adapter(completion.options.adapter)
        self.batch.add(request)
        try:
            while not completion.is_given_up:
                if not request.found:
                    self.batch.step()
                    if not request.found:
                        yield None
                    continue
                found, completion.reused_tokens = request.found.popleft(), request.reused_tokens
                completion.dropped_tokens = request.dropped_tokens
                if isinstance(found, Exception):
                    raise found
                yield found
                if found[1] is not None:
                    return
        finally:
            self.batch.free(request)
