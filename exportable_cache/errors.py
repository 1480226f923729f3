"""Errors that users can cause and fix.

Each message names the value, the constraint and the remedy. The command line exits with 2 on them.
"""

from __future__ import annotations

import re
from typing import Any

#: Pattern in an error of a tracer or compiler -> what the model's code does.
_MECHANISMS = {
    r"[Dd]ata.?[Dd]ependent": "a size or a branch depends on the values of tensors",
    r"Constraints violated|Specializations unexpectedly required": "the code branches on the length",
}

#: Control characters of terminals, and those that reverse text. Other characters that do not print, such as the joiners
#: of emoji, are part of many languages.
_OBEYED = {*range(0x20), *range(0x7F, 0xA0), 0x202D, 0x202E} - {ord("\n"), ord("\t")}
_SPELLED = {code: ascii(chr(code))[1:-1] for code in _OBEYED}


def shown(text: object, keep: str = "") -> str:
    """Return the text of an object with non-printing characters escaped as Python does.

    Names in bundles, checkpoints and requests may come from an attacker. On a terminal, control characters can write
    the clipboard, clear the screen or replace earlier lines.

    Args:
        text: A name or a sentence.
        keep: Characters that stay unchanged, such as line breaks in a longer text.
    """
    written = str(text)
    if written.isprintable():
        return written
    return "".join(one if one.isprintable() or one in keep else ascii(one)[1:-1] for one in written)


def shown_generated(text: str) -> str:
    """Return generated text with control characters of terminals escaped, except line breaks and tabs."""
    return text.translate(_SPELLED)


class ExportableCacheError(Exception):
    """Base class of all errors that a user can cause and fix.

    Non-printing characters in messages are escaped, because messages quote files and requests.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*(shown(arg, keep="\n\t") if isinstance(arg, str) else arg for arg in args), **kwargs)


class InputError(ExportableCacheError, ValueError):
    """An argument is not valid: an empty prompt, a token outside the vocabulary, a wrong dtype."""


class CacheFullError(ExportableCacheError, ValueError, IndexError):
    """A step needs more slots than a full-attention layer has left. It is raised before any state changes.

    It is also an IndexError, which callers of transformers' static caches expect.
    """


class DeviceMemoryError(ExportableCacheError, MemoryError):
    """A device has not enough memory for weights, cache or a step; the message gives the sizes."""


class NonFiniteLogitsError(InputError):
    """A step returned logits that are infinite or NaN, so no token can be chosen."""


class UnsupportedModelError(ExportableCacheError, ValueError):
    """The model needs a mechanism that the cache does not have; the message names it."""


class BundleError(ExportableCacheError):
    """A bundle cannot be written or loaded: it is missing, damaged, or made with other versions."""


class RankLostError(ExportableCacheError, RuntimeError):
    """A process of a parallel session has ended or does not respond in time; restart all of them."""


class MissingDependencyError(ExportableCacheError, ImportError):
    """A required package is not installed; the message names the extra to install."""


class VerificationError(ExportableCacheError):
    """An exported program disagrees with the eager model. The command line exits with 1 on it."""


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, for a message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def describe_trace_error(error: BaseException) -> str:
    """Return the first line of an error of a tracer or compiler, preceded by its cause if that is known."""
    words = f"{type(error).__name__}: {first_line(error)}"
    mechanism = next((mechanism for pattern, mechanism in _MECHANISMS.items() if re.search(pattern, words)), None)
    return words if mechanism is None else f"{mechanism}, {words}"
