"""Shared behaviour of all commands: separate streams, and errors as one line with an exit code."""

from __future__ import annotations

import sys
import traceback
from contextlib import ExitStack, redirect_stdout
from typing import Any

import typer
from typer.core import TyperCommand

from ..common.process.quiet import all_messages_shown, forget
from ..errors import ExportableCacheError, VerificationError
from .output.streams import EXIT_INPUT, exit_code_of, is_stream_error, quiet_third_parties, stream_error_message
from .output.terminal import Terminal

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
