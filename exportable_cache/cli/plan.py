"""The command `exportable-cache plan`."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..cache.spec import CacheSpec
from ..common.progress import bytes_text
from ..errors import shown
from ..pipeline.recipes import RECIPES, remark_of
from ..pipeline.spec import Split
from .export import print_recipe_sizes
from .options import JsonOption, ModelArgument, PlanTargetOption, declared, options_of, takes
from .output.tables import LayerRow, layer_table
from .output.terminal import Terminal

if TYPE_CHECKING:
    from ..parallel.heads import RankPlan
    from ..pipeline.plan import Plan

_RECIPE: Any = Literal[tuple(RECIPES)]
RecipeOption = Annotated[
    _RECIPE | None,
    typer.Option("--recipe", help="Plan for an ExecuTorch program with this recipe.", show_default=False),
]


@takes(
    declared("model", ModelArgument),
    *options_of([CacheSpec, Split]),
    declared("target", PlanTargetOption, None),
    declared("recipe", RecipeOption, None),
    declared("json", JsonOption, False),
)
def plan(ctx: typer.Context, model: str, target: str | None, recipe: str | None, json: bool, **given: Any) -> None:
    """Plan the cache of a model, without loading its weights."""
    from ..errors import UnsupportedModelError

    terminal: Terminal = ctx.obj
    with terminal.progress(f"reading the config of {model}"):
        from ..pipeline.plan import plan_cache

        split = Split(**{one.name: given.pop(one.name) for one in fields(Split)})
        made = plan_cache(model, CacheSpec(**given), target, split, recipe)
    if json:
        terminal.json(made.to_dict())
    if made.refusal:
        raise UnsupportedModelError(made.refusal)
    if not json:
        print_plan(terminal, made)


def print_plan(terminal: Terminal, made: Plan) -> None:
    """Print tables and totals."""
    from ..pipeline.plan import MOST_TOKENS

    name = made.architecture or made.model_type
    terminal.print(
        f"{shown(made.source)}: {shown(name)}, batch size {made.batch_size}, {made.dtype}, max_cache_len "
        f"{made.max_cache_len}\n"
    )
    names = LayerRow.__dataclass_fields__
    terminal.print(
        layer_table(LayerRow(**{k: v for k, v in asdict(layer).items() if k in names}) for layer in made.layers)
    )
    holds = "any number of tokens" if made.max_length is None else f"up to {made.max_length} tokens"
    terminal.print(f"\nstatic cache   {bytes_text(made.cache_bytes)} for {holds} per row")
    terminal.print(f"DynamicCache   {bytes_text(made.dynamic_bytes)} at {made.max_cache_len} tokens")
    terminal.print(f"weights        {bytes_text(made.weights_bytes)}")
    remarks = [made.remark, made.positions]
    if made.recipe is not None:
        remarks.append(remark_of(made.recipe, made.target or "", {}, made.dtype))
    for remark in remarks:
        if remark:
            terminal.print(shown(remark))
    print_recipe_sizes(terminal, made.recipes)
    if made.tensor_parallel is not None:
        _print_rank(terminal, made.tensor_parallel)
    if made.memory is not None:
        more = " or more" if made.longest == MOST_TOKENS else ""
        fits = f"max_cache_len {made.longest}{more} fits" if made.longest else "not even one token fits"
        terminal.print(f"\nin {bytes_text(made.memory)} a process, for weights and cache, {fits}")


def _print_rank(terminal: Terminal, rank: RankPlan) -> None:
    count = len(rank.split_layers)
    terminal.print(
        f"\neach of {rank.ranks} ranks\n"
        f"cache          {bytes_text(rank.cache_bytes)}: heads split in {count} layer{'' if count == 1 else 's'}, "
        f"{bytes_text(rank.replicated_bytes)} replicated\n"
        f"weights        {bytes_text(rank.weights_bytes)}\n"
        f"a decode step  {rank.messages} messages of {bytes_text(rank.message_bytes)}, {rank.sums} of them sums; "
        f"a rank sends at least {bytes_text(rank.sent_bytes)}"
    )
