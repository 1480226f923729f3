"""`exportable-cache inspect`, and the Python lines that open a bundle without this package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..backends.executorch.options import needs_native_kernels
from ..common.progress import bytes_text
from ..errors import shown
from .export import print_files, print_plan, print_verification
from .options import BundleOrDemoArgument, JsonOption, KeyOption, at_least
from .terminal import LayerRow, Terminal, engine_table, engines, layer_table, simple_table

if TYPE_CHECKING:
    from ..bundle.bundle import Bundle
    from ..bundle.manifest import Manifest

_DEMO_MAX_CACHE_LEN = 512


def inspect(
    ctx: typer.Context,
    folder: BundleOrDemoArgument,
    max_cache_len: Annotated[
        int | None,
        typer.Option(
            "--max-cache-len",
            "-n",
            metavar="N",
            callback=at_least(1),
            help="With demo: tokens that a full-attention layer holds.",
            show_default="512",
        ),
    ] = None,
    key: KeyOption = None,
    json: JsonOption = False,
) -> None:
    """Show what a bundle contains, and check its files."""
    from ..common.fs.tensor_files import damaged_if_malformed
    from ..errors import InputError

    terminal: Terminal = ctx.obj
    if folder == "demo":
        with terminal.progress("reading the config of demo"):
            from ..pipeline.plan import plan

            made = plan("demo", max_cache_len or _DEMO_MAX_CACHE_LEN)
        if json:
            terminal.json(made.to_dict())
        else:
            print_plan(terminal, made)
        return
    with terminal.progress(f"reading {folder}") as progress:
        from ..bundle.bundle import MANIFEST_FILE, Bundle
        from ..bundle.hub import HubChoice, bundle_of

        folder = bundle_of(folder, HubChoice(), progress)
        # Without the check of versions, because inspect shows which versions a bundle needs.
        bundle = Bundle.open(folder, check_versions=False, key=key, progress=progress)
    if max_cache_len is not None:
        raise InputError(
            f"--max-cache-len {max_cache_len} was given, but {folder} was exported for "
            f"{bundle.manifest.program.max_cache_len}; leave it out, or export again"
        )
    if json:
        terminal.json({"path": str(bundle.path), **bundle.manifest.model_dump(mode="json")})
    else:
        # A manifest from elsewhere may have unexpected values where its schema allows any.
        with damaged_if_malformed(bundle.path / MANIFEST_FILE, "the manifest", "export the model again"):
            _print_bundle(terminal, bundle)


def _print_bundle(terminal: Terminal, bundle: Bundle) -> None:
    manifest = bundle.manifest
    program = manifest.program
    terminal.print(
        f"{shown(bundle.path)}: {shown(manifest.architecture)} with its cache, for {shown(manifest.target)}\n"
        f"from {shown(manifest.source)}, batch size {program.batch_size}, {manifest.dtype}, max_cache_len "
        f"{program.max_cache_len}, "
        f"exported {shown(manifest.created)}\n"
    )
    terminal.print(layer_table(_row(layer, program.batch_size) for layer in manifest.model_dump(mode="json")["layers"]))
    terminal.print(f"\ncache {bytes_text(manifest.cache_bytes)}, weights {bytes_text(manifest.weights_bytes)}\n")
    if manifest.ranks is not None:
        size = manifest.ranks.size
        terminal.print(
            f"for {size} ranks, each with this cache and at most {bytes_text(manifest.ranks.weights_bytes)} of the "
            f"weights: torchrun --nproc-per-node {size} -m exportable_cache generate {shown(bundle.path)}\n"
        )
    terminal.print(_method_table(bundle))
    terminal.print(f"\ntakes {_taken(bundle)}")
    if program.rope is not None:
        terminal.print(
            f"{program.rope.described()}: rope_lengths are the tokens that each row holds after the whole call"
        )
    if program.lora is not None:
        slots = program.lora.described()
        layers = ", ".join(dict.fromkeys(one.name.rpartition(".")[2] for one in slots.targets))
        terminal.print(
            f"slots for {slots.slots} adapters of rank up to {slots.rank}, {bytes_text(slots.nbytes)} besides the "
            f"cache: {len(slots.targets)} layers ({shown(layers)})"
        )
    terminal.print()
    print_files(terminal, bundle)
    terminal.print("all checksums match" + (f", signed by {bundle.signed_by}" if bundle.signed_by else "") + "\n")
    if engines(manifest.files):
        terminal.print(engine_table(manifest.files))
        terminal.print()
    terminal.print(shown("made with " + ", ".join(f"{name} {one}" for name, one in manifest.packages.items())))
    print_verification(terminal, bundle)
    lines = opened_elsewhere(manifest)
    if lines:
        terminal.print("\nwithout this package, in Python:")
        for line in lines:
            terminal.print(f"  {line}")


def _row(layer: dict[str, Any], batch_size: int) -> LayerRow:
    from ..cache.component import label_of
    from ..cache.policies import SlotPolicy
    from ..cache.storage import Storage

    tensors, storage = layer["tensors"], layer["storage"]
    # By name, because the order of dimensions depends on the target's operators.
    keys = _sizes(tensors.get("keys", {"dims": [], "shape": []}))
    # The dtype of the content, because lengths are int64 in every layer.
    slots = SlotPolicy.from_config(layer["policy"]).capacity
    kept = tensors.get("keys") or next(iter(tensors.values()), {"dtype": "-"})
    return LayerRow(
        layer_type=layer["layer_type"],
        policy=label_of({name: part for name, part in layer.items() if part is not None}),
        slots=slots,
        heads=_heads(keys, batch_size, slots),
        head_dim=_head_dim(storage, tensors.get("keys")),
        value_head_dim=_head_dim(storage, tensors.get("values")),
        dtype=storage["kind"] if storage is not None and Storage.from_config(storage).rounds else kept["dtype"],
        bytes=layer["bytes"],
    )


def _head_dim(storage: dict[str, Any] | None, tensor: dict[str, Any] | None) -> int | None:
    from ..cache.storage import Storage

    return None if storage is None or tensor is None else Storage.from_config(storage).head_dim(tensor["shape"][-1])


def _heads(sizes: dict[str, int], batch_size: int, slots: int | None) -> int | None:
    """Return the number of key heads. Kernels of some targets store heads with rows, or with rows and slots."""
    if "rows_and_heads" in sizes:
        return sizes["rows_and_heads"] // batch_size
    if "rows_heads_and_slots" in sizes and slots:
        return sizes["rows_heads_and_slots"] // (batch_size * slots)
    return sizes.get("num_heads")


def _sizes(tensor: dict[str, Any]) -> dict[str, int]:
    return dict(zip(tensor["dims"], tensor["shape"], strict=True))


def _taken(bundle: Bundle) -> str:
    """Return the inputs as `text`, or `text, image, with the processor for it`."""
    from ..program.inputs.multimodal import kinds_taken

    kinds = ", ".join(kinds_taken(bundle.manifest.description().methods))
    return f"{kinds}, with the processor for it" if bundle.has_processor else kinds


def _method_table(bundle: Bundle) -> Any:
    table = simple_table("method", "new tokens", "inputs", "outputs")
    for name, method in bundle.manifest.model_dump(mode="json")["program"]["methods"].items():
        low, high = method["min_length"], method["max_length"]
        tokens = str(low) if low == high else f"{low} to {high}"
        table.add_row(name, tokens, _io_text(method["inputs"]), _io_text(method["outputs"]))
    return table


def _io_text(tensors: list[dict[str, Any]]) -> str:
    if tensors and tensors[0]["name"] == "slot":
        # The method that writes an adapter, which takes two tensors for each layer.
        return f"slot int64 [1], adapter ({len(tensors) - 1} tensors)"
    named = [f"{tensor['name']} {tensor['dtype']} [{', '.join(map(str, tensor['shape']))}]" for tensor in tensors]
    # Omit tensors of the cache, because the layer table shows them.
    others = [text for text in named if not text.startswith("cache.")]
    return ", ".join(others if len(others) == len(named) else [*others, f"cache ({len(named) - len(others)} tensors)"])


def opened_elsewhere(manifest: Manifest) -> list[str]:
    """Return lines of Python that open a bundle's program without this package; none if that is impossible.

    They run in the bundle's folder. docs/bundles.md explains them.
    """
    if manifest.ranks is not None:
        return []
    methods = list(manifest.program.methods)
    if manifest.target == "pt2":
        return [
            *(["import torchao.quantization.quant_primitives"] if manifest.quantization is not None else []),
            "from torch.export.pt2_archive._package import load_pt2",
            'programs = load_pt2("program.pt2").exported_programs',
            'for program in programs.values(): program.constants.update(programs["model"].constants)',
        ]
    # Others need libraries and variables of their own.
    if manifest.target != "executorch" or manifest.options.get("delegate", "xnnpack") != "xnnpack":
        return []
    lines = [
        "from executorch.runtime import Runtime",
        "import executorch.extension.llm.custom_ops.custom_ops, executorch.kernels.quantized",
    ]
    if needs_native_kernels(manifest.options):
        from ..common.native.kernels import chosen_path, installed_path

        library = chosen_path() or installed_path()
        lines.append(f"import ctypes; ctypes.CDLL({str(library)!r})")
    return [
        *lines,
        'program = Runtime.get().load_program("program.pte")',
        f"methods = {{name: program.load_method(name) for name in {methods!r}}}",
    ]
