"""`exportable-cache plan`"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from .layer_table import LayerRow, layer_table
from .options import (
    AttentionSinksOption,
    AttentionWindowOption,
    BatchSizeOption,
    DtypeOption,
    JsonOption,
    KvCacheDtypeOption,
    MaxEncoderLenOption,
    ModelArgument,
    PlanTargetOption,
    at_least,
)
from .terminal import Terminal, bytes_text

if TYPE_CHECKING:
    from ..pipeline.sizing import Plan


def plan(
    ctx: typer.Context,
    model: ModelArgument,
    max_cache_len: Annotated[
        int,
        typer.Option(
            "--max-cache-len", "-n", metavar="N", callback=at_least(1), help="Tokens a full-attention layer holds."
        ),
    ],
    target: PlanTargetOption = None,
    batch_size: BatchSizeOption = 1,
    dtype: DtypeOption = None,
    max_encoder_len: MaxEncoderLenOption = None,
    kv_cache_dtype: KvCacheDtypeOption = None,
    attention_sinks: AttentionSinksOption = None,
    attention_window: AttentionWindowOption = None,
    json: JsonOption = False,
) -> None:
    """Size the cache of a model, without loading its weights."""
    from ..errors import UnsupportedModelError

    terminal: Terminal = ctx.obj
    with terminal.progress(f"reading the config of {model}"):
        from ..pipeline.sizing import plan as make_plan

        made = make_plan(
            model,
            max_cache_len,
            batch_size,
            dtype,
            max_encoder_len,
            attention_sinks,
            attention_window,
            kv_cache_dtype,
            target,
        )
    if json:
        terminal.json(made.to_dict())
    if made.refusal:
        raise UnsupportedModelError(made.refusal)
    if not json:
        print_plan(terminal, made)


def print_plan(terminal: Terminal, made: Plan) -> None:
    """Tables and totals, for people."""
    name = made.architecture or made.model_type
    terminal.print(
        f"{made.source}: {name}, batch size {made.batch_size}, {made.dtype}, max_cache_len {made.max_cache_len}\n"
    )
    names = LayerRow.__dataclass_fields__
    terminal.print(
        layer_table(LayerRow(**{k: v for k, v in asdict(layer).items() if k in names}) for layer in made.layers)
    )
    holds = "any number of tokens" if made.max_length is None else f"up to {made.max_length} tokens"
    terminal.print(f"\nstatic cache   {bytes_text(made.cache_bytes)} for {holds} per row")
    terminal.print(f"DynamicCache   {bytes_text(made.dynamic_bytes)} at {made.max_cache_len} tokens")
    terminal.print(f"weights        {bytes_text(made.weights_bytes)}")
    if made.remark:
        terminal.print(made.remark)
