"""Run the processes of benchmarks/peers.py interleaved, one at a time.

The memory speed of a shared machine changes within fractions of a second, so forms to be compared are measured in the
same seconds, many times. All forms of a group are open at once, and stand at the same position; in each cycle every
process generates a few tokens. Prompts are interleaved in the same way. After some of the cycles all processes are
opened again, because their memory's location may matter more than what is compared. Processes that are not running are
stopped by a signal, because idle threads of many runtimes spin.
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

#: The limit of seconds for a turn, and for stopping a process.
TURN_SECONDS, STOP_SECONDS = 600, 10
#: Free memory in MB that opening one more process requires.
SPARE_MB = 1024
#: Longest prompt that runs in two thirds of the cycles; longer ones run in one third.
SHORT_PROMPT = 256


class Failed(Exception):
    """A form or an environment failed and is left out."""


def last_words(log: Path, otherwise: str) -> str:
    """Return the last line of a process's log, and the log's path."""
    words = log.read_text(errors="replace").strip().splitlines()
    return f"{words[-1][:200] if words else otherwise} (see {log})"


class Process:
    """A process that answers each request line with a response line, and is stopped in between.

    Args:
        command: Command line.
        environment: Environment variables.
        log: File to which standard error is appended.

    Attributes:
        opened: First response, sent without a request.
        idle_s: Processor seconds used while the process was stopped, which shows threads that kept running.

    Raises:
        Failed: If the process ends before it responds, or takes too long.
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
        """Send a request and return the response.

        Raises:
            Failed: If the process ends without a response, or takes too long.
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
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _answer(self) -> dict[str, Any]:
        """Read the next response, then stop the process."""
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
        """Stop every thread of the process."""
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
        """Return the processor seconds used so far."""
        fields = _fields(Path(f"/proc/{self._process.pid}/stat"))
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _fields(stat: Path) -> list[str]:
    """Return the fields of a process's or thread's stat file, from its state on."""
    return stat.read_text().rpartition(")")[2].split()


@dataclass(frozen=True)
class Plan:
    """Plan of a measurement: what is timed, and how often.

    Attributes:
        prompts: Prompt lengths.
        positions: Positions at which tokens are timed, ascending.
        cycles: Number of cycles; each process generates tokens once per cycle.
        tokens: Tokens timed per cycle.
        openings: How often all processes are opened; cycles are distributed over the openings.
    """

    prompts: Sequence[int]
    positions: Sequence[int]
    cycles: int
    tokens: int
    openings: int = 1

    @property
    def tokens_of_process(self) -> int:
        """Number of tokens that a process generates after its prompt."""
        return UNTIMED + 1 + -(-self.cycles // self.openings) * (UNTIMED + self.tokens)

    def prompt_cycles(self, length: int) -> int:
        """Return the number of cycles for a prompt of this length."""
        return -(-self.cycles * (2 if length <= SHORT_PROMPT else 1) // 3)

    def of_opening(self, cycles: int, opening: int) -> range:
        """Return those of `cycles` cycles that belong to an opening."""
        return range(cycles * opening // self.openings, cycles * (opening + 1) // self.openings)


def order(forms: Sequence[str], cycle: int) -> list[str]:
    """Return the forms in a random order that depends on the cycle."""
    return random.Random(cycle).sample(list(forms), len(forms))


def available_mb() -> float:
    """Return the memory available without swapping, in MB."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("MemAvailable:"))


class Group:
    """Forms that are measured interleaved.

    Args:
        plan: What is timed.
        opened: Starts a form's process.
        dropped: Called with a form that failed, and the reason; the form is left out.
        kept: Called with `answers` after each update.

    Attributes:
        answers: Results by form. `start_s` and `peak_mb`: one value per opening. `prompt`: seconds of each cycle, by
            length. `token`: seconds of each token of each cycle, by position. `idle_s`: processor seconds.
    """

    def __init__(
        self,
        plan: Plan,
        opened: Callable[[str], Process],
        dropped: Callable[[str, str], None],
        kept: Callable[[dict[str, Any]], None] = lambda answers: None,
    ) -> None:
        self._plan, self._opened, self._dropped, self._kept = plan, opened, dropped, kept
        self._processes: dict[str, Process] = {}
        self.answers: dict[str, dict[str, Any]] = {}

    def run(self, forms: Sequence[str]) -> None:
        """Measure all forms."""
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
        """Run the cycles of one opening.

        The last position comes first, and the peak memory after it, because some runtimes keep prompts in memory.
        """
        plan, first = self._plan, True
        for form in list(self.answers):
            self._open(form)
        for position in reversed(plan.positions):
            for form in list(self.answers):
                self._stand(form, position, first)
            for cycle in plan.of_opening(plan.cycles, opening):
                self._tokens(position, cycle)
            first = False
        for length in plan.prompts:
            for cycle in plan.of_opening(plan.prompt_cycles(length), opening):
                self._prompts(length, cycle)
        for form, process in self._processes.items():
            self.answers[form]["idle_s"] += process.idle_s
        self._kept(self.answers)

    def _drop(self, form: str, why: Failed) -> None:
        """Leave out a form that failed."""
        process = self._processes.pop(form, None)
        if process is not None:
            process.close()
        self.answers.pop(form, None)
        self._dropped(form, str(why))

    def _open(self, form: str) -> None:
        """Start the process of a form, while no other process runs."""
        try:
            if available_mb() < SPARE_MB:
                raise Failed(f"less than {SPARE_MB} MB are left; name fewer forms")
            process = self._processes[form] = self._opened(form)
            self.answers[form]["start_s"].append(process.opened["start_s"])
        except Failed as error:
            self._drop(form, error)

    def _stand(self, form: str, position: int, first: bool) -> None:
        """Bring a form's process to a position; the first time, after a prompt of each length, note its memory."""
        process = self._processes[form]
        try:
            for length in self._plan.prompts if first else ():
                process.ask(prompt=length)
            process.ask(stand=position)
            process.ask(tokens=1)
            if first:
                self.answers[form]["peak_mb"].append(process.ask(memory=True)["peak_mb"])
        except Failed as error:
            self._drop(form, error)
        self._kept(self.answers)

    def _prompts(self, length: int, cycle: int) -> None:
        """Time a prompt of each form."""
        for form in order(list(self.answers), cycle):
            try:
                answer = self._processes[form].ask(prompt=length)
            except Failed as error:
                self._drop(form, error)
                continue
            self.answers[form]["prompt"].setdefault(str(length), []).append(answer["seconds"])
        self._kept(self.answers)

    def _tokens(self, position: int, cycle: int) -> None:
        """Time tokens of each form, which stand at a position."""
        for form in order(list(self.answers), cycle):
            try:
                answer = self._processes[form].ask(tokens=self._plan.tokens)
            except Failed as error:
                self._drop(form, error)
                continue
            self.answers[form]["token"].setdefault(str(position), []).append(answer["seconds"])
        self._kept(self.answers)
