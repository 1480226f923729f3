"""`exportable-cache export`"""

from __future__ import annotations

import re
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .layer_table import simple_table
from .options import (
    AttentionSinksOption,
    AttentionWindowOption,
    BatchSizeOption,
    DelegateOption,
    DtypeOption,
    JsonOption,
    KvCacheDtypeOption,
    MaxEncoderLenOption,
    ModelArgument,
    SmOption,
    TargetOption,
    at_least,
)
from .terminal import Terminal, bytes_text

if TYPE_CHECKING:
    from ..bundle.bundle import Bundle

#: What `exporter.export` takes itself; the command has options of its own for it.
_ARGUMENTS = frozenset(
    (
        "model_or_path target max_cache_len output_dir batch_size dtype prefill_length quantize group_size quantize_embeddings "
        "attention_sinks attention_window kv_dtype slack max_encoder_len modalities image_size verify overwrite tokenizer progress"
    ).split()
)


def _sides(text: str) -> tuple[int, ...]:
    """`448x336` is `(448, 336)`, `448` a square."""
    sides = tuple(int(side) for side in text.split("x"))
    return sides * 2 if len(sides) == 1 else sides


def _size(text: str | None) -> str | None:
    if text is not None and not re.fullmatch(r"\d+(x\d+)?", text):
        raise typer.BadParameter(f"{text!r} is not HEIGHTxWIDTH in pixels, such as 448x448")
    return text


def export(
    ctx: typer.Context,
    model: ModelArgument,
    max_cache_len: Annotated[
        int,
        typer.Option(
            "--max-cache-len", "-n", metavar="N", callback=at_least(1), help="Tokens a full-attention layer holds."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder to write the bundle to.")],
    target: TargetOption = "executorch",
    batch_size: BatchSizeOption = 1,
    dtype: DtypeOption = None,
    prefill_length: Annotated[
        int | None,
        typer.Option(
            "--prefill-length",
            metavar="N",
            callback=at_least(1),
            help="Longest chunk of a prompt in one call.",
            show_default="256, or what fits",
        ),
    ] = None,
    quantize: Annotated[
        Literal["8da4w", "8da8w", "8w"] | None,
        typer.Option(
            "--quantize",
            help="Weights of linear layers: 8da4w is 4 bits with 8-bit activations, 8da8w 8 bits with them, 8w 8 bits alone.",
            show_default=False,
        ),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            "--group-size",
            metavar="N",
            callback=at_least(1),
            help="4-bit weights that share a scale.",
            show_default="32",
        ),
    ] = None,
    quantize_embeddings: Annotated[
        Literal["8w", "4w"] | None,
        typer.Option("--quantize-embeddings", help="Weights of the embedding table.", show_default=False),
    ] = None,
    kv_cache_dtype: KvCacheDtypeOption = None,
    attention_sinks: AttentionSinksOption = None,
    attention_window: AttentionWindowOption = None,
    slack: Annotated[
        int,
        typer.Option(
            "--slack",
            metavar="N",
            callback=at_least(0),
            help="Extra slots of each sliding layer, so that N + 1 tokens can be taken back past its window.",
        ),
    ] = 0,
    max_encoder_len: MaxEncoderLenOption = None,
    modality: Annotated[
        list[str] | None,
        typer.Option(
            "--modality", metavar="KIND", help="Take image or audio beside text; the model's encoder is exported, too."
        ),
    ] = None,
    image_size: Annotated[
        str | None,
        typer.Option(
            "--image-size",
            metavar="HxW",
            callback=_size,
            help="Height and width of every image in pixels, such as 448x448, where the model's config leaves it open.",
            show_default="the model's",
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option", "-O", metavar="NAME=VALUE", help="Of the target, such as llm_runner=true; may be repeated."
        ),
    ] = None,
    sm: SmOption = None,
    delegate: DelegateOption = None,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Compare with the eager model, past every window.")
    ] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DIR if it exists.")] = False,
    json: JsonOption = False,
) -> None:
    """Export a model with its cache to a bundle, and verify it."""
    terminal: Terminal = ctx.obj
    shorthands = [f"{name}={value}" for name, value in (("sm", sm), ("delegate", delegate)) if value is not None]
    options = _target_options([*(option or []), *shorthands])
    with terminal.progress("loading libraries") as progress:
        from ..pipeline.export import export as make_bundle

        bundle = make_bundle(
            model,
            target=target,
            max_cache_len=max_cache_len,
            output_dir=output,
            batch_size=batch_size,
            dtype=dtype,
            prefill_length=prefill_length,
            quantize=quantize,
            group_size=group_size,
            quantize_embeddings=quantize_embeddings,
            attention_sinks=attention_sinks,
            kv_dtype=kv_cache_dtype,
            attention_window=attention_window,
            slack=slack,
            max_encoder_len=max_encoder_len,
            modalities=tuple(modality or ()),
            image_size=None if image_size is None else _sides(image_size),
            verify=verify,
            overwrite=overwrite,
            progress=progress,
            **options,
        )
    if json:
        terminal.json({"path": str(bundle.path), **bundle.manifest.model_dump(mode="json")})
    else:
        _print_export(terminal, bundle)


