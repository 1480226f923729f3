"""Continuous batching: rows of one decode step start and finish independently, at a fixed batch size."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InputError, UnsupportedModelError
from ..generation.sampling import Sampling
from .pacing import GAP_SECONDS, LONGEST_CHUNK, Pacing
from .prefix_tree import PrefixTree, common_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..generation.sampling import Sampler
    from ..session.persistence import RowCopy
    from ..session.session import Session
    from ..session.state import LoadedAdapter, SequenceState

#: Default limit of the bytes of earlier sequences that are kept.
PREFIX_BYTES = 512 * 2**20


@dataclass(eq=False)
class Request:
    """A prompt and the tokens generated for it.

    Attributes:
        input_ids: The prompt, int64 [1, length].
        max_new_tokens: Most tokens; None for as many as fit.
        stop_tokens: Tokens that end the response.
        sampler: Chooses the tokens.
        tokens: Tokens generated so far.
        finished: True if the response is complete, or the request was freed.
        reused_tokens: Number of tokens of the prompt that a row or the prefix tree held already.
        protected: Number of first tokens that stay when a full row drops others; None to end there.
        dropped_tokens: Number of tokens that were dropped.
        adapter: LoRA adapter of its row; None for the one that the row used when the batch was made.
    """

    input_ids: torch.Tensor
    max_new_tokens: int | None
    stop_tokens: frozenset[int]
    sampler: Sampler
    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    reused_tokens: int = 0
    protected: int | None = None
    dropped_tokens: int = 0
    adapter: LoadedAdapter | None = None

    def choose(self, logits: torch.Tensor) -> tuple[int, bool]:
        """Return the next token after logits [1, vocab], and True if it is the last one."""
        token = int(self.sampler.choose(logits)[0])
        return token, token in self.stop_tokens or len(self.tokens) + 1 == self.max_new_tokens

    def fail(self, error: Exception) -> bool:
        """Return False if `ContinuousBatch.step` must raise the error that ended the request."""
        return False


@dataclass(eq=False)
class _Row:
    """A row of the decode session.

    Attributes:
        index: Index in the session.
        request: The request that it serves; None if it is free.
        held: Tokens in the cache.
        rest: Tokens of the prompt that are not fed yet.
        length: Length of the whole prompt.
        moved: Time at which the row began or ended a request.
        chunks: Feeds the prompt at batch size 1.
        staged: State and contents of the prefill session for this row, while it feeds the prompt of another one.
        key: Number of the adapter that computed `held`; 0 for the model itself.
    """

    index: int
    request: Request | None = None
    held: list[int] = field(default_factory=list)
    rest: list[int] = field(default_factory=list)
    length: int = 0
    moved: int = 0
    chunks: Iterator[torch.Tensor] | None = None
    staged: tuple[SequenceState | None, RowCopy] | None = None
    key: int = 0


class ContinuousBatch:
    """Serves requests in the rows of a batch. A row that finishes takes the next request from the queue.

    With a prefill session, a prompt is fed at batch size 1 and its state is copied to the free row. Its beginning is
    copied from another row, or from a tree of earlier sequences. Without one, prompts are fed in their rows, while the
    other rows wait at their position; a free row keeps what it holds for a prompt that begins with it. This suits
    programs of several rows whose runtime does not give out its cache.

    Prompts are fed in chunks between the steps in which all rows are decoded, each at its own position. Shapes never
    change, so nothing recompiles.

    Args:
        prefill: A session at batch size 1; None to feed prompts in the rows.
        decode: A session of the same model and length with one row per concurrent request.
        prefix_bytes: Limit of the bytes of earlier sequences that are kept; 0 for none. It has no effect without a
            prefill session.

    Attributes:
        prefixes: Earlier sequences, for prompts that begin like them.
        pacing: Decides how much of the prompts is fed between two steps.

    Raises:
        InputError: If the sessions do not match, hold tokens already or do not give out their caches.

    Example:
        >>> batch = ContinuousBatch.from_model(model, max_cache_len=1024, batch_size=8, compile=True)
        >>> requests = [batch.submit(ids, max_new_tokens=100) for ids in prompts]
        >>> for request, token in batch.run(): ...
    """

    def __init__(self, prefill: Session | None, decode: Session, prefix_bytes: int = PREFIX_BYTES) -> None:
        from ..session.checks import check_rows_may_differ

        sessions = {"decode": decode} if prefill is None else {"prefill": prefill, "decode": decode}
        if prefill is not None and prefill.batch_size != 1:
            raise InputError(f"the prefill session must have 1 row, got {prefill.batch_size}; use batch_size=1")
        if decode.stepper.steps_per_launch != 1:
            raise InputError(
                f"steps_per_launch must be 1 for a continuous batch, got {decode.stepper.steps_per_launch}: its rows "
                "start and finish at any step; leave it out"
            )
        if (
            prefill is not None
            and prefill.fingerprint
            and prefill.fingerprint != (decode.fingerprint or prefill.fingerprint)
        ):
            raise InputError(
                "the prefill and the decode session must have the same weights; make both from the same model"
            )
        for name, session in sessions.items():
            if bool(session.length.any()):
                raise InputError(
                    f"the {name} session must be empty, got {session.length.tolist()} tokens, which requests would "
                    "overwrite; reset() it"
                )
        check_rows_may_differ(decode.stepper.equal_rows, "rows of a continuous batch differ in length")
        if prefill is not None:
            _check_same_cache(prefill, decode)
        self.prefill, self.decode = prefill, decode
        self.prefixes = PrefixTree(decode.layers, prefix_bytes)
        self.pacing = Pacing()
        self._waiting: deque[Request] = deque()
        self._rows = [_Row(index) for index in range(decode.batch_size)]
        # Row whose prompt is in the prefill session.
        self._in_prefill: _Row | None = None
        self._now = 0
        self._failed: Exception | None = None
        self._own = decode.stepper.adapters or (decode.named_adapter(None),) * decode.batch_size
        # A number for each adapter, and for each time that it was loaded.
        self._keys: dict[tuple[LoadedAdapter, int], int] = {}

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        max_cache_len: int,
        batch_size: int,
        *,
        compile: bool = False,
        prefix_bytes: int = PREFIX_BYTES,
        **options: Any,
    ) -> ContinuousBatch:
        """Allocate both caches and open both sessions.

        Args:
            model: A causal LM of transformers in eval mode.
            max_cache_len: Tokens that each row can hold.
            batch_size: Number of rows decoded together.
            compile: See `Session.from_model`.
            prefix_bytes: See `ContinuousBatch`.
            **options: See `Session.from_model`.
        """
        from ..models.cache_factory import ExportableCache
        from ..session.session import Session

        caches = [
            ExportableCache.from_model(model, max_cache_len, rows, attn_implementation=None) for rows in (1, batch_size)
        ]
        prefill, decode = (Session.from_model(model, cache, compile=compile, **options) for cache in caches)
        return cls(prefill, decode, prefix_bytes)

    @property
    def active(self) -> int:
        """Number of rows in use."""
        return sum(row.request is not None for row in self._rows)

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
        from ..session.generate import sampler_after
        from ..session.rows import TokenRows

        self.decode.check_same("submit", input_ids=input_ids, options=(max_new_tokens, sampling, stop))
        ends = self._checked(input_ids, max_new_tokens, stop)
        rows = TokenRows.whole(input_ids)
        longest, most = self.decode.max_length, max_new_tokens
        if most is None:
            most = self.decode.generation_settings.limit(input_ids.shape[1])
        if longest is not None:
            # One more, because the newest token needs no slot.
            fits = longest + 1 - input_ids.shape[1]
            most = fits if most is None else min(most, fits)
        sampler = sampler_after(self.decode, self.decode.agreed(sampling or Sampling()), rows, most)
        request = Request(input_ids, most, frozenset(ends), sampler)
        self.add(request)
        return request

    def add(self, request: Request) -> None:
        """Add a request to the queue, whose prompt the caller has checked."""
        self._waiting.append(request)

    def fork(self, request: Request, max_new_tokens: int | None = None, sampling: Sampling | None = None) -> Request:
        """Add a request that continues from the prompt of another one and the tokens that it has so far.

        With a prefill session, what the row of `request` holds is copied and not computed again.

        Raises:
            InputError, CacheFullError: See `submit`.
        """
        tokens = request.input_ids.new_tensor([request.tokens])
        ends = request.stop_tokens - set(self.decode.generation_settings.ends)
        return self.submit(torch.cat([request.input_ids, tokens], dim=1), max_new_tokens, sampling, sorted(ends))

    def free(self, request: Request) -> None:
        """End a request before the next step, in the queue or in a row. A finished one does not change."""
        if request.finished:
            return
        request.finished = True
        row = next((row for row in self._rows if row.request is request), None)
        if row is not None:
            self._release(row)
        else:
            self._waiting.remove(request)

    def step(self) -> list[tuple[Request, int]]:
        """Decode all rows once, admit requests to free rows, and feed chunks of prompts.

        Returns:
            One token per request that was served: the first of those whose prompt was fed, the next of the others.

        Raises:
            InputError, NonFiniteLogitsError: If no token can be chosen for a request. It is freed then, and the tokens
                of the others are in `Request.tokens`.
        """
        self._failed = None
        # Before the rows move, because one with states can be forked only where it is.
        self._admit_all()
        pacing = self.pacing
        start = pacing.clock()
        given = self._decode_rows()
        if given:
            pacing.note_step(pacing.clock() - start)
        pacing.begin()
        self._admit_all()
        while any(row.rest for row in self._rows):
            chunk = self._feed_chunk()
            if chunk is None:  # the prompts are fed by the steps that decode the rows
                break
            given += chunk
            # Ranks must run the same steps, at any speed.
            if self.decode.stepper.ranks is None and not pacing.has_time():
                break
        if self._failed is not None:
            raise self._failed
        return given

    def run(self) -> Iterator[tuple[Request, int]]:
        """Yield each token with its request, until all requests are finished."""
        while self._waiting or self.active:
            yield from self.step()

    def pace(self, gap: float = GAP_SECONDS) -> int:
        """Measure how long chunks of a prompt take, and choose their length; return it.

        Later on chunks get shorter, and up to this length again, so that a chunk and a step take less than `gap`
        together. Other chunks round differently. The batch must be empty.

        Args:
            gap: Longest time in seconds between two tokens of a response while prompts are fed. A step and a chunk of
                4 tokens may take longer.

        Raises:
            InputError: If a row is in use, the gap is not a positive number, or the model is split over processes.
        """
        if not (isinstance(gap, int | float) and 0 < gap < math.inf):
            raise InputError(f"gap must be a positive number of seconds, got {gap!r}; use {GAP_SECONDS}")
        if self.active:
            raise InputError(f"pace() overwrites rows, of which {self.active} are in use; call it before requests")
        if self.decode.stepper.ranks is not None:
            raise InputError(
                "pace() must be called for a model in one process, got one that is split, because each process would "
                "measure another length; leave it out"
            )
        session = self.prefill or self.decode
        stepper = session.stepper

        def chunk(size: int) -> None:
            stepper.most_a_chunk = size
            ids = torch.zeros(session.batch_size, size, dtype=torch.int64, device=session.device)
            session.prefill(ids).sum().item()
            session.reset()

        stepper.most_a_chunk = None
        longest = max(stepper.chunk_sizes(session.max_length or LONGEST_CHUNK))
        stepper.most_a_chunk = chosen = self.pacing.measure(chunk, longest, gap)
        return chosen

    # -- rows --------------------------------------------------------------------------------------------------------

    def _checked(self, input_ids: torch.Tensor, max_new_tokens: int | None, stop: Sequence[int]) -> list[int]:
        """Check a prompt and its options as those of one row, and return the tokens that end the response."""
        if self.prefill is not None:
            return self.prefill.check_request(input_ids, max_new_tokens, stop)
        from ..session.checks import ProgramLimits, check_ids

        limits = ProgramLimits(1, self.decode.vocab_size, self.decode.device)
        check_ids("input_ids", input_ids, ("batch", "length"), limits)
        return self.decode.check_request(input_ids.expand(self.decode.batch_size, -1), max_new_tokens, stop)

    def _decode_rows(self) -> list[tuple[Request, int]]:
        """Feed the newest token of each row, and the next one of prompts that are fed by these steps."""
        stepper = self.decode.stepper
        by_steps = self._fed_by_steps()
        fed = [row for row in self._rows if row.request is not None and (not row.rest or row in by_steps)]
        if not fed:
            return []
        logits = self._step(fed, 1)
        if logits is None:
            return []
        for row in fed:
            if not row.rest and stepper.crossed(row.index):
                # Computed again where RoPE's factors change, because transformers' `generate` does so.
                self._start(row, row.held, reuse=False)
        return self._give_all(fed, logits)

    def _step(self, fed: list[_Row], size: int) -> torch.Tensor | None:
        """Feed the next `size` tokens of these rows, and return logits [batch, vocab]; None if the step fails."""
        stepper = self.decode.stepper
        tokens = [[0] * size for _ in self._rows]
        for row in fed:
            assert row.request is not None
            tokens[row.index] = row.rest[:size] or row.request.tokens[-1:]
        self._keep_free_rows(size)
        mask = torch.tensor([row in fed for row in self._rows])
        lengths = None
        if stepper.rope is not None and stepper.state.rope is not None:
            # By the length of a whole prompt, because its chunks must give the same as one step.
            ends = stepper.state.length + size
            ends = torch.maximum(ends, torch.tensor([row.length if row in fed else 0 for row in self._rows]))
            lengths = stepper.rope.after(stepper.state.rope.lengths, ends)
        try:
            with stepper.guard:
                logits = stepper.step(torch.tensor(tokens, device=self.decode.device), rows=mask, lengths=lengths)
        except Exception as error:
            # The step may have written to every row.
            self._fail([row for row in self._rows if row.request is not None], error)
            for row in self._rows:
                row.held = []
            self.decode.reset()
            return None
        for row in fed:
            row.held += tokens[row.index]
            del row.rest[:size]
        return logits

    def _give_all(self, fed: list[_Row], logits: torch.Tensor) -> list[tuple[Request, int]]:
        """Choose the next token of the rows whose prompt is complete, from logits [batch, vocab]."""
        found = [self._give(row, logits[row.index : row.index + 1]) for row in fed if not row.rest]
        return [one for one in found if one is not None]

    def _give(self, row: _Row, logits: torch.Tensor) -> tuple[Request, int] | None:
        """Choose the next token of a row from logits [1, vocab]; None if that fails."""
        request = row.request
        assert request is not None
        try:
            token, is_last = request.choose(logits)
        except Exception as error:
            self._fail([row], error)
            return None
        request.tokens.append(token)
        limit = self.decode.max_length
        is_full = not is_last and limit is not None and len(row.held) >= limit
        if is_full and request.protected is not None and len(row.held) - request.protected > 1:
            self._make_room(row, request.protected)
        elif is_last or is_full:
            request.finished = True
            self._release(row)
        return request, token

    def _make_room(self, row: _Row, first: int) -> None:
        """Drop half of a full row's tokens after the first ones. Rows without a shift are fed the other tokens again.

        A shift moves all rows of a session, so the row is copied to the prefill session for it.
        """
        from ..session.persistence import put_row, row_of

        request, held, session = row.request, row.held, self.prefill
        assert request is not None
        count = (len(held) - first) // 2
        most = 0 if session is None else self._put_aside(session, row_of(self.decode, row.index), first)
        if session is not None and most > 0:
            count = min(count, most)
            with session.stepper.guard:
                session.stepper.drop(first, count)
            put_row(self.decode, row.index, row_of(session, 0))
            row.held = held[:first] + held[first + count :]
        else:
            self._start(row, [*held[:first], *held[first + count :], *request.tokens[-1:]], reuse=False)
        request.dropped_tokens += count

    def _put_aside(self, session: Session, copied: RowCopy, first: int) -> int:
        """Put a row into the prefill session, and return the most tokens that can be dropped from `first` on."""
        from ..session.persistence import put_row

        try:
            session.stepper.check_shifts()
        except (InputError, UnsupportedModelError):
            return 0
        self._leave_prefill(session)
        put_row(session, 0, copied)
        return session.stepper.state.most_dropped(first, session.layers)

    def _leave_prefill(self, session: Session) -> None:
        """Empty the prefill session; the row whose prompt it holds gets its contents back later."""
        from ..session.persistence import row_of

        stepper = session.stepper
        if self._in_prefill is not None:
            self._in_prefill.staged = stepper.state, row_of(session, 0).cloned()
        stepper.move_to(stepper.state.emptied())
        self._in_prefill = None

    # -- rows --------------------------------------------------------------------------------------------------------

    def _fail(self, rows: list[_Row], error: Exception) -> None:
        """End the requests of rows, whose contents are not used again."""
        for row in rows:
            request, row.held = row.request, []
            assert request is not None
            request.finished = True
            if not request.fail(error):
                # Raised after the other rows have got their tokens.
                self._failed = error
            self._release(row)

    def _admit_all(self) -> None:
        """Give free rows to the first requests of the queue."""
        while self._waiting and (free := [row for row in self._rows if row.request is None]):
            request = self._waiting.popleft()
            ids = request.input_ids[0].tolist()
            row = max(free, key=lambda one: self._merit(one, ids, self._key(self._adapter_of(request, one))))
            row.request = request
            request.reused_tokens = self._start(row, ids)

    def _adapter_of(self, request: Request, row: _Row) -> LoadedAdapter:
        return request.adapter or self._own[row.index]

    def _use(self, row: _Row, adapter: LoadedAdapter) -> None:
        """Decode a row with an adapter."""
        used = [*(self.decode.stepper.adapters or self._own)]
        used[row.index] = adapter
        self.decode.stepper.adapters = tuple(used)

    def _key(self, adapter: LoadedAdapter) -> int:
        return self._keys.setdefault((adapter, adapter.loads), len(self._keys) + 1) if adapter.slot else 0

    def _in_tree(self, row: _Row, ids: list[int]) -> list[int]:
        """Return tokens as the prefix tree has them: those of each adapter are others."""
        return [token + row.key * self.decode.vocab_size for token in ids] if row.key else ids

    def _merit(self, row: _Row, ids: list[int], key: int) -> tuple[int, bool, int]:
        """Return what orders free rows for a prompt: tokens that can be used again, emptiness, and time of last use."""
        common = _common(row, ids) if row.key == key else 0
        # A row that would lose more than it saves is kept for its own sequence.
        return common if 2 * common >= len(row.held) else 0, not row.held, -row.moved

    def _start(self, row: _Row, ids: list[int], reuse: bool = True) -> int:
        """Begin the prompt of a row, and return the number of its tokens that need not be fed."""
        stepper, kept, ever = self.decode.stepper, 0, 0
        row.chunks = row.staged = None
        assert row.request is not None
        adapter = self._adapter_of(row.request, row)
        if (key := self._key(adapter)) != row.key:
            # Keys and values of another adapter.
            row.key, row.held = key, []
        self._use(row, adapter)
        # Where RoPE changes with the length, the beginning of a longer prompt may have other keys.
        if reuse and stepper.rope is None:
            if self.prefill is not None:
                kept = self._stage_best(row, ids)
            elif self._can_take_back(row, len(row.held) - _common(row, ids)):
                kept = _common(row, ids)
                # Rings have lost tokens to later ones, even if those are taken back.
                ever = int(stepper.state.max_len_ever[row.index])
        # The row's own contents come with the last chunk from a prefill session.
        at = kept if self.prefill is None else 0
        stepper.set_length(row.index, at, ever if at else 0)
        self._now += 1
        row.held, row.rest, row.length, row.moved = ids[:kept], ids[kept:], len(ids), self._now
        return kept

    def _release(self, row: _Row) -> None:
        """Free a row; what it holds is kept for prompts that begin with it."""
        from ..session.persistence import row_of

        if self.prefill is not None:
            is_whole = len(row.held) == int(self.decode.length[row.index])
            if is_whole and row.held and self.decode.stepper.rope is None:
                self.prefixes.add(self._in_tree(row, row.held), row_of(self.decode, row.index))
            row.held = []
            if self._in_prefill is row:
                self._in_prefill = None
        if not row.held:
            self.decode.stepper.set_length(row.index, 0)
        # Steps without adapters are faster.
        self._use(row, self._own[row.index])
        self._now += 1
        row.request, row.rest, row.chunks, row.staged, row.moved = None, [], None, None, self._now

    def _can_take_back(self, row: _Row, tokens: int) -> bool:
        """Return True if a row can lose its newest tokens."""
        state = self.decode.stepper.state
        length, ever = int(state.length[row.index]), int(state.max_len_ever[row.index])
        return tokens == 0 or all(layer.max_rollback(length, ever) >= tokens for layer in self.decode.layers)

    def _can_wait(self, row: _Row, size: int) -> bool:
        """Return True if a row keeps its tokens while others are fed `size`, which are written after them."""
        state = self.decode.stepper.state
        if not row.held:
            return True
        end = int(state.length[row.index]) + size
        ever, limit = max(end, int(state.max_len_ever[row.index])), self.decode.max_length
        return (limit is None or end <= limit) and all(
            layer.max_rollback(end, ever) >= size for layer in self.decode.layers
        )

    def _keep_free_rows(self, size: int) -> None:
        """Shorten or empty the free rows that cannot wait while others are fed `size` tokens."""
        for row in self._rows:
            if row.request is not None or self._can_wait(row, size):
                continue
            limit, ever = self.decode.max_length, int(self.decode.stepper.state.max_len_ever[row.index])
            above = 0 if limit is None else len(row.held) + size - limit
            if above > 0 and self._can_take_back(row, above) and above < len(row.held):
                del row.held[-above:]
                self.decode.stepper.set_length(row.index, len(row.held), ever)
            if not self._can_wait(row, size):
                row.held = []
                self.decode.stepper.set_length(row.index, 0)

    def _feed_chunk(self) -> list[tuple[Request, int]] | None:
        """Feed a chunk of the prompts, and note its time; None if they are fed by the steps that decode the rows."""
        pacing, stepper = self.pacing, (self.prefill or self.decode).stepper
        if pacing.limit is not None and stepper.ranks is None:
            stepper.most_a_chunk = pacing.limit
        start, before = pacing.clock(), [len(row.rest) for row in self._rows]
        given = self._feed_rows() if self.prefill is None else self._feed_prefill(self.prefill)
        if fed := max(count - len(row.rest) for count, row in zip(before, self._rows, strict=True)):
            if pacing.limit is not None and self.decode.device.type != "cpu":
                # Or the time would be that of the launches, and the next step would wait for the chunk.
                torch.accelerator.synchronize(self.decode.device)
            pacing.note_chunk(pacing.clock() - start, fed)
        return given

    # -- prompts in their rows ---------------------------------------------------------------------------------------

    def _next_chunk(self) -> tuple[int, list[_Row]]:
        """Return the size of the next chunk and the rows that take it; 1 and no rows if there is none."""
        sizes = {row: self.decode.stepper.chunk_sizes(len(row.rest))[0] for row in self._rows if row.rest}
        longer = [row for row in sizes if sizes[row] > 1]
        if not longer:
            return 1, []
        size = sizes[min(longer, key=lambda row: row.moved)]
        fed = [row for row in longer if sizes[row] == size]
        waiting = [row for row in self._rows if row.request is not None and row not in fed]
        return (size, fed) if all(self._can_wait(row, size) for row in waiting) else (1, [])

    def _fed_by_steps(self) -> list[_Row]:
        """Return the rows whose prompt is fed by the steps that decode the others."""
        if self.prefill is not None:
            return []
        feeding = [row for row in self._rows if row.rest]
        if feeding and not self._next_chunk()[1]:
            return feeding
        return [row for row in feeding if self.decode.stepper.chunk_sizes(len(row.rest))[0] == 1]

    def _feed_rows(self) -> list[tuple[Request, int]] | None:
        """Feed a chunk of the prompts that take chunks of one size; None if there is none."""
        size, fed = self._next_chunk()
        if not fed:
            return None
        logits = self._step(fed, size)
        return [] if logits is None else self._give_all(fed, logits)

    # -- prompts at batch size 1 -------------------------------------------------------------------------------------

    def _stage_best(self, row: _Row, ids: list[int]) -> int:
        """Stage the longest beginning of a prompt that a row or the tree holds, and return its length."""
        from ..session.persistence import row_of

        known = self._in_tree(row, ids[:-1])
        kept, best = self.prefixes.common(known), None
        for one in self._rows:
            if one.key != row.key:
                continue
            common, length = _common(one, ids), int(self.decode.length[one.index])
            # Unfinished prompts have nothing in the decode session.
            if common > kept and length == len(one.held) and self._can_take_back(one, length - common):
                kept, best = common, one
        copied = self.prefixes.read(known) if best is None else row_of(self.decode, best.index, kept).cloned()
        row.staged = None if copied is None else (None, copied)
        return kept

    def _feed_prefill(self, session: Session) -> list[tuple[Request, int]]:
        """Feed a chunk of a prompt at batch size 1. The state of a finished prompt goes to its row."""
        from ..session.persistence import put_row, row_of
        from ..session.rows import Prompt, TokenRows

        stepper, feeding = session.stepper, [row for row in self._rows if row.rest]
        self._now += 1
        # The first and the shortest in turn, so that neither short nor long prompts wait for all others.
        row = min(feeding, key=lambda one: one.moved if self._now % 2 else len(one.rest))
        if self._in_prefill is not row:
            self._leave_prefill(session)
            state, copied = row.staged or (None, None)
            if copied is not None:
                put_row(session, 0, copied)
            if state is not None:
                stepper.move_to(state)
            self._in_prefill, row.staged = row, None
        stepper.adapters = self.decode.stepper.adapters[row.index : row.index + 1]
        try:
            with stepper.guard:
                if row.chunks is None:
                    rows = TokenRows.whole(torch.tensor([row.rest], device=session.device))
                    row.chunks = stepper.chunks(session.stages.steps(Prompt(rows), stepper))
                logits = next(row.chunks)
        except Exception as error:
            self._fail([row], error)
            session.reset()
            return []
        fed = int(stepper.state.length[0]) - len(row.held)
        row.held += row.rest[:fed]
        del row.rest[:fed]
        if row.rest:
            return []
        put_row(self.decode, row.index, row_of(session, 0))
        self._in_prefill = row.chunks = None
        given = self._give(row, logits)
        return [] if given is None else [given]


def _common(row: _Row, ids: list[int]) -> int:
    """Return the number of a prompt's first tokens that a row holds, except the last, whose logits are needed."""
    return min(common_length(row.held, ids), len(ids) - 1)


def _check_same_cache(prefill: Session, decode: Session) -> None:
    """Check that a row of one session fits the other.

    Raises:
        InputError: If it does not.
    """
    from ..session.persistence import runner_state

    source, target = runner_state(prefill), runner_state(decode)
    for name, tensor in target.items():
        if name not in source or source[name].shape[1:] != tensor.shape[1:] or source[name].dtype != tensor.dtype:
            given = list(source[name].shape) if name in source else "missing"
            raise InputError(
                f"{name} is {given} in the prefill session and {list(tensor.shape)} in the decode session; "
                "allocate both caches for the same model, length and dtype"
            )
