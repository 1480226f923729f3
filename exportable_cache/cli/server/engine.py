"""The queue of requests, and its metrics: one session completes them in a separate thread, a request for each row."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from ...common.process.tuning import give_back_heap
from ...decoding.completion import AnyCompleter, Completion, Piece
from ...generation.constraint import Constraint, Follower
from ...models.tokenizers.text import LONG_TEXT

Result = TypeVar("Result")
#: Limit of requests whose constraints are compiled or followed at a time, because each has a process.
_MOST_FORMS = 4
#: Limit of pieces that wait for a client, because a completion without a limit of tokens may never end.
_MOST_PIECES = 2**16


class Busy(Exception):
    """The request queue is full."""


class Engine:
    """Runs completions in order of arrival, as many at a time as the completer has rows.

    A request that is cancelled in the queue, during its prefill or during its response makes room for the next one at
    once: only the running step is finished.

    Args:
        completer: Completer over the session.
        most_waiting: Length of the queue.

    Attributes:
        answered: Number of requests that were completed, or cancelled during the response.
    """

    def __init__(self, completer: AnyCompleter, most_waiting: int) -> None:
        self.completer = completer
        self.answered = 0
        self._most_waiting = most_waiting
        self._waiting = 0
        self._rows = asyncio.Semaphore(completer.rows)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="session")
        # Another thread, because tokenizing a prompt would delay the steps of other requests. Long prompts have their
        # own, because others would wait for them.
        self._beginning = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long-prompts")
        # Constraints are compiled while a request waits, because refusing one may take seconds.
        self._forms = asyncio.Semaphore(_MOST_FORMS)
        self._compiler = ThreadPoolExecutor(_MOST_FORMS, thread_name_prefix="forms")

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return self._waiting

    def check_room(self) -> None:
        """Check that the queue has room.

        Raises:
            Busy: If it is full.
        """
        if self._waiting >= self._most_waiting and (self._rows.locked() or self._forms.locked()):
            raise Busy

    async def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function in the session's thread, between steps."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, function, *arguments)

    async def prepare(self, function: Callable[..., Result], *arguments: Any, characters: int = 0) -> Result:
        """Call a function in a thread that tokenizes prompts, while steps run.

        Args:
            function: The function.
            arguments: Its arguments.
            characters: Length of the prompt, which chooses the thread.
        """
        loop = asyncio.get_running_loop()
        if characters < LONG_TEXT:
            return await loop.run_in_executor(self._beginning, function, *arguments)
        return await loop.run_in_executor(self._long, _in_given_memory, function, *arguments)

    async def run(
        self, begin: Callable[[Follower | None], Completion], form: Constraint | None = None
    ) -> AsyncIterator[tuple[Completion, Piece]]:
        """Yield the pieces of a response, each with a copy of its completion as it was at that piece.

        The completion does not wait for the caller, because a client that does not read would hold a row.

        Args:
            begin: Makes the completion from the follower of `form`.
            form: Constraint of the response.

        Raises:
            Busy: If the queue is full.
        """
        found: asyncio.Queue[tuple[Completion, Piece] | None] = asyncio.Queue(_MOST_PIECES)

        async def feed() -> None:
            try:
                async with aclosing(self._run(begin, form)) as pieces:  # type: ignore[type-var]
                    async for completion, piece in pieces:
                        await found.put((copy.copy(completion), piece))
            except Exception:
                await found.put(None)
                raise
            await found.put(None)

        feeding = asyncio.ensure_future(feed())
        try:
            while (one := await found.get()) is not None:
                yield one
            await feeding
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)

    async def _run(
        self, begin: Callable[[Follower | None], Completion], form: Constraint | None
    ) -> AsyncIterator[tuple[Completion, Piece]]:
        self.check_room()
        loop = asyncio.get_running_loop()
        follower: Follower | None = None
        completion: Completion | None = None
        async with AsyncExitStack() as held:
            self._waiting += 1
            try:
                if form is not None:
                    await held.enter_async_context(self._forms)
                    follower = await loop.run_in_executor(self._compiler, self.completer.follow, form)
                await held.enter_async_context(self._rows)
            finally:
                self._waiting -= 1
            try:
                completion = await self.prepare(begin, follower)
                # One step at a time, because others may have a piece after each.
                while not completion.is_finished:
                    if (piece := await self.call(completion.poll)) is not None:
                        yield completion, piece
            finally:
                # Queued after the running step and before the next request's first one.
                if completion is not None:
                    self.answered += 1
                    # If the worker is feeding the prompt, it stops after the running chunk.
                    completion.give_up()
                    self._worker.submit(completion.close)
                elif follower is not None:
                    follower.close()

    def close(self) -> None:
        """Stop the processes that follow constraints, and the threads after the running step."""
        for pool in (self._compiler, self._beginning, self._long):
            pool.shutdown(wait=False, cancel_futures=True)
        self.completer.close()
        self._worker.shutdown(wait=True, cancel_futures=True)


def _in_given_memory(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function, and give the memory that it has freed back to the system: a long prompt takes hundreds of MB."""
    try:
        return function(*arguments)
    finally:
        give_back_heap()


