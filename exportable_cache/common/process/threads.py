"""Threads of torch's operators: how many a block uses, and how they wait."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


@contextmanager
def threads_of_torch(number: int) -> Iterator[None]:
    """A block whose operators run on so many threads, the calling one among them.

    A thread that runs its first operator meanwhile keeps the number.
    """
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
