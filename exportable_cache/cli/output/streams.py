"""Standard streams that fail, prompts on stdin, and the messages of other libraries."""

from __future__ import annotations

import errno
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from ...common.process.quiet import forget, known_chatter_dropped
from ...errors import InputError

EXIT_INPUT = 2
#: The reader of a pipe is gone, as `head` is after ten lines: what a shell gives a process that SIGPIPE ends.
EXIT_PIPE = 141
#: Of a stream that takes no more: a full disk, a broken one, a closed one, one whose reader is gone.
_ERRORS = (errno.ENOSPC, errno.EIO, errno.EBADF, errno.EDQUOT, errno.EPIPE)
#: Loggers that report optional parts which are not installed, or talk to their own developers.
_LOGGERS = ("torchao", "torch.utils._pytree", "torch.export", "executorch", "coremltools", "transformers")


def is_of_a_stream(error: BaseException | None) -> bool:
    """Whether an error is one of writing to a stream, and not to a file."""
    return isinstance(error, OSError) and error.errno in _ERRORS and error.filename is None


def exit_code_of(error: OSError) -> int:
    """Return the exit code for a stream that takes no more."""
    return EXIT_PIPE if error.errno == errno.EPIPE else EXIT_INPUT


def unwritable(error: OSError) -> str:
    """Return the message for a stream that takes no more; it is empty where the reader has gone on purpose."""
    if error.errno == errno.EPIPE:
        return ""
    return f"error: cannot write the output: {error.strerror}; send it somewhere else"


@contextmanager
def output_checked() -> Iterator[None]:
    """A block that writes what typer itself writes, such as help and usage errors: a stream that fails ends it with
    exit code 2, or 141 where its reader has gone; 1 would stand for a mismatch.
    """
    try:
        yield
    except OSError as error:
        if not is_of_a_stream(error):
            raise
        _stop(error)
    except SystemExit as ended:
        # Of a pipe whose reader is gone typer itself makes exit code 1.
        if ended.code == 1 and isinstance(ended.__context__, OSError) and is_of_a_stream(ended.__context__):
            _stop(ended.__context__)
        raise


def _stop(error: OSError) -> None:
    forget(sys.__stdout__)
    try:
        if message := unwritable(error):
            sys.stderr.write(message + "\n")
        sys.stderr.flush()
    except OSError:
        forget(sys.__stderr__)
    sys.exit(exit_code_of(error))


def prompt_from_stdin() -> str:
    """All of stdin.

    Raises:
        InputError: If it is closed, cannot be read, or is no text in its encoding.
    """
    if sys.stdin is None:
        raise InputError("stdin is closed, so there is no prompt to read; pass it by --prompt, or pipe it in")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InputError(
            f"the prompt is no {error.encoding}: byte {error.start} is 0x{error.object[error.start]:02x}; save it as "
            "UTF-8"
        ) from error
    except OSError as error:
        raise InputError(f"cannot read the prompt from stdin: {error.strerror}; pass it by --prompt") from error


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
