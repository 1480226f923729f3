"""Exceptions."""

from __future__ import annotations

import enum


class Status(enum.IntEnum):
    """The reason why a call failed (`ec_status`)."""

    INPUT = 1
    CACHE_FULL = 2
    BUNDLE = 3
    RUNTIME = 4


class Failure(RuntimeError):
    """A call was refused or failed; the message has the value, the limit and the remedy.

    Attributes:
        status: Kind of failure.
    """

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status
