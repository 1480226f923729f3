"""Arguments and options that several commands take, with their completion."""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

Dtype = Literal["float32", "float16", "bfloat16"]


def targets() -> list[str]:
    """Names of all targets: one package each, found without importing any."""
    spec = find_spec("exportable_cache")
    folders = [os.path.join(folder, "backends") for folder in (spec.submodule_search_locations or [])]
    return sorted(module.name for module in pkgutil.iter_modules(folders) if module.ispkg)


def _complete_targets(incomplete: str) -> Iterator[str]:
    return (target for target in targets() if target.startswith(incomplete))


def _folders(incomplete: str, marker: str) -> Iterator[str]:
    """Folders that hold a file named `marker`."""
    parent, _, start = incomplete.rpartition("/")
    root = parent + "/" if "/" in incomplete else ""
    try:
        names = sorted(entry.name for entry in os.scandir(root or ".") if entry.is_dir())
    except OSError:
        return
    for name in names:
        if not name.startswith(start) or (name.startswith(".") and not start.startswith(".")):
            continue
        folder = Path(root + name)
        if (folder / marker).is_file():
            yield root + name
        else:
            # One level ahead, since the shell ends the word after a single candidate.
            for path in sorted(folder.glob(f"*/{marker}")):
                yield root + name + "/" + path.parent.name


def _complete_bundles(incomplete: str) -> Iterator[str]:
    return _folders(incomplete, "manifest.json")


def _complete_models(incomplete: str) -> Iterator[str]:
    if "demo".startswith(incomplete):
        yield "demo"
    # A bundle has a config, too, but no weights to load.
    yield from (
        folder for folder in _folders(incomplete, "config.json") if not (Path(folder) / "manifest.json").exists()
    )


def _complete_bundles_and_demo(incomplete: str) -> Iterator[str]:
    if "demo".startswith(incomplete):
        yield "demo"
    yield from _complete_bundles(incomplete)


def at_least(least: int) -> Callable[[Any], Any]:
    """A callback that refuses smaller numbers, in lists of them too, before anything slow is imported."""

    def check(given: Any) -> Any:
        for value in given if isinstance(given, (list, tuple)) else [given]:
            if value is not None and not value >= least:
                raise typer.BadParameter(f"{value} is too small; it must be at least {least}")
        return given

    return check


_MODEL = "A hub id, a local folder, or `demo`."

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help=_MODEL, autocompletion=_complete_models, show_default=False)
]
ModelOption = Annotated[
    str,
    typer.Option(
        "--model", metavar="MODEL", help=f"The eager model to compare with: {_MODEL}", autocompletion=_complete_models
    ),
]
BundleArgument = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="Folder of a bundle, as `export` wrote it.", autocompletion=_complete_bundles),
]
BundleOrDemoArgument = Annotated[
    str,
    typer.Argument(
        metavar="DIR|demo",
        help="Folder of a bundle, or `demo` for the shipped model.",
        autocompletion=_complete_bundles_and_demo,
    ),
]
TargetOption = Annotated[
    str,
    typer.Option(
        "--target",
        "-t",
        metavar="TARGET",
        help=f"What to lower to: {', '.join(targets())}.",
        autocompletion=_complete_targets,
    ),
]
MaxEncoderLenOption = Annotated[
    int | None,
    typer.Option(
        "--max-encoder-len",
        metavar="N",
        callback=at_least(1),
        help="Encoder-decoders: longest encoder input, in tokens, frames or samples.",
        show_default="512 tokens, 30 s of samples, or what the encoder has positions for",
    ),
]
KvCacheDtypeOption = Annotated[
    str | None,
    typer.Option(
        "--kv-cache-dtype",
        metavar="int8|int4",
        help="Keep keys and values in 8 or 4 bits; the model's own dtype by default.",
        show_default=False,
    ),
]
AttentionSinksOption = Annotated[
    int | None,
    typer.Option(
        "--attention-sinks",
        metavar="K",
        callback=at_least(1),
        help="Full-attention layers keep the first K tokens and the newest ones, and run without end.",
        show_default=False,
    ),
]
AttentionWindowOption = Annotated[
    int | None,
    typer.Option(
        "--attention-window",
        metavar="W",
        callback=at_least(1),
        help="Newest tokens kept beside the sinks.",
        show_default="max-cache-len less the sinks",
    ),
]

BatchSizeOption = Annotated[int, typer.Option("--batch-size", "-b", metavar="N", callback=at_least(1), help="Rows.")]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option("--dtype", help="Of weights, keys and values; the model's own by default.", show_default=False),
]
SmOption = Annotated[
    str | None,
    typer.Option(
        "--sm",
        metavar="LIST",
        help="With TensorRT: compute capabilities to build for, such as 80,86,89,120.",
        show_default="a portable plan",
    ),
]
DelegateOption = Annotated[
    str | None,
    typer.Option(
        "--delegate",
        metavar="NAME",
        help="With ExecuTorch: what the program is delegated to: xnnpack, vulkan, coreml or tensorrt.",
        show_default="xnnpack",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
IgnoreVersionsOption = Annotated[
    bool, typer.Option("--ignore-versions", help="Open the bundle although it was made with other package versions.")
]
