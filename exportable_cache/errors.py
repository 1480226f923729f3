"""The errors users see.

Each message names the value, the limit and the remedy; the command line exits with 2 on them.
"""


class ExportableCacheError(Exception):
    """Base of every error that a user can cause and mend."""


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
