"""Measure a session's speed: prefill, decode at several positions, and the peak memory of the process."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median, quantiles, stdev
from typing import TYPE_CHECKING, Any, Protocol

from ..common.progress import silent
from ..errors import InputError
from ..generation.sampling_options import check_seed
from ..program.inputs.kinds import text_after
from ..session.native import NativeSession

if TYPE_CHECKING:
    import torch

    from ..common.progress import Progress
    from ..session.session import Session

_PREFILL_RUNS = 5
_WARM_UP_STEPS = 3


@dataclass(frozen=True)
class DecodeTiming:
    """Timing of decode steps from one position: `DecodeTiming(256, 32, 4.1, 4.6)`.

    Attributes:
        position: Tokens in the cache before the first timed step.
        steps: Number of timed steps.
        median_ms: Median step in milliseconds.
        p90_ms: 90th percentile in milliseconds.
    """

    position: int
    steps: int
    median_ms: float
    p90_ms: float


@dataclass(frozen=True)
class BenchReport:
    """The result of `bench`.

    Attributes:
        batch_size: Rows per step.
        prompt_length: Tokens per row of the timed prompt.
        prefill_tokens_per_second: Tokens of all rows per second; median of several runs from an empty cache.
        decode: One timing per position, ascending.
        peak_rss_bytes: Peak physical memory of the process, including imports and loading; None if the system does not
            report it.
        threads: Number of torch threads; a target may use other threads. None for the native runner, whose default is
            the number of cores.
        peak_device_bytes: Peak memory that torch allocated on a GPU of NVIDIA; None elsewhere.
        runtime: What ran the program: "native" for the native runner, "torch" for a session.
    """

    batch_size: int
    prompt_length: int
    prefill_tokens_per_second: float
    decode: tuple[DecodeTiming, ...]
    peak_rss_bytes: int | None
    threads: int | None
    runtime: str = "torch"
    peak_device_bytes: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {**asdict(self), "decode": [asdict(timing) for timing in self.decode]}


@dataclass(frozen=True)
class SpeedRow:
    """A row of `bench_rows`: `SpeedRow("pp512", 512, 0, (812.0, 820.5))`.

    Attributes:
        test: Name, as in llama-bench: "pp512" is a prompt of 512 tokens, "tg128" are 128 generated tokens.
        prompt: Tokens of the prompt, per row.
        generated: Tokens that are decoded one by one from an empty cache, per row.
        samples: Tokens of all rows per second, in each run.
    """

    test: str
    prompt: int
    generated: int
    samples: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean tokens per second."""
        return fmean(self.samples)

    @property
    def deviation(self) -> float:
        """Standard deviation of the runs; 0 for a single run."""
        return stdev(self.samples) if len(self.samples) > 1 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON values, under the names of llama-bench."""
        return {
            "test": self.test,
            "n_prompt": self.prompt,
            "n_gen": self.generated,
            "avg_ts": self.mean,
            "stddev_ts": self.deviation,
            "samples_ts": list(self.samples),
        }


def bench_rows(
    path: str | Path | Session | NativeSession,
    pp: Sequence[int] = (512,),
    tg: Sequence[int] = (128,),
    *,
    runs: int = 5,
    progress: Progress | None = None,
) -> tuple[SpeedRow, ...]:
    """Time prompts and decoding as llama-bench does: each run starts from an empty cache, with random tokens.

    One run of each goes before and is not counted. The session is reset before and after.

    Args:
        path: See `bench`.
        pp: Lengths of prompts.
        tg: Numbers of tokens that are decoded one by one.
        runs: Counted runs of each.
        progress: Called as the work proceeds.

    Raises:
        InputError: If a number is not positive, or does not fit the cache.
        BundleError: See `load`.
    """
    subject = subject_of(path)
    for name, counts in (("pp", pp), ("tg", tg)):
        for count in counts:
            _check(name, count, 1, subject.max_length)
    _check("runs", runs, 1, None)
    report = progress or silent
    tests = [*((count, 0) for count in pp), *((0, count) for count in tg)]
    rows = []
    try:
        for prompt, new in tests:
            test = f"pp{prompt}" if prompt else f"tg{new}"
            samples = []
            for run in range(runs + 1):
                report(f"timing {test}", run, runs + 1)
                subject.restart()
                seconds = _time_prompt(subject, prompt) if prompt else _time_generation(subject, new)
                samples.append(subject.batch_size * (prompt + new) / seconds)
            rows.append(SpeedRow(test, prompt, new, tuple(samples[1:])))
    finally:
        subject.reset()
    return tuple(rows)


def bench(
    path: str | Path | Session | NativeSession,
    *,
    positions: Iterable[int] | None = None,
    steps: int = 32,
    prompt_length: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> BenchReport:
    """Time prefill and decode with random tokens. The session is reset before and after.

    An encoder gets a random input of its maximum length before each run, outside the timed parts.

    Args:
        path: Folder of a bundle, which torch's runtime runs, or a session.
        positions: Numbers of tokens in the cache at which decoding is timed. By default five between empty and full, or
            up to 1024 if the cache has no limit.
        steps: Timed steps at each position.
        prompt_length: Tokens of the timed prompt; one chunk of prefill by default.
        seed: Seed of the tokens.
        progress: Called as the work proceeds.

    Raises:
        InputError: If a number is not positive, a position and its steps do not fit the cache, or the seed has more
            than 64 bits.
        BundleError: See `load`.
    """
    check_seed(seed)
    subject = subject_of(path, seed)
    report = progress or silent
    limit = subject.max_length
    # Warm-up steps need slots, too.
    needed = steps + _WARM_UP_STEPS
    _check("steps", steps, 1, None if limit is None else limit - _WARM_UP_STEPS)
    if prompt_length is None:
        prompt_length = subject.chunk
    _check("prompt_length", prompt_length, 1, limit)
    if positions is None:
        positions = _spread(1024 if limit is None else limit - needed)
    positions = sorted(set(positions))
    if not positions:
        raise InputError("positions must not be empty; pass at least one, such as 0")
    for position in positions:
        _check("positions", position, 0, None if limit is None else limit - needed)

    try:
        seconds = []
        # Ignore the first run, because it includes allocations and compiling.
        for run in range(_PREFILL_RUNS + 1):
            report("timing prefill", run, _PREFILL_RUNS + 1)
            subject.restart()
            seconds.append(_time_prompt(subject, prompt_length))
        timings = []
        subject.restart()
        held = 0
        for index, position in enumerate(positions):
            report("timing decode", index, len(positions))
            if position < held:
                # The steps of the previous position went past this one.
                subject.restart()
                held = 0
            if position > held:
                subject.prefill(subject.tokens(position - held))
            timings.append(_time_decode(subject, position, steps))
            held = position + needed
    finally:
        subject.reset()
    return BenchReport(
        batch_size=subject.batch_size,
        prompt_length=prompt_length,
        prefill_tokens_per_second=subject.batch_size * prompt_length / median(seconds[1:]),
        decode=tuple(timings),
        peak_rss_bytes=peak_rss_bytes(),
        threads=subject.threads(),
        runtime=subject.runtime,
        peak_device_bytes=subject.peak_device_bytes(),
    )


class Subject(Protocol):
    """A session whose speed is measured, with random tokens for it.

    Attributes:
        runtime: See `BenchReport`.
        batch_size: Rows per step.
        max_length: The limit of cached tokens, or None.
        chunk: Length of the longest prefill chunk.
    """

    runtime: str
    batch_size: int
    max_length: int | None
    chunk: int

    def tokens(self, count: int) -> Any:
        """Return random tokens for each row."""
        ...

    def restart(self) -> None:
        """Empty the cache, and feed the encoder another input if there is one."""
        ...

    def prefill(self, tokens: Any) -> object:
        """Feed tokens."""
        ...

    def decode(self, token: Any) -> object:
        """Feed one token."""
        ...

    def reset(self) -> None:
        """Empty the cache."""
        ...

    def threads(self) -> int | None:
        """Return the number of threads; see `BenchReport`."""
        ...

    def peak_device_bytes(self) -> int | None:
        """Return the peak memory on a GPU; see `BenchReport`."""
        ...


class _Torch:
    """A session of torch, see `Subject`."""

    runtime = "torch"

    def __init__(self, path: str | Path | Session, seed: int) -> None:
        import torch

        from ..session.session import Session, load

        self._session = path if isinstance(path, Session) else load(path)
        self._generator = torch.Generator().manual_seed(seed)
        methods = self._session.runner.methods
        self._encode = methods.get("encode")
        self.batch_size, self.max_length = self._session.batch_size, self._session.max_length
        self.chunk = max(method.max_length for method in methods.values() if method.is_step)

    def tokens(self, count: int) -> torch.Tensor:
        from ..verification.prompts import random_text

        return random_text(self._session, count, self._generator).to(self._session.device)

    def restart(self) -> None:
        from ..verification.references import encoder_lengths, random_inputs

        self._session.reset()
        if self._encode is not None:
            length = encoder_lengths(self._encode)[0]
            inputs = random_inputs(self._encode, length, self.batch_size, self._session.vocab_size, self._generator)
            self._session.encode(**{name: tensor.to(self._session.device) for name, tensor in inputs.items()})

    def prefill(self, tokens: torch.Tensor) -> object:
        return self._finished(self._session.prefill(tokens))

    def decode(self, token: torch.Tensor) -> object:
        return self._finished(self._session.decode(token[:, 0]))

    def _finished(self, logits: torch.Tensor) -> torch.Tensor:
        """Wait for a device that runs asynchronously, because the clock is read next."""
        import torch

        if logits.device.type != "cpu":
            torch.accelerator.synchronize(logits.device)
        return logits

    def reset(self) -> None:
        self._session.reset()

    def threads(self) -> int:
        import torch

        return torch.get_num_threads()

    def peak_device_bytes(self) -> int | None:
        import torch

        device = self._session.device
        return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


class _Native:
    """A session of the native runner, see `Subject`."""

    runtime, batch_size = "native", 1

    def __init__(self, session: NativeSession, seed: int) -> None:
        self._session, self._random = session, random.Random(seed)
        self.max_length, self.chunk = session.max_length, session.longest_chunk
        self.restart = self.reset = session.reset
        self.prefill = self.decode = session.prefill

    def tokens(self, count: int) -> list[int]:
        words, items = self._session.vocab_size, self._session.placeholders
        drawn = (self._random.randrange(words) for _ in range(count))
        return [text_after(token, items, words) if token in items else token for token in drawn]

    def threads(self) -> None:
        return None

    def peak_device_bytes(self) -> None:
        return None


def subject_of(path: str | Path | Session | NativeSession, seed: int = 0) -> Subject:
    """Return what measures a bundle's folder or a session, with random tokens of a seed."""
    return _Native(path, seed) if isinstance(path, NativeSession) else _Torch(path, seed)


