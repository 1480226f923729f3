"""Run one form of benchmarks/peers.py in its environment, as a process that executes requests.

    python benchmarks/peer_worker.py FORM FOLDER PLAN    # run by the benchmark

PLAN is JSON: `{"threads": 2, "slots": 4096}`, and to compare logits `"logits"`, the file to write, after which the
process ends. Otherwise it opens the form, generates a first token, and prints the seconds since the start of the
process as a line of JSON. Then each input line is a request with one response line:

    {"prompt": 128}    {"seconds": 0.15}             a prompt on an empty cache, after a short one that is not timed
    {"stand": 4000}    {"seconds": 5.1}              a prompt that tokens follow
    {"tokens": 3}      {"seconds": [0.01, ...]}      each of 3 tokens, after two that are not timed
    {"memory": true}   {"peak_mb": 850.2}            peak resident memory

Untimed work refills the processor's caches and wakes the runtime's threads. Prompts begin differently each time,
because a runtime may remember one that begins as an earlier one did.
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
#: Option of Linux's prctl: the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1


class Turns:
    """An open form, and the tokens it was fed.

    Args:
        runtime: The open form.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._fed = runtime, 0

    def _new(self, count: int) -> list[int]:
        """Return `count` ids that begin as no earlier prompt did."""
        self._fed += count
        return token_ids(count, self._fed - count)

    def first(self) -> None:
        """Generate a first token."""
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
        """Time `count` tokens."""
        self._runtime.steps(UNTIMED)
        return {"seconds": self._runtime.steps(count)}

    def memory(self, _: bool) -> dict[str, Any]:
        """Return the peak resident memory of this process from Linux's counter; `getrusage` would include the parent's.

        Raises:
            RuntimeError: If the system has no such counter.
        """
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return {"peak_mb": int(line.split()[1]) / 1024}
        raise RuntimeError("this system does not count the most resident memory")


def seconds_since_start() -> float:
    """Return the seconds since the process started, with Linux's resolution of a hundredth."""
    begin = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - begin


def main() -> None:
    """Open the form, and respond to requests."""
    # A stopped process would outlive a killed benchmark, with all its memory.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Responses go to the original stdout, where nothing else is printed.
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
