"""Processes of benchmarks/peers.py that wait for their turns, and the order of these turns.

A machine that others use as well has memory whose speed changes within fractions of a second and from minute to
minute, so what is compared must be measured in the same seconds, many times. All forms of a group are open at once.
For each position that tokens are timed at a form has a process, which stands there; in each cycle every process has a
turn of a few tokens. Prompts go round in the same way. After some of the cycles all processes are opened anew, as where
their memory lies may be worth more than what is compared. Whoever has no turn is stopped by a signal, so that threads
that wait for work by asking again and again, as many runtimes' do, cannot disturb who has.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer_forms import UNTIMED

#: Seconds that a turn may take, and that a signal may take to stop a process.
TURN_SECONDS, STOP_SECONDS = 600, 10
#: Megabytes that must be left to open one more process.
SPARE_MB = 1024
#: Prompts up to this length have two thirds as many cycles as tokens, longer ones a third.
SHORT_PROMPT = 256


class Failed(Exception):
    """What a form or an environment is left out for."""


def last_words(log: Path, otherwise: str) -> str:
    """The last line of what a process said, and where the rest is."""
    words = log.read_text(errors="replace").strip().splitlines()
    return f"{words[-1][:200] if words else otherwise} (see {log})"


class Process:
    """A process that answers each line with a line, and is stopped in between.

    Args:
        command: To run.
        environment: Its variables.
        log: The file that what it says on standard error is added to.

    Attributes:
        opened: Its first answer, which it gives unasked.
        idle_s: Seconds of processor that it used while it was stopped; threads that run on would show here.

    Raises:
        Failed: If it ends before it has answered, or takes too long.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self._log, self._buffer = log, b""
        self._used_before = self.idle_s = 0.0
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment, bufsize=0
            )
        try:
            self.opened = self._answer()
        except BaseException:
            self.close()
            raise

    def ask(self, **turn: Any) -> dict[str, Any]:
        """Give it a turn.

        Raises:
            Failed: If it ends without an answer, or takes too long.
        """
        assert self._process.stdin is not None
        self.idle_s += self._used() - self._used_before
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(turn).encode() + b"\n")
        except BrokenPipeError as error:
            raise Failed(last_words(self._log, "it ended early")) from error
        return self._answer()

    def close(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _answer(self) -> dict[str, Any]:
        """Its next line; after it the process is stopped."""
        assert self._process.stdout is not None
        end = time.monotonic() + TURN_SECONDS
        while b"\n" not in self._buffer:
            if not select.select([self._process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
                raise Failed(f"it took more than {TURN_SECONDS} s (see {self._log})")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise Failed(last_words(self._log, "it ended early"))
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        self._stop()
        return json.loads(line)

    def _stop(self) -> None:
        """Stop every thread of it."""
        self._process.send_signal(signal.SIGSTOP)
        tasks, end = Path(f"/proc/{self._process.pid}/task"), time.monotonic() + STOP_SECONDS
        while True:
            try:
                states = {_fields(task / "stat")[0] for task in tasks.iterdir()}
            except OSError:
                continue  # A thread ended meanwhile.
            if states <= {"T", "Z"}:
                break
            if time.monotonic() > end:
                raise Failed(f"it does not stop (see {self._log})")
        self._used_before = self._used()

    def _used(self) -> float:
        """Seconds of processor so far."""
        fields = _fields(Path(f"/proc/{self._process.pid}/stat"))
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _fields(stat: Path) -> list[str]:
    """Of a process or thread, from its state on."""
    return stat.read_text().rpartition(")")[2].split()


@dataclass(frozen=True)
class Plan:
    """What is timed, and how often.

    Attributes:
        prompts: Lengths.
        positions: Those that tokens are timed at.
        cycles: In which each process has one turn of tokens.
        tokens: Timed in one turn.
        openings: How often all processes are opened; cycles are shared out among them.
    """

    prompts: Sequence[int]
    positions: Sequence[int]
    cycles: int
    tokens: int
    openings: int = 1

    @property
    def tokens_of_process(self) -> int:
        """That follow its prompt: one turn of one token to begin with, and those of the cycles."""
        return UNTIMED + 1 + -(-self.cycles // self.openings) * (UNTIMED + self.tokens)

    def described(self, fastest: bool) -> str:
        """How figures come about, in a sentence."""
        prompts = " and ".join(f"{self.prompt_cycles(length)} of {length:,} tokens" for length in self.prompts)
        chosen = "The fastest" if fastest else "Medians"
        anew = f", processes and files anew {self.openings} times" if self.openings > 1 else ""
        return f"{chosen} of {self.cycles} turns of {self.tokens} tokens, and of prompts, {prompts}{anew}."

    def prompt_cycles(self, length: int) -> int:
        """In which each form has one turn of a prompt."""
        return -(-self.cycles * (2 if length <= SHORT_PROMPT else 1) // 3)

    def of_opening(self, cycles: int, opening: int) -> range:
        """Those of so many cycles that are an opening's."""
        return range(cycles * opening // self.openings, cycles * (opening + 1) // self.openings)


def order(forms: Sequence[str], cycle: int) -> list[str]:
    """Of the forms in a cycle: each once, and not always after the same one."""
    return random.Random(cycle).sample(list(forms), len(forms))


def available_mb() -> float:
    """Memory that can be had without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("MemAvailable:"))


class Group:
    """Forms that are measured in turns with one another.

    Args:
        plan: What is timed.
        opened: What starts a form's process.
        dropped: Called with a form that failed, and why; it has no more turns.
        kept: Called with `answers` whenever there is more in it.

    Attributes:
        answers: Of each form: `start_s` and `peak_mb`, a number for each process and for each opening; `prompt`, by
            length the seconds of each cycle; `token`, by position the seconds of each token of each cycle; `idle_s`.
    """

    def __init__(
        self,
        plan: Plan,
        opened: Callable[[str], Process],
        dropped: Callable[[str, str], None],
        kept: Callable[[dict[str, Any]], None] = lambda answers: None,
    ) -> None:
        self._plan, self._opened, self._dropped, self._kept = plan, opened, dropped, kept
        self._processes: dict[tuple[str, int], Process] = {}
        self.answers: dict[str, dict[str, Any]] = {}

    def run(self, forms: Sequence[str]) -> None:
        """Measure them."""
        self.answers = {
            form: {"start_s": [], "peak_mb": [], "prompt": {}, "token": {}, "idle_s": 0.0} for form in forms
        }
        for opening in range(self._plan.openings):
            try:
                self._measure(opening)
            finally:
                for process in self._processes.values():
                    process.close()
                self._processes.clear()

    def _measure(self, opening: int) -> None:
        """The cycles of an opening."""
        for form in list(self.answers):
            self._open(form)
        for length in self._plan.prompts:
            for cycle in self._plan.of_opening(self._plan.prompt_cycles(length), opening):
                self._prompts(length, cycle)
        for form in list(self.answers):
            self._stand(form)
        for cycle in self._plan.of_opening(self._plan.cycles, opening):
            self._tokens(cycle)
        for (form, _), process in self._processes.items():
            self.answers[form]["idle_s"] += process.idle_s
        self._kept(self.answers)

    def _drop(self, form: str, why: Failed) -> None:
        """Leave it out, and go on."""
        for position in self._plan.positions:
            process = self._processes.pop((form, position), None)
            if process is not None:
                process.close()
        self.answers.pop(form, None)
        self._dropped(form, str(why))

    def _open(self, form: str) -> None:
        """Start its processes, alone."""
        try:
            for position in self._plan.positions:
                if available_mb() < SPARE_MB:
                    raise Failed(f"less than {SPARE_MB} MB are left; name fewer forms")
                process = self._processes[form, position] = self._opened(form)
                self.answers[form]["start_s"].append(process.opened["start_s"])
        except Failed as error:
            self._drop(form, error)

    def _prompts(self, length: int, cycle: int) -> None:
        """A prompt of each form, on the process of the first position: so the memory of the last one's is not that of
        many prompts, which some runtimes remember."""
        for form in order(list(self.answers), cycle):
            try:
                answer = self._processes[form, self._plan.positions[0]].ask(prompt=length)
            except Failed as error:
                self._drop(form, error)
                continue
            self.answers[form]["prompt"].setdefault(str(length), []).append(answer["seconds"])
        self._kept(self.answers)

    def _stand(self, form: str) -> None:
        """Bring each of its processes to its position, the last one after one of each prompt."""
        try:
            for position in self._plan.positions:
                process, last = self._processes[form, position], position == self._plan.positions[-1]
                for length in self._plan.prompts if last else ():
                    process.ask(prompt=length)
                process.ask(stand=position)
                process.ask(tokens=1)
                if last:
                    self.answers[form]["peak_mb"].append(process.ask(memory=True)["peak_mb"])
        except Failed as error:
            self._drop(form, error)
        self._kept(self.answers)

    def _tokens(self, cycle: int) -> None:
        """Tokens at each position of each form; these turns follow each other, for their difference is asked for."""
        for form in order(list(self.answers), cycle):
            positions = self._plan.positions if cycle % 2 else self._plan.positions[::-1]
            try:
                found = {at: self._processes[form, at].ask(tokens=self._plan.tokens) for at in positions}
            except Failed as error:
                self._drop(form, error)
                continue
            for at, answer in found.items():
                self.answers[form]["token"].setdefault(str(at), []).append(answer["seconds"])
        self._kept(self.answers)
