"""The command-line application: its commands, grouped by task, and its help."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from .command import Command

_HELP = (
    "Export a Hugging Face causal language model with its KV cache, verify it against the eager model, and run it. "
    "MODEL is a hub id, a local folder, a .gguf file, or `demo`, the small trained model of this package."
)
#: Tasks and their commands, as `--help` lists them.
_TASKS = {
    "Export a model": ("export", "adapter", "plan", "upload"),
    "Generate text": ("generate", "chat"),
    "Serve it": ("serve",),
    "Check a bundle": ("verify", "perplexity", "inspect"),
    "Measure, and prepare devices": ("bench", "doctor", "native", "operators", "package"),
}
#: Commands, and the module of each.
COMMANDS = {name: name for names in _TASKS.values() for name in names} | {
    **dict.fromkeys(("adapter", "operators", "package", "upload"), "device"),
    "native": "doctor",
    "perplexity": "verify",
    "plan": "export",
}
#: Commands that run without arguments; others show their help then.
_WITHOUT_ARGUMENTS = ("doctor",)
_OVERVIEW = """\
exportable-cache exports Hugging Face models with a static KV cache, and runs them.

  Export a model      exportable-cache export demo -o artifacts/demo
  Generate text       exportable-cache generate artifacts/demo -p "the code of amber is 4821. amber?"
  Serve it            exportable-cache serve artifacts/demo
  Check a bundle      exportable-cache verify artifacts/demo --model demo
  Measure its speed   exportable-cache bench artifacts/demo

`exportable-cache --help` lists all commands, `exportable-cache COMMAND --help` the options of one."""
# The formatter joins the lines of a paragraph; an empty line separates paragraphs.
_EPILOG = "\n\n".join(
    (
        "Example:",
        "  exportable-cache export demo -o artifacts/demo",
        '  exportable-cache generate artifacts/demo -p "the code of amber is 4821. amber?"',
        "Exit codes: 0 done; 1 the program disagrees with the model; 2 bad input; 70 unexpected error; 130 "
        "interrupted. Set EXPORTABLE_CACHE_DEBUG=1 for tracebacks.",
    )
)


class _Tasks(TyperGroup):
    """A group that lists its commands by task."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options, with a shorter help of `--show-completion`."""
        found = super().get_params(ctx)
        for param in found:
            if param.name == "show_completion":
                param.help = "Print the completion script of the current shell."  # type: ignore[attr-defined]
        return found

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands under their tasks."""
        width = max(map(len, self.commands))
        for task, names in _TASKS.items():
            with formatter.section(task):
                texts = {name: self.commands[name].get_short_help_str(formatter.width - width - 4) for name in names}
                formatter.write_dl([(name.ljust(width), text) for name, text in texts.items()])


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"exportable-cache {__version__}")
        raise typer.Exit()


def _root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", envvar="EXPORTABLE_CACHE_DEBUG", help="Show tracebacks and all messages."),
    ] = False,
) -> None:
    """Set up what all commands share, and show an overview if none is named."""
    ctx.obj = {"debug": debug}
    if ctx.invoked_subcommand is None:
        typer.echo(_OVERVIEW)


def application(only: str = "") -> typer.Typer:
    """Return the application.

    Args:
        only: Name of the one command to import, because importing all of them takes longer than some commands; "" for
            all.
    """
    made = typer.Typer(
        cls=_Tasks,
        help=_HELP,
        epilog=_EPILOG,
        invoke_without_command=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    made.callback()(_root)
    for name, module in COMMANDS.items():
        if only in ("", name):
            command = getattr(import_module(f".{module}", __package__), name)
            if isinstance(command, typer.Typer):
                made.add_typer(command, name=name)
            else:
                made.command(cls=Command, no_args_is_help=name not in _WITHOUT_ARGUMENTS)(command)
    return made


def __getattr__(name: str) -> typer.Typer:
    """Return `app`, the application with all commands, which is made when it is first used."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()["app"] = made = application()
    return made
