"""The commands `package` and `operators` for devices, `upload` for the hub, and `adapter` for files of adapters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..common.progress import bytes_text
from ..errors import InputError
from .command import EXIT_MISMATCH
from .options import BundleArgument, JsonOption, KeyOption
from .terminal import Terminal, simple_table

if TYPE_CHECKING:
    from rich.table import Table


def package(
    ctx: typer.Context,
    folder: BundleArgument,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder to write.", show_default=False)],
    platform: Annotated[
        str | None, typer.Option("--for", metavar="PLATFORM", help="linux-x86_64 or linux-aarch64.", show_default=False)
    ] = None,
    program: Annotated[
        Path | None,
        typer.Option(
            "--program",
            metavar="FILE",
            help="exportable_cache_generate, built for the platform.",
            show_default=False,
        ),
    ] = None,
    layout: Annotated[
        Literal["bundle", "executorch"],
        typer.Option(
            "--layout",
            help="bundle is a bundle with the program; executorch is model.pte and the tokenizer's files, for the "
            "runners of ExecuTorch and react-native-executorch.",
        ),
    ] = "bundle",
    key: KeyOption = None,
    json: JsonOption = False,
) -> None:
    """Put a bundle into a folder for a device, with its C++ program or for other runners."""
    terminal: Terminal = ctx.obj
    for flag, given in (("--for", platform), ("--program", program)):
        if (given is None) != (layout == "executorch"):
            needs = "needs" if given is None else "does not take"
            raise typer.BadParameter(f"--layout {layout} {needs} {flag}", param_hint="'--layout'")
    if layout == "executorch":
        _write_files(terminal, folder, output, key, json)
        return
    assert platform is not None and program is not None  # checked above
    with terminal.progress("loading libraries") as progress:
        from ..bundle.bundle import Bundle
        from ..pipeline.package import CHECK, RUN
        from ..pipeline.package import package as make

        made = make(Bundle.open(folder, key=key, progress=progress), program, platform, output, progress)
    if json:
        terminal.json(
            {
                "path": str(made.path),
                "platform": made.platform,
                "files": made.files,
                "libraries": list(made.libraries),
                "tokens": list(made.tokens),
                "ran": made.ran,
            }
        )
        return
    terminal.print(_table_of(made.files))
    loads = ", ".join(made.libraries) or "nothing"
    checked = "the check passed here" if made.ran else "the check was not run here"
    terminal.print(f"\nthe program loads {loads}; {checked}")
    terminal.print(f"copy {made.path} to the device, then: ./{CHECK}, and ./{RUN} --prompt ...")


def _write_files(terminal: Terminal, folder: Path, output: Path, key: Path | None, json: bool) -> None:
    """Write the files for other runners, and print them."""
    with terminal.progress("loading libraries") as progress:
        from ..bundle.bundle import Bundle
        from ..pipeline.package import package_files

        files = package_files(Bundle.open(folder, key=key, progress=progress), output, progress)
    if json:
        terminal.json({"path": str(output), "files": files})
        return
    terminal.print(_table_of(files))


def _table_of(files: Mapping[str, int]) -> Table:
    table = simple_table("file", "bytes", right=("bytes",))
    for name, size in files.items():
        table.add_row(name, bytes_text(size))
    return table


def operators(
    ctx: typer.Context,
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Folders of bundles for ExecuTorch.", show_default=False)
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="File for -DEC_OPERATORS=FILE of runners/cpp."),
    ] = None,
    key: KeyOption = None,
    json: JsonOption = False,
) -> None:
    """List the operators of bundles, for a C++ program with only these."""
    terminal: Terminal = ctx.obj
    with terminal.progress("loading libraries") as progress:
        from ..bundle.bundle import Bundle
        from ..pipeline.package import list_operators, write_list

        bundles = [Bundle.open(folder, key=key, progress=progress) for folder in folders]
        found = list_operators(bundles)
        if output is not None:
            write_list(found, bundles, output)
    if json:
        terminal.json({"operators": found.operators, "path": None if output is None else str(output)})
        return
    terminal.print("\n".join(found.operators))
    if output is not None:
        terminal.print(f"\nbuild the C++ program from {output}: -DEC_OPERATORS={output.resolve()}")


def upload(
    ctx: typer.Context,
    folder: BundleArgument,
    repository: Annotated[
        str,
        typer.Argument(metavar="USER/NAME", help="Repository of the hub; created if missing.", show_default=False),
    ],
    private: Annotated[
        bool | None,
        typer.Option(
            "--private/--public", help="Visibility of a new repository.", show_default="the account's setting"
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="BRANCH", help="Branch to commit to.", show_default="main")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Upload a bundle to the Hugging Face hub, with a model card."""
    terminal: Terminal = ctx.obj
    with terminal.progress("loading libraries") as progress:
        from ..pipeline.upload import upload as send

        url = send(folder, repository, private=private, revision=revision, progress=progress)
    if json:
        terminal.json({"repository": repository, "url": url})
        return
    terminal.print(f"uploaded {folder} to {repository} ({url}); run it: exportable-cache generate {repository} -p ...")


def adapter(
    ctx: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a LoRA adapter, as peft saved it.")],
    bundle: Annotated[
        Path, typer.Option("--for", metavar="DIR", help="Bundle with slots for it (export --lora-slots).")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="MODEL", help="Eager model to compare with.", show_default="the adapter's base"
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="File to write.", show_default="FOLDER.adapter"),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify/--no-verify", help="Compare the program's logits with the model's.", show_default=True),
    ] = True,
    sign: Annotated[
        Path | None,
        typer.Option("--sign", metavar="FILE", help="Private Ed25519 key to sign the file with.", show_default=False),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Make the file of an adapter for a bundle, and verify the bundle with it."""
    terminal: Terminal = ctx.obj
    path = output or folder.resolve().with_name(f"{folder.resolve().name}.adapter")
    report = None
    with terminal.progress("loading libraries") as progress:
        from ..bundle.bundle import Bundle
        from ..models.loading.adapters import base_of, read_lora
        from ..session.adapters import write_adapter_file
        from ..verification.verify import verify as compare

        read = read_lora(folder)
        opened = Bundle.open(bundle, progress=progress)
        if opened.manifest.program.lora is None:
            raise InputError(
                f"{bundle} has no slots for adapters; export the model with lora_slots=1 or more (--lora-slots)"
            )
        slots = opened.manifest.program.lora.described()
        if verify:
            report = compare(opened, model or base_of(folder), adapter=folder, progress=progress)
        if report is None or report.passed:
            recorded = None if report is None else report.to_dict()
            write_adapter_file(path, read, slots, opened.manifest.fingerprint, recorded, sign)
    if report is not None and not report.passed:
        terminal.error(f"{report}; {path} was not written")
        raise typer.Exit(EXIT_MISMATCH)
    if json:
        terminal.json({"path": str(path), "verification": None if report is None else report.to_dict()})
        return
    terminal.print(f"{path}: {read.name}, rank {read.rank}, {len(read.tensors)} layers, {path.stat().st_size:,} bytes")
    terminal.print("not verified" if report is None else str(report))
