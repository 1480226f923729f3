"""One package per target. A target is imported only when it is used."""

from .base import Backend, LoweredFile, Runner
from .registry import TARGETS, backend_for

__all__ = ["TARGETS", "Backend", "LoweredFile", "Runner", "backend_for"]
