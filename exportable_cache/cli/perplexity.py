"""The command `exportable-cache perplexity`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError
from ..session.opening import SCORING
from .options import BundleOrModelArgument, JsonOption, at_least
from .output.terminal import Terminal
from .runtime import Opening, open_session, opens


@opens
def perplexity(
    ctx: typer.Context,
    folder: BundleOrModelArgument,
    opening: Opening,
    text: Annotated[Path, typer.Option("--text", metavar="FILE", help="Text to score, in UTF-8.", show_default=False)],
    window: Annotated[
        int | None,
        typer.Option(
            "--window",
            metavar="N",
            callback=at_least(2),
            help="Tokens in a window.",
            show_default="512, or what the cache holds",
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            "--stride",
            metavar="N",
            callback=at_least(1),
            help="Tokens from window to window. Below the window, tokens have context from the previous one.",
            show_default="the window",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            metavar="N",
            callback=at_least(2),
            help="Read at most N tokens of the text.",
            show_default="all",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure the perplexity of a bundle or a model on a text.

    In torch's runtime, programs exported with -O score_length=N score N tokens a step; others, and the native runner,
    score one.
    """
    terminal: Terminal = ctx.obj
    content = _read(text)
    session = open_session(terminal, folder, opening, SCORING).session
    with terminal.progress("loading libraries") as progress:
        from ..pipeline.perplexity import perplexity as measure

        report = measure(session, content, window=window, stride=stride, max_tokens=max_tokens, progress=progress)
    if json:
        terminal.json({"path": str(Path(folder)), "text": str(text), **report.to_dict()})
        return
    speed = report.scored_tokens / report.seconds if report.seconds else 0.0
    terminal.print(
        f"perplexity {report.perplexity:.4f} ± {report.error:.4f} (loss {report.loss:.4f}) of {report.scored_tokens} "
        f"tokens, windows of {report.window}, stride {report.stride}"
    )
    terminal.note(f"{report.seconds:.1f} s, {speed:.0f} tokens/s")


def _read(path: Path) -> str:
    """Return the text of a file.

    Raises:
        InputError: If it cannot be read as UTF-8.
    """
    try:
        # Line ends are part of the text, so they are not translated.
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}; pass a file of UTF-8 text") from error
