"""What TensorRT's logger says, collected so that errors can quote it, without the lines that mean nothing here."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGER = "torch_tensorrt [TensorRT Conversion Context]"

# After every error TensorRT asks the CUDA runtime for more, which a machine without a GPU cannot tell. And
# torch_tensorrt's slice converter names several layers alike.
_NOISE = re.compile(r"catchCudaError|Failed attempt to rename a layer")


class _Collector(logging.Filter):
    """Keeps the errors, and shows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if record.levelno >= logging.ERROR and not _NOISE.search(message):
            self.errors.append(message)
        return False


@contextmanager
def collected_errors() -> Iterator[list[str]]:
    """The errors that TensorRT logs inside the block, in order; nothing of its log is shown."""
    logger, collector = logging.getLogger(_LOGGER), _Collector()
    logger.addFilter(collector)
    try:
        yield collector.errors
    finally:
        logger.removeFilter(collector)
