"""The commands, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from .bench import bench
from .chat import chat
from .command import Command
from .device import operators, package
from .doctor import doctor, kernels
from .export import export
from .generate import generate
from .inspect import inspect
from .plan import plan
from .serve import serve
from .verify import verify

_HELP = (
    "Export a Hugging Face causal language model together with its KV cache, verify it against the eager model, and "
    "run it. MODEL is a hub id, a local folder, a .gguf file, or `demo`, the small trained model of this package."
)
# Typer joins the lines of one paragraph; an empty line keeps them apart.
_EPILOG = "\n\n".join(
    (
        "Example:",
        "  exportable-cache export demo --max-cache-len 512 -o artifacts/demo",
        '  exportable-cache generate artifacts/demo -p "the code of amber is 4821. amber?"',
        "Exit codes: 0 done; 1 the program disagrees with the model; 2 bad input; 70 unexpected error; 130 "
        "interrupted. Set EXPORTABLE_CACHE_DEBUG=1 for tracebacks.",
    )
)

app = typer.Typer(
    help=_HELP,
    epilog=_EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"exportable-cache {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug", envvar="EXPORTABLE_CACHE_DEBUG", help="Show tracebacks, and the messages of other libraries."
        ),
    ] = False,
) -> None:
    ctx.obj = {"debug": debug}


for _command in (plan, export, inspect, verify, generate, chat, serve, bench, operators, package):
    app.command(cls=Command, no_args_is_help=True)(_command)
app.command(cls=Command)(doctor)
app.add_typer(kernels, name="kernels")
