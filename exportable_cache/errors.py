"""The errors users see.

Each message names the value, the limit and the remedy; the command line exits with 2 on them.
"""

from __future__ import annotations

from typing import Any

#: Characters that a terminal obeys, or that turn text round. Others that do not print, such as the joiners of emoji,
#: belong to texts of many languages.
_OBEYED = {*range(0x20), *range(0x7F, 0xA0), 0x202D, 0x202E} - {ord("\n"), ord("\t")}
_SPELLED = {code: ascii(chr(code))[1:-1] for code in _OBEYED}


def shown(text: object, keep: str = "") -> str:
    """Return the text of an object with each character that does not print spelled as Python spells it.

    Names in bundles and checkpoints, and words of requests, are a stranger's: on a terminal, control characters write
    the clipboard, clear the screen or replace a line that was read already, and others hide what stands next to them.

    Args:
        text: A name or a sentence.
        keep: Characters that stay as they are, such as the line breaks of a text that is several lines.
    """
    written = str(text)
    if written.isprintable():
        return written
    return "".join(one if one.isprintable() or one in keep else ascii(one)[1:-1] for one in written)


def shown_generated(text: str) -> str:
    """Return text that a model generates with each character spelled that a terminal obeys, except line breaks and
    tabs.
    """
    return text.translate(_SPELLED)


class ExportableCacheError(Exception):
    """Base of every error that a user can cause and mend.

    Messages quote files and requests of strangers, so characters in them that do not print are spelled.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*(shown(arg, keep="\n\t") if isinstance(arg, str) else arg for arg in args), **kwargs)


class InputError(ExportableCacheError, ValueError):
    """An argument is outside what the call accepts: an empty prompt, a token outside the vocabulary, a wrong dtype."""


class CacheFullError(ExportableCacheError, ValueError, IndexError):
    """A step needs more slots than a full-attention layer has left. Raised before any state changes.

    An IndexError as well, which callers of transformers' static caches expect.
    """


class NonFiniteLogitsError(InputError):
    """A step gave logits that are infinite or not a number, from which no token can be chosen."""


class UnsupportedModelError(ExportableCacheError, ValueError):
    """The model needs a mechanism the cache does not have; the message names it."""


class BundleError(ExportableCacheError):
    """A bundle folder cannot be written, or cannot be loaded: missing, corrupted, or of other versions."""


class RankLostError(ExportableCacheError, RuntimeError):
    """A process of a parallel session is gone, or does not answer in time; start all of them again."""


class MissingDependencyError(ExportableCacheError, ImportError):
    """A target needs a package that is not installed; the message names the extra to install."""


class VerificationError(ExportableCacheError):
    """An exported program disagrees with the eager model. The command line exits with 1 on it."""


def first_line(error: BaseException) -> str:
    """What an error of somebody else's says, short enough for a message of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
