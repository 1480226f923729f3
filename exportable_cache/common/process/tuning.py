"""Settings of the whole process: garbage collection, and threads of torch.

Nothing here imports torch, so that the command line starts without it.
"""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Generic, TypeVar

Value = TypeVar("Value")


class ProcessSetting(Generic[Value]):
    """Changed by the first of the blocks that run at a time, and put back by the last one.

    A block that put back what it found would, where it began in another thread's block and outlasts that one, leave the
    change for good.

    Args:
        get: Gives the setting.
        set: Sets it.
    """

    def __init__(self, get: Callable[[], Value], set: Callable[[Value], object]) -> None:
        self._get, self._set = get, set
        self._lock = threading.Lock()
        self._blocks = 0

    @contextmanager
    def during(self, chosen: Callable[[Value], Value]) -> Iterator[None]:
        """A block with another setting.

        Args:
            chosen: Makes it from the one that is found. Not asked where another block has made the change.
        """
        with self._lock:
            if not self._blocks:
                self._before = self._get()
                self._set(chosen(self._before))
                self._changed = self._get()
            self._blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                # Whoever has set it since wants that one.
                if not self._blocks and self._get() == self._changed:
                    self._set(self._before)


#: Objects between two collections, and collections of each generation between two of the next.
RARELY = (10_000, 20, 50)
_THRESHOLDS = ProcessSetting(gc.get_threshold, lambda thresholds: gc.set_threshold(*thresholds))


def collect_seldom() -> None:
    """Collect garbage seldom for the rest of a process that imports torch and transformers: with Python's own
    thresholds a fifth of the time that takes goes into looking through modules.
    """
    gc.set_threshold(5 * RARELY[0], *RARELY[1:])


def few_collections() -> AbstractContextManager[None]:
    """A block, of any thread, in which garbage is collected seldom.

    A trace makes millions of small objects, few of them in cycles, among millions that stay: with Python's own
    thresholds a tenth of an export to ExecuTorch goes into looking through them again and again. Where a graph is
    loaded, looking through all that torch and transformers are made of holds the interpreter for 0.2 s.
    """
    return _THRESHOLDS.during(lambda found: RARELY if 0 < found[0] < RARELY[0] else found)


@contextmanager
def no_collections() -> Iterator[None]:
    """Collect no garbage while packages are imported, and look no more at what came of it.

    Modules stay: of a start that imports torch and transformers a fifth went into looking through them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            # Once, and not of what a longer process made before: what is garbage by then would never be collected.
            if not gc.get_freeze_count():
                gc.freeze()
            gc.enable()


def put_off_full_collection() -> None:
    """Count from now on until all objects are looked through, and take those that are there for old ones.

    Behind `few_collections` that would be due at once.
    """
    # What an application has frozen stays so.
    if not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()


@contextmanager
def threads_of_torch(number: int) -> Iterator[None]:
    """A block whose operators run on so many threads, the calling one among them.

    A thread that runs its first operator meanwhile keeps the number.
    """
    import torch

    before = torch.get_num_threads()
    # To tell every library of it takes longer than to ask.
    if before != number:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


#: Load of the machine per core from which on another process is at work.
_BUSY = 0.5


def warn_if_threads_spin() -> None:
    """Warn where OpenMP threads spin while they wait, and other processes are at work on this machine.

    OpenMP reads `OMP_WAIT_POLICY` once, when torch is imported. This package sets it if it is imported first.
    """
    if os.environ.get("OMP_WAIT_POLICY") or not hasattr(os, "getloadavg"):
        return
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > _BUSY * cores:
        warnings.warn(
            f"the load of this machine is {load:.1f} on {cores} cores, and OMP_WAIT_POLICY is not set, so threads of "
            "compiled steps spin while they wait and a step can take many times as long; import exportable_cache "
            "before torch, or set OMP_WAIT_POLICY=PASSIVE before Python starts",
            RuntimeWarning,
            stacklevel=4,
        )


def one_thread() -> AbstractContextManager[None]:
    """A block whose operators run on the calling thread: small ones wait longer for others than they take."""
    return threads_of_torch(1)