@dataclass
class Counts:
    """Sums over all requests, for `/metrics`. The names are those of the metrics, without their prefix."""

    generations_total: int = 0
    stopped_total: int = 0
    prompt_tokens_total: int = 0
    cached_prompt_tokens_total: int = 0
    generated_tokens_total: int = 0
    first_token_seconds_sum: float = 0.0
    first_token_seconds_count: int = 0
    generation_seconds_sum: float = 0.0
    generation_seconds_count: int = 0

    def first_token(self, seconds: float) -> None:
        """Count the time to a first token, with that in the queue."""
        self.first_token_seconds_sum += seconds
        self.first_token_seconds_count += 1

    def ended(self, completion: Completion, seconds: float) -> None:
        """Count a completion that ended, or that a client left."""
        self.generations_total += 1
        self.stopped_total += completion.finish_reason is None
        self.prompt_tokens_total += completion.prompt_tokens
        self.cached_prompt_tokens_total += completion.reused_tokens
        self.generated_tokens_total += completion.new_tokens
        self.generation_seconds_sum += seconds
        self.generation_seconds_count += 1


#: Descriptions of the metrics, by name; the kind of each is that of Prometheus.
_METRICS = {
    "generations_total": ("counter", "Generations that ended."),
    "stopped_total": ("counter", "Generations that ended because the client left, or by an error."),
    "prompt_tokens_total": ("counter", "Tokens of prompts."),
    "cached_prompt_tokens_total": ("counter", "Tokens of prompts that the cache held already."),
    "generated_tokens_total": ("counter", "Generated tokens."),
    "first_token_seconds": ("summary", "Seconds from a request to its first token."),
    "generation_seconds": ("summary", "Seconds from a request to its last token."),
    "requests_waiting": ("gauge", "Requests in the queue."),
    "cache_tokens": ("gauge", "Tokens that the cache holds."),
    "cache_tokens_limit": ("gauge", "Tokens that the cache can hold."),
}
METRICS_TYPE = "text/plain; version=0.0.4"


def metrics_text(counts: Counts, engine: Engine) -> str:
    """Return the metrics in Prometheus' text format."""
    values = {**asdict(counts), "requests_waiting": engine.waiting}
    length, most = engine.completer.length, engine.completer.max_length
    values |= {"cache_tokens": length, "cache_tokens_limit": math.inf if most is None else most}
    lines = []
    for name, (kind, about) in _METRICS.items():
        lines += [f"# HELP exportable_cache_{name} {about}", f"# TYPE exportable_cache_{name} {kind}"]
        parts = [f"{name}_sum", f"{name}_count"] if kind == "summary" else [name]
        lines += [f"exportable_cache_{part} {str(values[part]).replace('inf', '+Inf')}" for part in parts]
    return "\n".join([*lines, ""])
