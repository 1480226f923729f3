"""Process-wide settings: garbage collection, memory of the heap, and threads of torch.

Nothing here imports torch, so that the command line starts without it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Generic, TypeVar

Value = TypeVar("Value")


class ProcessSetting(Generic[Value]):
    """A process-wide setting that blocks of several threads change.

    The first running block changes it, and the last one restores it. If each block restored the value it found, a block
    that began within another thread's block and outlasted it would keep the change for good.

    Args:
        get: Returns the setting.
        set: Sets it.
    """

    def __init__(self, get: Callable[[], Value], set: Callable[[Value], object]) -> None:
        self._get, self._set = get, set
        self._lock = threading.Lock()
        self._blocks = 0

    @contextmanager
    def during(self, chosen: Callable[[Value], Value]) -> Iterator[None]:
        """Run a block with another value.

        Args:
            chosen: Computes the value from the current one. Not called while another block has made the change.
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
                # If the setting has changed since, leave it.
                if not self._blocks and self._get() == self._changed:
                    self._set(self._before)


#: Objects between two collections, and collections of each generation between two of the next.
RARELY = (10_000, 20, 50)
_THRESHOLDS = ProcessSetting(gc.get_threshold, lambda thresholds: gc.set_threshold(*thresholds))


def collect_seldom() -> None:
    """Raise the thresholds of garbage collection for the rest of the process.

    With Python's defaults, a fifth of the time to import torch and transformers is garbage collection.
    """
    gc.set_threshold(5 * RARELY[0], *RARELY[1:])


def few_collections() -> AbstractContextManager[None]:
    """Raise the thresholds of garbage collection within a block, of any thread.

    A trace allocates millions of small objects, few of them in cycles. With Python's defaults, a tenth of an export to
    ExecuTorch is garbage collection, and a full collection while a graph is loaded blocks the interpreter for 0.2 s.
    """
    return _THRESHOLDS.during(lambda found: RARELY if 0 < found[0] < RARELY[0] else found)


@contextmanager
def no_collections() -> Iterator[None]:
    """Turn garbage collection off within a block that imports packages, and freeze the imported objects.

    A fifth of the time to import torch and transformers is garbage collection, and modules are never freed.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            _freeze_once()
            gc.enable()


@cache
def _freeze_once() -> None:
    """Freeze all objects unless the application has frozen some.

    Only once, because freezing objects of a longer-running process would keep its garbage, and because counting goes
    over all frozen objects: 0.07 s for a million.
    """
    if not gc.get_freeze_count():
        gc.freeze()


def postpone_full_collection() -> None:
    """Reset the count towards the next full collection, and treat all current objects as old.

    After `few_collections`, a full collection would otherwise be due at once.
    """
    # Keep objects frozen that the application has frozen.
    if not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Run a block whose operators use `number` threads, including the calling one.

    A thread that runs its first operator during the block keeps the number.
    """
    import torch

    before = torch.get_num_threads()
    # Checked first, because setting it takes longer than reading it.
    if before != number:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


#: Load per core above which another process counts as busy.
_BUSY = 0.5


def warn_if_threads_spin() -> None:
    """Warn if OpenMP threads spin while they wait and other processes are busy on this machine.

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
    """Run a block on the calling thread only, because small operators wait longer for threads than they run."""
    return torch_threads(1)


def give_back_heap() -> None:
    """Give free memory of the heap back to the system.

    glibc keeps it otherwise, if memory that is still in use lies above it. Nothing changes with other C libraries.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))
