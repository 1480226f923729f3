"""One package per target.

A target is imported only when it is used; its `options` module needs neither torch nor the target.
"""

from .registry import TARGETS, backend_for

__all__ = ["TARGETS", "backend_for"]
