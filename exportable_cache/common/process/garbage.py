"""The garbage collector while packages are imported and graphs are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from .settings import ProcessSetting

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
