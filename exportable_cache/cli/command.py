"""Shared behaviour of all commands: separate streams, streams that fail, and errors as one line with an exit code."""

from __future__ import annotations

import errno
import logging
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any

import typer
from typer.core import TyperCommand

from ..common.process.quiet import all_messages_shown, forget, known_messages_hidden
from ..errors import ExportableCacheError, InputError, VerificationError
from .terminal import Terminal

EXIT_INPUT = 2
#: Exit code if the reader of a pipe has gone, as a shell reports a process that SIGPIPE ended.
EXIT_PIPE = 141
#: Errors of a stream: a full or broken disk, a closed stream, a reader that has gone.
_ERRORS = (errno.ENOSPC, errno.EIO, errno.EBADF, errno.EDQUOT, errno.EPIPE)
#: Loggers that report missing optional parts, or address their developers.
_LOGGERS = ("torchao", "torch.utils._pytree", "torch.export", "executorch", "coremltools", "transformers")


def is_stream_error(error: BaseException | None) -> bool:
    """Return True if an error comes from writing to a stream, not to a file."""
    return isinstance(error, OSError) and error.errno in _ERRORS and error.filename is None


def exit_code_of(error: OSError) -> int:
    """Return the exit code for a failed stream."""
    return EXIT_PIPE if error.errno == errno.EPIPE else EXIT_INPUT


def stream_error_message(error: OSError) -> str:
    """Return the message for a failed stream; empty if its reader has gone on purpose."""
    if error.errno == errno.EPIPE:
        return ""
    return f"error: cannot write the output: {error.strerror}; redirect it to another file"


@contextmanager
def output_checked() -> Iterator[None]:
    """Exit with code 2 within a block if a stream fails, or 141 if its reader has gone.

    The block is for output of typer, such as help and usage errors. Exit code 1 would mean a mismatch.
    """
    try:
        yield
    except OSError as error:
        if not is_stream_error(error):
            raise
        _stop(error)
    except SystemExit as ended:
        # For a pipe whose reader has gone, typer uses exit code 1.
        if ended.code == 1 and isinstance(ended.__context__, OSError) and is_stream_error(ended.__context__):
            _stop(ended.__context__)
        raise


def _stop(error: OSError) -> None:
    forget(sys.__stdout__)
    try:
        if message := stream_error_message(error):
            sys.stderr.write(message + "\n")
        sys.stderr.flush()
    except OSError:
        forget(sys.__stderr__)
    sys.exit(exit_code_of(error))


def prompt_from_stdin() -> str:
    """Return the content of stdin.

    Raises:
        InputError: If it is closed, cannot be read, or is not text in its encoding.
    """
    if sys.stdin is None:
        raise InputError("stdin must be open to read the prompt; pass --prompt TEXT, or pipe the text in")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InputError(
            f"the prompt must be {error.encoding} text, got byte 0x{error.object[error.start]:02x} at {error.start}; "
            "save it as UTF-8"
        ) from error
    except OSError as error:
        raise InputError(f"cannot read the prompt from stdin: {error.strerror}; pass --prompt TEXT") from error


@contextmanager
def quiet_third_parties() -> Iterator[None]:
    """Hide warnings, known messages, and log messages below errors of noisy libraries within a block."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), known_messages_hidden():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


EXIT_MISMATCH = 1
EXIT_UNEXPECTED = 70
EXIT_INTERRUPTED = 130


class Command(TyperCommand):
    """A command whose body gets a `Terminal` as `ctx.obj`.

    Everything that libraries print to stdout goes to stderr, so that `--json` leaves exactly one document on stdout.
    """

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Run the command, and convert its errors to a line on stderr and an exit code."""
        debug = bool((ctx.obj or {}).get("debug"))
        terminal = ctx.obj = Terminal(sys.stdout)
        with ExitStack() as stack:
            stack.enter_context(all_messages_shown() if debug else quiet_third_parties())
            stack.enter_context(redirect_stdout(sys.stderr))
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt as error:
                terminal.error("interrupted; no unfinished files are left")
                raise typer.Exit(EXIT_INTERRUPTED) from error
            except ExportableCacheError as error:
                if debug:
                    traceback.print_exc()
                terminal.error(f"error: {error}")
                raise typer.Exit(EXIT_MISMATCH if isinstance(error, VerificationError) else EXIT_INPUT) from error
            except Exception as error:
                if _is_typer_error(error):
                    raise
                if isinstance(error, OSError) and is_stream_error(error):
                    if message := stream_error_message(error):
                        terminal.error(message)
                    forget(sys.__stdout__)
                    raise typer.Exit(exit_code_of(error)) from error
                if debug:
                    traceback.print_exc()
                    terminal.error(f"error: unexpected {type(error).__name__}")
                else:
                    reason = " ".join(str(error).split()) or "no message"
                    terminal.error(f"error: unexpected {type(error).__name__}: {reason}")
                    terminal.error("for the traceback, run it again with EXPORTABLE_CACHE_DEBUG=1")
                raise typer.Exit(EXIT_UNEXPECTED) from error


def _is_typer_error(error: Exception) -> bool:
    """Return True for exceptions that typer handles: exits and usage errors."""
    from typer.exceptions import TyperException

    return isinstance(error, (typer.Exit, typer.Abort, TyperException))
