"""The garbage collector while graphs are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: Objects between two collections, and collections of each generation between two of the next.
RARELY = (10_000, 20, 50)


@contextmanager
def few_collections() -> Iterator[None]:
    """Collect garbage seldom.

    A trace makes millions of small objects, few of them in cycles, among millions that stay: with Python's own
    thresholds a tenth of an export to ExecuTorch goes into looking through them again and again.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(*RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
