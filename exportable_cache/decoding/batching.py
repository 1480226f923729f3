"""Continuous batching: rows of one decode step start and finish independently, at a fixed batch size."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InputError
from ..generation.sampling import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..generation.sampling import Sampler
    from ..session.session import Session


@dataclass(eq=False)
class Request:
    """A prompt and the tokens generated for it.

    Attributes:
        input_ids: The prompt, int64 [1, length].
        max_new_tokens: Most tokens; None for as many as fit.
        stop_tokens: Tokens that end the response.
        sampler: Chooses the tokens.
        tokens: Tokens generated so far.
        finished: True if the response is complete.
    """

    input_ids: torch.Tensor
    max_new_tokens: int | None
    stop_tokens: frozenset[int]
    sampler: Sampler
    tokens: list[int] = field(default_factory=list)
    finished: bool = False


class ContinuousBatch:
    """Serves requests in the rows of a batch. A row that finishes takes the next request from the queue.

    Prompts are prefilled one at a time into a cache of batch size 1, whose state is copied to the free row. All rows
    are decoded together, each at its own position. Shapes never change, so nothing recompiles.

    Args:
        prefill: A session at batch size 1.
        decode: A session of the same model and length with one row per concurrent request.

    Raises:
        InputError: If the sessions do not match, hold tokens already or do not give out their caches.

    Example:
        >>> batch = ContinuousBatch.from_model(model, max_cache_len=1024, batch_size=8, compile=True)
        >>> requests = [batch.submit(ids, max_new_tokens=100) for ids in prompts]
        >>> for request, token in batch.run(): ...
    """

    def __init__(self, prefill: Session, decode: Session) -> None:
        from ..session.checks import check_rows_may_differ
        from ..session.persistence import runner_state

        if prefill.batch_size != 1:
            raise InputError(f"the prefill session must have 1 row, got {prefill.batch_size}; use batch_size=1")
        if decode.stepper.steps_per_launch != 1:
            raise InputError(
                f"steps_per_launch must be 1 for a continuous batch, got {decode.stepper.steps_per_launch}: its rows "
                "start and finish at any step; leave it out"
            )
        if prefill.fingerprint and decode.fingerprint and prefill.fingerprint != decode.fingerprint:
            raise InputError(
                "the prefill and the decode session must have the same weights; make both from the same model"
            )
        for name, session in (("prefill", prefill), ("decode", decode)):
            if bool(session.length.any()):
                raise InputError(
                    f"the {name} session must be empty, got {session.length.tolist()} tokens, which requests would "
                    "overwrite; reset() it"
                )
        check_rows_may_differ(decode.stepper.equal_rows, "rows of a continuous batch differ in length")
        source, target = runner_state(prefill), runner_state(decode)
        for name, tensor in target.items():
            if name not in source or source[name].shape[1:] != tensor.shape[1:] or source[name].dtype != tensor.dtype:
                given = list(source[name].shape) if name in source else "missing"
                raise InputError(
                    f"{name} is {given} in the prefill session and {list(tensor.shape)} in the decode session; "
                    "allocate both caches for the same model, length and dtype"
                )
        self.prefill = prefill
        self.decode = decode
        self._waiting: deque[Request] = deque()
        self._rows: list[Request | None] = [None] * decode.batch_size

    @classmethod
    def from_model(
        cls, model: PreTrainedModel, max_cache_len: int, batch_size: int, *, compile: bool = False, **options: Any
    ) -> ContinuousBatch:
        """Allocate both caches and open both sessions.

        Args:
            model: A causal LM of transformers in eval mode.
            max_cache_len: Tokens that each row can hold.
            batch_size: Number of rows decoded together.
            compile: See `Session.from_model`.
            **options: See `Session.from_model`.
        """
        from ..models.cache_factory import ExportableCache
        from ..session.session import Session

        caches = [
            ExportableCache.from_model(model, max_cache_len, rows, attn_implementation=None) for rows in (1, batch_size)
        ]
        return cls(*(Session.from_model(model, cache, compile=compile, **options) for cache in caches))

    @property
    def active(self) -> int:
        """Number of rows in use."""
        return sum(request is not None for request in self._rows)

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._waiting)

    def submit(
        self,
        input_ids: torch.Tensor,
        max_new_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[int] = (),
    ) -> Request:
        """Add a prompt to the queue; others may be running.

        Args:
            input_ids: int64 [1, length].
            max_new_tokens: Most tokens; None for the checkpoint's limit, or else as many as fit.
            sampling: Settings of the sampler; greedy by default.
            stop: Token ids that end the response, besides the model's end tokens.

        Raises:
            InputError: If an argument is wrong.
            CacheFullError: If the prompt does not fit a row, or not with `max_new_tokens`.
        """
        from ..session.generate import default_limit, sampler_after
        from ..session.rows import TokenRows

        self.decode.check_same("submit", input_ids=input_ids, options=(max_new_tokens, sampling, stop))
        ends = self.prefill.check_request(input_ids, max_new_tokens, stop)
        rows = TokenRows.whole(input_ids)
        longest, most = self.decode.max_length, default_limit(self.decode.generation_settings, max_new_tokens, rows)
        if longest is not None:
            # One more, because the newest token needs no slot.
            fits = longest + 1 - input_ids.shape[1]
            most = fits if most is None else min(most, fits)
        sampler = sampler_after(self.decode, self.decode.agreed(sampling or Sampling()), rows, most)
        request = Request(input_ids, most, frozenset(ends), sampler)
        self._waiting.append(request)
        return request

    def step(self) -> list[tuple[Request, int]]:
        """Decode all rows once, and admit requests to free rows.

        Returns:
            One token per request that was served: the first of those admitted, the next of the others.
        """
        given: list[tuple[Request, int]] = []
        if self.active:
            given += self._give_all(self.decode.decode(self._newest()))
        return given + self._admit_all()

    def _newest(self) -> torch.Tensor:
        """Return the tokens to feed next, int64 [batch_size]; rows without a request are fed, too."""
        return torch.tensor([one.tokens[-1] if one else 0 for one in self._rows], device=self.decode.device)

    def _give_all(self, logits: torch.Tensor) -> list[tuple[Request, int]]:
        given = []
        for row, request in enumerate(self._rows):
            if request is not None:
                row_logits = logits[row : row + 1]
                if self.decode.stepper.crossed(row):
                    # Recomputed where RoPE's factors change, because transformers' `generate` does so.
                    tokens = request.input_ids.new_tensor([request.tokens])
                    row_logits = self._prefill(row, torch.cat([request.input_ids, tokens], dim=1))
                given.append((request, self._give(row, request, row_logits)))
        for row, request in enumerate(self._rows):
            if request is None:
                self.decode.stepper.set_length(row, 0)
        return given

    def _admit_all(self) -> list[tuple[Request, int]]:
        given = []
        for row, request in enumerate(self._rows):
            if request is None and self._waiting:
                admitted = self._waiting.popleft()
                given.append((admitted, self._admit(row, admitted)))
        return given

    def run(self) -> Iterator[tuple[Request, int]]:
        """Yield each token with its request, until all requests are finished."""
        while self._waiting or self.active:
            yield from self.step()

    def _admit(self, row: int, request: Request) -> int:
        logits = self._prefill(row, request.input_ids)
        self._rows[row] = request
        return self._give(row, request, logits)

    def _prefill(self, row: int, ids: torch.Tensor) -> torch.Tensor:
        """Feed int64 [1, length] from position 0 into a row, and return logits [1, vocab]."""
        from ..session.persistence import runner_state

        self.prefill.reset()
        logits = self.prefill.prefill(ids)
        source = runner_state(self.prefill)
        for name, tensor in runner_state(self.decode).items():
            tensor[row].copy_(source[name][0])
        self.decode.stepper.set_length(row, ids.shape[1])
        return logits

    def _give(self, row: int, request: Request, logits: torch.Tensor) -> int:
        token = int(request.sampler.choose(logits)[0])
        request.tokens.append(token)
        limit = self.decode.max_length
        is_full = limit is not None and int(self.decode.length[row]) >= limit
        if token in request.stop_tokens or len(request.tokens) == request.max_new_tokens or is_full:
            request.finished = True
            self._rows[row] = None
            # At position 0, because a row without a request is fed too and must have room.
            self.decode.stepper.set_length(row, 0)
        return token
