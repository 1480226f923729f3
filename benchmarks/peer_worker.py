"""Runs one form of benchmarks/peers.py in its environment, in a process of its own that does what it is told.

    python benchmarks/peer_worker.py FORM FOLDER PLAN    # what the benchmark runs

PLAN is JSON: `{"threads": 2, "slots": 4096}`, and to compare logits `"logits"`, the file to write, after which the
process ends. Otherwise it opens the form, makes a first token, and says in JSON, one line an answer, how many seconds
that took from the start of the process. Then each line of its input is a turn, and answered:

    {"prompt": 128}    {"seconds": 0.15}             a prompt on an empty cache, after a short one that is not timed
    {"stand": 4000}    {"seconds": 5.1}              a prompt that tokens come after
    {"tokens": 3}      {"seconds": [0.01, ...]}      each of so many, after two that are not timed
    {"memory": true}   {"peak_mb": 850.2}            the most that was resident

What is not timed brings back what others drove out of the caches, and wakes the runtime's threads. Prompts begin
differently each time: a runtime may remember one that begins as an earlier one did.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from peer_forms import CHECKED_PROMPT, CHECKED_STEPS, FORMS, UNTIMED, token_ids
from peer_runtimes import RUNTIMES, Runtime

#: Tokens of the prompt before a timed one.
SHORT = 8
#: Of Linux's prctl: which signal a process gets when what started it ends.
_PR_SET_PDEATHSIG = 1


class Turns:
    """A form, and what it has been fed.

    Args:
        runtime: The form, open.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._fed = runtime, 0

    def _new(self, count: int) -> list[int]:
        """So many ids, which begin as no earlier ones did."""
        self._fed += count
        return token_ids(count, self._fed - count)

    def first(self) -> None:
        """Make a first token."""
        self._runtime.prompt(self._new(SHORT))
        self._runtime.steps(1)

    def prompt(self, count: int) -> dict[str, Any]:
        """Time a prompt, after a short one."""
        self.first()
        return self.stand(count)

    def stand(self, position: int) -> dict[str, Any]:
        """Feed a prompt, so that the next token has this position."""
        return {"seconds": self._runtime.prompt(self._new(position))}

    def tokens(self, count: int) -> dict[str, Any]:
        """Time so many tokens."""
        self._runtime.steps(UNTIMED)
        return {"seconds": self._runtime.steps(count)}

    def memory(self, _: bool) -> dict[str, Any]:
        """Most resident memory of this process: Linux's own counter, for `getrusage` counts what the parent had, too.

        Raises:
            RuntimeError: If the system has no such counter.
        """
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return {"peak_mb": int(line.split()[1]) / 1024}
        raise RuntimeError("this system does not count the most resident memory")


def seconds_since_start() -> float:
    """How long this process has been there, whatever started it; Linux counts in hundredths."""
    begin = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - begin


def main() -> None:
    """Open the form, and answer."""
    # A stopped process would outlive a benchmark that was killed, with all its memory.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Answers go where nothing else is printed.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    form, folder, plan = FORMS[sys.argv[1]], Path(sys.argv[2]), json.loads(sys.argv[3])
    runtime = RUNTIMES[form.runtime](form, folder, plan)
    if "logits" in plan:
        import numpy

        numpy.save(plan["logits"], runtime.logits(token_ids(CHECKED_PROMPT + CHECKED_STEPS)))
    else:
        turns = Turns(runtime)
        turns.first()
        print(json.dumps({"start_s": seconds_since_start()}), file=answers, flush=True)
        for line in sys.stdin:
            ((name, value),) = json.loads(line).items()
            print(json.dumps(getattr(turns, name)(value)), file=answers, flush=True)
    # Some runtimes take seconds to close.
    os._exit(0)


if __name__ == "__main__":
    main()
