"""The commands that check a bundle: `verify` against its model, `perplexity` on a text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError
from ..session.opening import SCORING, Use
from ..verification.spec import VerifySpec
from .command import EXIT_MISMATCH
from .options import (
    BundleOrModelArgument,
    Changes,
    JsonOption,
    LoraOption,
    ModelOption,
    at_least,
    declared,
    number,
    options_of,
    takes,
)
from .runtime import BundleChecks, Opening, open_session, opens
from .terminal import Terminal, simple_table

if TYPE_CHECKING:
    from ..verification.report import VerifyReport

RecordOption = Annotated[bool, typer.Option("--record", help="Replace the report in the bundle's manifest.")]
CalibrateOption = Annotated[
    Path | None,
    typer.Option("--calibrate", metavar="FILE", help="Text that the weights were calibrated on.", show_default=False),
]
SignOption = Annotated[
    Path | None,
    typer.Option(
        "--sign",
        metavar="FILE",
        help="Private key to sign the new manifest with, for --record and a signed bundle.",
        show_default=False,
    ),
]


@opens
@takes(
    declared("folder", BundleOrModelArgument),
    declared("model", ModelOption, None),
    *options_of(
        [VerifySpec],
        {name: Changes(about={"callback": at_least(least)}) for name, least in (("tolerance", 0), ("decode_steps", 1))},
    ),
    declared("lora", LoraOption, None),
    declared("calibrate", CalibrateOption, None),
    declared("record", RecordOption, False),
    declared("sign", SignOption, None),
    declared("json", JsonOption, False),
)
def verify(ctx: typer.Context, folder: str, model: str | None, json: bool, opening: Opening, **given: Any) -> None:
    """Compare a bundle, or a model over its cache, with the eager model."""
    terminal: Terminal = ctx.obj
    if opening.is_model(folder):
        report = _verify_live(terminal, folder, model, opening, given)
    elif model is None:
        raise typer.BadParameter("must be given for a bundle: the model it was made from", param_hint="'--model'")
    else:
        report = _verify_bundle(terminal, folder, model, opening.checks, given)
    if json:
        terminal.json({"path": str(Path(folder)), "model": model or folder, **report.to_dict()})
    else:
        headers = ("prompt", "chunks", "decode steps", "max |logit difference|", "same argmax")
        table = simple_table(*headers, right=headers)
        for prompt in report.prompts:
            table.add_row(
                f"{prompt.length} ({prompt.placed} placed)" if prompt.placed else str(prompt.length),
                str(prompt.chunks),
                str(prompt.decode_steps),
                f"{prompt.max_difference:.1e}",
                f"{prompt.argmax_agreement:.1%}",
            )
        terminal.print(table)
        terminal.print()
        if not report.remark:
            terminal.print("executed by " + ("the native runner" if report.runtime == "native" else "torch's runtime"))
        terminal.print(str(report), style=None if report.passed else "red")
    if not report.passed:
        if json:
            terminal.error(str(report))
        raise typer.Exit(EXIT_MISMATCH)


def _verify_bundle(
    terminal: Terminal, folder: str, model: str, checks: BundleChecks, given: dict[str, Any]
) -> VerifyReport:
    lora = given.pop("lora") or ()
    with terminal.progress("loading libraries") as progress:
        from ..bundle.bundle import Bundle
        from ..verification.verify import verify as compare

        # Every file is read.
        bundle = Bundle.open(folder, progress=progress, **replace(checks, check=True).arguments())
        return compare(bundle, model, lora=lora, progress=progress, **given)


def _verify_live(
    terminal: Terminal, folder: str, model: str | None, opening: Opening, given: dict[str, Any]
) -> VerifyReport:
    """Compare a session over a model with the model itself, or with another model."""
    from ..errors import InputError

    for name, flag in (("lora", "--lora"), ("calibrate", "--calibrate"), ("record", "--record"), ("sign", "--sign")):
        if given.pop(name):
            raise InputError(f"{flag} cannot be combined with the model {folder}, only with a bundle; leave it out")
    opened = open_session(terminal, folder, opening, Use(waits=True), text=False)
    with terminal.progress("comparing") as progress:
        from ..models.loading.loading import load_model
        from ..verification.verify import verify_session

        reference = opened.model
        assert reference is not None
        if model is not None:
            device = reference.device
            reference = load_model(model, reference.dtype, progress=progress).model
            reference.to(device)  # type: ignore[arg-type]  # transformers wraps it without its signature
        with opened.session as session:
            return verify_session(session, reference, progress=progress, **given)


@opens
def perplexity(
    ctx: typer.Context,
    folder: BundleOrModelArgument,
    opening: Opening,
    text: Annotated[Path, typer.Option("--text", metavar="FILE", help="Text to score, in UTF-8.", show_default=False)],
    window: Annotated[
        int | None, number("--window", "Tokens in a window.", least=2, default="512, or what the cache holds")
    ] = None,
    stride: Annotated[
        int | None,
        number(
            "--stride",
            "Tokens from window to window. Below the window, tokens have context from the previous one.",
            default="the window",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, number("--max-tokens", "Read at most N tokens of the text.", least=2, default="all")
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
