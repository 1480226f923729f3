"""Keeping other libraries' messages off the screen, for the length of one command."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from ...common.process.quiet import known_chatter_dropped

#: Loggers that report optional parts which are not installed, or talk to their own developers.
_LOGGERS = ("torchao", "torch.utils._pytree", "torch.export", "executorch", "coremltools", "transformers")


@contextmanager
def quiet_third_parties() -> Iterator[None]:
    """Show no warnings, of the noisy libraries only errors, and no known chatter. Exceptions and other text pass."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), known_chatter_dropped():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
