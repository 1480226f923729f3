"""What lasts: a ring over a million steps, and many sessions in several threads. `python -m tests.security.soak`, or
`make soak`.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from exportable_cache import ExportableCache, Session, export, load

from ..support.layers import ring_layer
from ..support.models import tiny_model

WINDOW = 8


def ring_drift(steps: int, seed: int = 0, keep: Callable[[str], None] = lambda line: None) -> int:
    """Steps after which a ring does not hold what transformers' sliding layer holds, or says other positions.

    Keys are the positions of their tokens, values minus that. Most steps are of one token, every thousandth or so of
    several, past the window too. Every step's keys, values and positions are compared, all of them.
    """
    choose = random.Random(seed)
    ring, dynamic = ring_layer(1, 1, 1, WINDOW), DynamicSlidingWindowLayer(WINDOW)
    ascending = torch.arange(WINDOW)
    length = wrong = 0
    for step in range(steps):
        count = choose.randint(2, 2 * WINDOW) if step % 997 == 500 else 1
        new = torch.arange(length, length + count, dtype=torch.float32)[None, None, :, None]
        kv_length, offset = ring.get_mask_sizes(count)
        keys, values = ring.update(new, -new)
        expected, minus = dynamic.update(new, -new)
        length += count
        if length < WINDOW + count:
            continue
        positions = (torch.arange(kv_length) + offset)[0]
        right = torch.equal(keys[0, 0, :, 0].long(), positions) and torch.equal(values, -keys)
        # Slot p % window holds position p: turned by that, the slots are in order.
        turned = ring.keys[0, 0, :, 0].roll(-(length % WINDOW)).long()
        right &= torch.equal(turned, ascending + (length - WINDOW))
        if count == 1:
            turned = keys.roll(-(length % WINDOW), dims=2)
            right &= torch.equal(turned, expected) and torch.equal(-turned, minus)
        right &= int(ring.cumulative_length) == length
        wrong += not right
        if step % 100_000 == 99_999:
            keep(f"{step + 1} steps of a ring, {length} tokens, {wrong} wrong")
    return wrong


@dataclass
class Soaked:
    """What came of a soak.

    Attributes:
        answers: Given.
        wrong: Of them, those that are not what one thread gives.
        errors: Raised.
        memory: Seconds since the start, and MiB that the process held then.
    """

    answers: int = 0
    wrong: int = 0
    errors: list[str] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """MiB that the process grew in a minute, by the line of least squares past the first quarter."""
        late = self.memory[len(self.memory) // 4 :]
        times, sizes = torch.tensor(late, dtype=torch.float64).unbind(1)
        times = times - times.mean()
        return float((times * (sizes - sizes.mean())).sum() / times.square().sum().clamp(min=1e-9)) * 60


def soak(
    seconds: float, sessions: int, threads: int, targets: list[str], keep: Callable[[str], None] = lambda line: None
) -> Soaked:
    """Ask sessions in several threads for answers that are known, over and over.

    Args:
        sessions: How many, dealt to the threads; they share the models and the bundles that they are over.
        targets: `eager`, or those that the demo model is exported to.
    """
    torch.set_num_threads(1)
    found, lock, end = Soaked(), threading.Lock(), time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        makers = [_maker(target, Path(temporary)) for target in targets]
        known = [_answers(make()) for make in makers]
        made = [(makers[index % len(makers)](), known[index % len(makers)]) for index in range(sessions)]
        start, end = time.monotonic(), time.monotonic() + seconds

        def work(number: int) -> None:
            choose = random.Random(number)
            try:
                while time.monotonic() < end:
                    session, answers = made[choose.choice(range(number, sessions, threads))]
                    prompt, expected = choose.choice(answers)
                    session.reset()
                    right = list(session.generate(torch.tensor([prompt]), len(expected))) == expected
                    with lock:
                        found.answers += 1
                        found.wrong += not right
            except Exception as error:
                with lock:
                    found.errors.append(f"{type(error).__name__}: {error}")

        workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            found.memory.append((time.monotonic() - start, _memory()))
            if len(found.memory) % 60 == 0:
                keep(f"{found.memory[-1][0]:.0f} s: {found.answers} answers, {found.memory[-1][1]:.0f} MiB")
            time.sleep(min(1.0, seconds / 20))
        for session, _ in made:
            session.close()
    return found


def _maker(target: str, work: Path) -> Callable[[], Session]:
    if target == "eager":
        model = tiny_model("gemma2")
        return lambda: Session.from_model(model, ExportableCache.from_model(model, 64))
    export("demo", target, 96, work / target, prefill_chunk=16, verify=False)
    return lambda: load(work / target)


def _answers(session: Session) -> list[tuple[list[int], list[int]]]:
    choose, known = random.Random(0), []
    for length in (1, 3, 7, 12, 20, 30):
        prompt = [choose.randrange(3, 100) for _ in range(length)]
        session.reset()
        known.append((prompt, list(session.generate(torch.tensor([prompt]), 12))))
    session.close()
    return known


def _memory() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.security.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000, help="of a ring")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--targets", default="eager,pt2,executorch")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    def say(line: str) -> None:
        print(line, flush=True)

    wrong = ring_drift(arguments.steps, keep=say)
    say(f"{arguments.steps} steps of a ring: {wrong} wrong")
    found = soak(arguments.seconds, arguments.sessions, arguments.threads, arguments.targets.split(","), say)
    sizes = [size for _, size in found.memory]
    say(
        f"{arguments.sessions} sessions in {arguments.threads} threads, {arguments.seconds:.0f} s: {found.answers} "
        f"answers, {found.wrong} wrong, {len(found.errors)} errors; {sizes[len(sizes) // 4]:.0f} MiB after a quarter, "
        f"{sizes[-1]:.0f} at the end, {found.growth:+.2f} MiB a minute"
    )
    for error in found.errors:
        say(error)
    sys.exit(1 if wrong or found.wrong or found.errors else 0)


if __name__ == "__main__":
    main()
