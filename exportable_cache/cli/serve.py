"""The command `exportable-cache serve`."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Annotated

import typer

from ..session.opening import Use
from .options import (
    BundleOrModelArgument,
    DraftModelOption,
    DraftOption,
    GivenSampling,
    OnFullOption,
    SplitSpecialTokensOption,
    checked_size,
    number,
    sides_of,
)
from .runtime import Batching, Opening, open_completer, opens
from .terminal import Terminal

#: Kinds of files that messages may have.
_MESSAGE_KINDS = ("image", "audio")


@opens
def serve(
    ctx: typer.Context,
    folder: BundleOrModelArgument,
    opening: Opening,
    *,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on; 0.0.0.0 for all.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="Port; 0 for a free one.")] = 8000,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="Model name in requests.", show_default="the folder's name"),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", metavar="KEY", envvar="EXPORTABLE_CACHE_API_KEY", help="Require this key."),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="Accept this Host header; may be repeated, * for any. The default is loopback names, or any name with "
            "--api-key or another --host.",
            show_default=False,
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-origin",
            metavar="ORIGIN",
            help="Accept pages of this origin (CORS), such as https://example.org; may be repeated, * for any.",
            show_default=False,
        ),
    ] = None,
    most_waiting: Annotated[
        int, number("--most-waiting", "Length of the request queue; further requests are refused.", least=0)
    ] = 64,
    rows: Annotated[
        int,
        number(
            "--rows", "Generate N responses of a model at a time. A bundle has the rows of its export (--batch-size)."
        ),
    ] = 1,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            metavar="NAME=FILE",
            help="Adapter for requests of the model MODEL:NAME; may be repeated.",
            show_default=False,
        ),
    ] = None,
    modalities: Annotated[
        list[str] | None,
        typer.Option(
            "--modalities",
            metavar="image|audio",
            help="Kinds of files in messages of a model; may be repeated.",
            show_default=False,
        ),
    ] = None,
    image_size: Annotated[
        str | None,
        typer.Option(
            "--image-size",
            metavar="HxW",
            callback=checked_size,
            help="Height and width of a model's images in pixels, if its config has none.",
            show_default=False,
        ),
    ] = None,
    draft: DraftOption = None,
    draft_model: DraftModelOption = None,
    prefix_cache: Annotated[
        int,
        number(
            "--prefix-cache",
            "With --rows: megabytes of earlier prompts and responses that are kept for prompts that begin with them.",
            least=0,
            metavar="MB",
        ),
    ] = 512,
    on_full: OnFullOption = "refuse",
    given: GivenSampling,
    split_special_tokens: SplitSpecialTokensOption = True,
) -> None:
    """Serve a bundle or a model with OpenAI's API and a chat page.

    Options of sampling are defaults of the requests. Without them and settings of the checkpoint, requests are sampled
    at the temperature 1, as in OpenAI's API.
    """
    from ..errors import MissingDependencyError

    terminal: Terminal = ctx.obj
    missing = [package for package in ("fastapi", "uvicorn") if find_spec(package) is None]
    if missing:
        raise MissingDependencyError(
            f"serve needs {' and '.join(missing)}; install the extra: pip install 'exportable-cache[serve]'"
        )
    from .server.origins import AllowedOrigins

    hosts, origins = tuple(allow_host or ()), tuple(allow_origin or ())
    # Checked before the bundle is opened, which may take long.
    AllowedOrigins.of(host, api_key is not None, hosts, origins)
    kinds = _kinds(modalities or [], folder, opening.is_model(folder), rows)
    if image_size is not None and "image" not in (modalities or ()):
        raise typer.BadParameter("needs --modalities image; leave it out", param_hint="'--image-size'")
    sides = None if image_size is None else sides_of(image_size)
    use = Use(kinds, draft=draft, draft_model=draft_model, adapters=_adapters(adapter or []), image_size=sides)
    if modalities and use.head is not None:
        raise typer.BadParameter("cannot be combined with --modalities; leave one out", param_hint="'--draft'")
    importing = Thread(target=_import_server)
    importing.start()
    completer = open_completer(
        terminal, folder, opening, split_special_tokens, use, Batching(rows, prefix_cache * 2**20)
    )
    completer.use(on_full)
    importing.join()
    from .server.app import ServerOptions, make_app, run
    from .server.schema import default_sampling

    default = default_sampling(completer.settings)
    terminal.note_all(given.lines(completer.settings, None, default))
    options = ServerOptions(
        name or Path(folder).resolve().name,
        most_waiting,
        api_key,
        host=host,
        allow_hosts=hosts,
        allow_origins=origins,
        sampling=given.over(default),
    )
    run(
        make_app(completer, options),
        host,
        port,
        lambda address: terminal.note(
            f"{options.model_name} at {address} (page) and {address}/v1 (API); Ctrl+C ends it"
        ),
    )


def _adapters(given: list[str]) -> dict[str, Path]:
    """Return the file of each adapter by its name: `["poems=poems.adapter"]` is `{"poems": Path("poems.adapter")}`."""
    found: dict[str, Path] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not (name and equals and path) or name in found:
            raise typer.BadParameter(f"must be NAME=FILE with each NAME once, got {text!r}", param_hint="'--adapter'")
        found[name] = Path(path)
    return found


def _kinds(given: list[str], name: str, is_model: bool, rows: int) -> list[str]:
    """Return the kinds of files in messages: those of `--modalities` for a model, else those of the bundle."""
    from ..bundle.files import CheckedBundle
    from ..session.native import RUNTIME_VARIABLE

    flag = "'--modalities'"
    if not given:
        # The native runner has no processor, and takes text if the user chose it.
        if is_model or os.environ.get(RUNTIME_VARIABLE) == "native":
            return []
        program = CheckedBundle.read(name).fields.get("program")
        methods = program.get("methods") if isinstance(program, dict) else None
        return [kind for kind in _MESSAGE_KINDS if isinstance(methods, dict) and f"encode_{kind}" in methods]
    wrong = next((kind for kind in given if kind not in _MESSAGE_KINDS), None)
    if wrong is not None:
        raise typer.BadParameter(f"must be {' or '.join(_MESSAGE_KINDS)}, got {wrong!r}", param_hint=flag)
    if not is_model:
        raise typer.BadParameter(f"cannot be combined with the bundle {name}; leave it out", param_hint=flag)
    if rows > 1:
        raise typer.BadParameter(f"cannot be combined with --rows {rows}; leave one out", param_hint=flag)
    return given


def _import_server() -> None:
    """Import the server while the bundle is opened, because FastAPI takes as long as that."""
    import_module("uvicorn")
    import_module("exportable_cache.cli.server.app")