def _time_prompt(subject: Subject, length: int) -> float:
    prompt = subject.tokens(length)
    start = time.perf_counter()
    subject.prefill(prompt)
    return time.perf_counter() - start


def _time_generation(subject: Subject, count: int) -> float:
    tokens = [subject.tokens(1) for _ in range(count)]
    start = time.perf_counter()
    for token in tokens:
        subject.decode(token)
    return time.perf_counter() - start


def _time_decode(subject: Subject, position: int, steps: int) -> DecodeTiming:
    milliseconds = []
    for step in range(_WARM_UP_STEPS + steps):
        token = subject.tokens(1)
        start = time.perf_counter()
        subject.decode(token)
        if step >= _WARM_UP_STEPS:
            milliseconds.append(1000 * (time.perf_counter() - start))
    # One step has no percentiles.
    p90 = quantiles(milliseconds, n=10, method="inclusive")[-1] if steps > 1 else milliseconds[0]
    return DecodeTiming(position, steps, median(milliseconds), p90)


def _check(name: str, value: int, least: int, most: int | None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        allowed = f"at least {least}" if most is None else f"{least} to {most}, to fit the cache"
        raise InputError(f"{name} must be {allowed}, got {value!r}")


def _spread(last: int) -> list[int]:
    return [last * part // 4 for part in range(5)]


def peak_rss_bytes() -> int | None:
    """Return the peak physical memory of this process, or None if the system does not report it."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Kilobytes on Linux, bytes on macOS.
    return peak if sys.platform == "darwin" else 1024 * peak