def _target_options(given: list[str]) -> dict[str, Any]:
    """`["llm_runner=true", "form=explicit"]` is `{"llm_runner": True, "form": "explicit"}`."""
    options: dict[str, Any] = {}
    hint = "'--option' / '-O'"
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier() or name in options:
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE, or its name was given before", param_hint=hint)
        if name in _ARGUMENTS:
            raise typer.BadParameter(
                f"{name} is no option of a target; use --{name.replace('_', '-')}", param_hint=hint
            )
        try:
            options[name] = loads(value)
        except ValueError:
            options[name] = value
    return options


def _print_export(terminal: Terminal, bundle: Bundle) -> None:
    manifest = bundle.manifest
    terminal.print(f"{bundle.path}: {manifest.architecture} with its cache, for {manifest.target}\n")
    print_files(terminal, bundle)
    terminal.print(f"\nweights {bytes_text(manifest.weights_bytes)}, cache {bytes_text(manifest.cache_bytes)}")
    print_verification(terminal, bundle)


def print_files(terminal: Terminal, bundle: Bundle) -> None:
    """Every file the manifest lists, with what it holds."""
    table = simple_table("file", "size", "holds", right=("size",))
    for name, file in bundle.manifest.model_dump(mode="json")["files"].items():
        table.add_row(name, bytes_text(file["bytes"]), file["holds"])
    terminal.print(table)


def print_dtype(terminal: Terminal, bundle: Bundle) -> None:
    """What became of the dtype the weights are stored in, if it was not kept."""
    import torch

    from ..backends.dtypes import target_dtypes
    from ..pipeline.dtypes import DtypeChoice, choose_dtype

    manifest = bundle.manifest
    if manifest.stored_dtype in (None, manifest.dtype):
        return
    stored, chosen = getattr(torch, manifest.stored_dtype), getattr(torch, manifest.dtype)
    if manifest.quantization is None and target_dtypes(manifest.target, manifest.options).best != chosen:
        terminal.print(str(DtypeChoice(stored, chosen)))
    else:
        quantized = manifest.quantization is not None
        terminal.print(str(choose_dtype(stored, None, manifest.target, manifest.options, quantized)))


def print_verification(terminal: Terminal, bundle: Bundle) -> None:
    """The recorded result, in one line."""
    from ..verification.verify import VerifyReport

    print_dtype(terminal, bundle)
    recorded = bundle.manifest.verification
    if recorded is None:
        terminal.print(f"not verified; run: exportable-cache verify {bundle.path} --model MODEL")
    else:
        terminal.print(str(VerifyReport(**recorded)))
    print_quantization(terminal, bundle)
    print_kv_cache(terminal, bundle)


def print_kv_cache(terminal: Terminal, bundle: Bundle) -> None:
    """What a cache of fewer bits saves and does, if it is one."""
    kept = bundle.manifest.kv_cache
    if kept is None:
        return
    text = f"keys and values in {kept.dtype}: {bytes_text(bundle.manifest.cache_bytes)} instead of {bytes_text(kept.float_bytes)}"
    if kept.max_difference is not None:
        text += (
            f"; against the float model over an exact cache, {kept.positions} positions of random tokens: max |logit difference| "
            f"{kept.max_difference:.1e}, same argmax {kept.argmax_agreement:.1%}"
        )
    terminal.print(text)


def print_quantization(terminal: Terminal, bundle: Bundle) -> None:
    """How weights were quantised and what it cost, if they were."""
    quantized = bundle.manifest.quantization
    if quantized is None:
        return
    from ..models.quantization import Quantization

    terminal.print(f"quantised: {Quantization(quantized.linear, quantized.group_size, quantized.embeddings)}")
    if quantized.max_difference is not None:
        terminal.print(
            f"against the float model, {quantized.positions} positions of random tokens: max |logit difference| "
            f"{quantized.max_difference:.1e}, same argmax {quantized.argmax_agreement:.1%}"
        )
    if quantized.accuracy_after is not None:
        terminal.print(
            f"{quantized.questions} questions of the demo's task right: "
            f"{quantized.accuracy_before:.1%} before, {quantized.accuracy_after:.1%} after"
        )
