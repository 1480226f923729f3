"""The garbage collector while packages are imported and graphs are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: Objects between two collections, and collections of each generation between two of the next.
RARELY = (10_000, 20, 50)


def collect_seldom() -> None:
    """Collect garbage seldom for the rest of a process that imports torch and transformers: with Python's own
    thresholds a fifth of the time that takes goes into looking through modules.
    """
    gc.set_threshold(5 * RARELY[0], *RARELY[1:])


@contextmanager
def few_collections() -> Iterator[None]:
    """Collect garbage seldom.

    A trace makes millions of small objects, few of them in cycles, among millions that stay: with Python's own
    thresholds a tenth of an export to ExecuTorch goes into looking through them again and again.
    """
    thresholds = gc.get_threshold()
    if 0 < thresholds[0] < RARELY[0]:
        gc.set_threshold(*RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


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
