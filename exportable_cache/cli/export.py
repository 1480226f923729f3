"""The commands `exportable-cache export` and `exportable-cache plan`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from json import loads
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..backends.executorch.delegates.table import DELEGATES
from ..backends.executorch.options import NATIVE_KERNELS_NEEDED, ExecutorchOptions, needs_native_kernels
from ..backends.tensorrt.options import TensorRTOptions
from ..cache.spec import CacheSpec
from ..common.progress import bytes_text
from ..common.settings import keyword_of
from ..errors import UnsupportedModelError, shown
from ..models.quantization.spec import Quantization
from ..pipeline.recipes import RECIPES, has_recipes, remark_of
from ..pipeline.spec import DEFAULT_CACHE_LEN, ExportSpec, Split
from ..program.spec import ProgramSpec
from .options import (
    REQUIRED_OPTION,
    TARGET,
    Changes,
    JsonOption,
    ModelArgument,
    PlanTargetOption,
    checked_size,
    declared,
    options_of,
    sides_of,
    takes,
)
from .terminal import LayerRow, Terminal, layer_table, simple_table

if TYPE_CHECKING:
    from ..bundle.bundle import Bundle
    from ..parallel.heads import RankPlan
    from ..pipeline.export import DryRun
    from ..pipeline.plan import Plan, RecipeSize


_CACHE_LEN = {"max_cache_len": Changes(default=None, about={"show_default": DEFAULT_CACHE_LEN})}
_OPTIONS = tuple(
    options_of(
        [ExportSpec, CacheSpec, ProgramSpec, Quantization, ExecutorchOptions, TensorRTOptions],
        {
            "target": TARGET,
            "output_dir": REQUIRED_OPTION,
            **_CACHE_LEN,
            "image_size": Changes(about={"callback": checked_size}),
            # None by default, because other targets have no delegate.
            "delegate": Changes(default=None, about={"show_default": "xnnpack"}),
            "form": Changes(default=None, about={"show_default": "resident"}),
        },
    )
)
#: Pages of the documentation, by target.
_GUIDES = {
    "aoti": "docs/guides/aoti.md",
    "coreai": "docs/guides/coreai.md",
    "executorch": "docs/guides/phone.md",
    "pt2": "docs/bundles.md",
    "tensorrt": "docs/guides/tensorrt.md",
}
#: Options of single targets with a command-line option; `-O` also takes them.
_SHORTHANDS = ("delegate", "sm", "allow_partial", "form")
#: Other arguments of `export`, and how the command spells them, if it does.
_OTHERWISE = {
    "model_or_path": "MODEL",
    "tokenizer": None,
    "progress": None,
}


@takes(
    declared("model", ModelArgument),
    *sorted(_OPTIONS, key=lambda option: option.default is not option.empty),
    declared(
        "option",
        Annotated[
            list[str] | None,
            typer.Option(
                "--option",
                "-O",
                metavar="NAME=VALUE",
                help="Option of the target, such as llm_runner=true; may be repeated.",
            ),
        ],
        None,
    ),
    declared("json", JsonOption, False),
)
def export(ctx: typer.Context, model: str, option: list[str] | None, json: bool, **given: Any) -> None:
    """Export a model with its cache to a bundle, and verify it."""
    terminal: Terminal = ctx.obj
    named = {name: given.pop(name) for name in _SHORTHANDS}
    named["allow_partial"] = "true" if named["allow_partial"] else None
    shorthands = [f"{name}={value}" for name, value in named.items() if value is not None]
    options = _target_options([*(option or []), *shorthands])
    given["modalities"] = tuple(given["modalities"] or ())
    given["lora"] = tuple(given["lora"] or ())
    if given["image_size"] is not None:
        given["image_size"] = sides_of(given["image_size"])
    with terminal.progress("loading libraries") as progress:
        from ..pipeline.export import export as make_bundle

        made: Any = make_bundle(model, **given, progress=progress, **options)
    if given["dry_run"]:
        _print_dry_run(terminal, made, json)
        return
    sizes = _sizes_of_recipes(model, made, given)
    if json:
        recipes = {"recipes": {name: asdict(size) for name, size in sizes.items()}} if sizes else {}
        terminal.json({"path": str(made.path), **made.manifest.model_dump(mode="json"), **recipes})
    else:
        _print_export(terminal, made, sizes)


def _target_options(given: list[str]) -> dict[str, Any]:
    """Parse target options: `["llm_runner=true", "form=explicit"]` is `{"llm_runner": True, "form": "explicit"}`."""
    options: dict[str, Any] = {}
    hint = "'--option' / '-O'"
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier() or name in options:
            raise typer.BadParameter(f"must be NAME=VALUE with each NAME once, got {text!r}", param_hint=hint)
        if name in _arguments():
            use = _arguments()[name]
            raise typer.BadParameter(
                f"{name} is not an option of a target; {f'use {use}' if use else 'leave it out'}", param_hint=hint
            )
        try:
            options[name] = loads(value)
        except ValueError:
            options[name] = value
    return options


def _arguments() -> dict[str, str | None]:
    """Return how the command spells each argument of `export`."""
    spelled = {one.name: one.annotation.__metadata__[0].default for one in _OPTIONS if one.name not in _SHORTHANDS}
    return {**spelled, **_OTHERWISE}


def _print_dry_run(terminal: Terminal, found: DryRun, json: bool) -> None:
    if json:
        terminal.json(found.to_dict())
        return
    terminal.print(
        f"{shown(found.output_dir)} would hold {shown(found.architecture)} with its cache, for {found.target}\n"
    )
    table = simple_table("file", "holds")
    for name, holds in found.files.items():
        table.add_row(name, holds)
    terminal.print(table)
    terminal.print(
        f"\nweights {bytes_text(found.weights_bytes)}, {_cache_text(found.cache_bytes, found.max_cache_len)}"
    )
    terminal.print(f"memory at least {bytes_text(found.least_memory_bytes)} for both; the duration is unknown")
    print_recipe_sizes(terminal, found.recipes)
    for remark in found.remarks:
        terminal.print(shown(remark))
    terminal.print("no weights were read, and no files written")


def _cache_text(size: int, length: int) -> str:
    """Return the size and the length of a cache in words."""
    return f"cache {bytes_text(size)} (max_cache_len {length})"


def _sizes_of_recipes(model: str, bundle: Bundle, given: dict[str, Any]) -> dict[str, RecipeSize]:
    """Return the sizes with each recipe; none for programs without recipes, and where the config is not enough."""
    from ..pipeline.plan import sizes_of_recipes

    if not has_recipes(bundle.manifest.target, bundle.manifest.options):
        return {}
    names = {keyword_of(one) for one in fields(CacheSpec) if one.init} - {"dtype", "kv_dtype"}
    given = {**given, "max_cache_len": bundle.manifest.program.max_cache_len}
    try:
        return sizes_of_recipes(model, CacheSpec(**{name: given[name] for name in names if name in given}))
    except UnsupportedModelError:
        return {}


def print_recipe_sizes(terminal: Terminal, sizes: Mapping[str, RecipeSize]) -> None:
    """Print a table of recipes with the sizes of weights and cache, if there are any."""
    if not sizes:
        return
    table = simple_table("recipe", "weights", "cache", "gives", right=("weights", "cache"))
    for name, size in sizes.items():
        table.add_row(name, bytes_text(size.weights_bytes), bytes_text(size.cache_bytes), RECIPES[name].about)
    terminal.print()
    terminal.print(table)
    terminal.print()


def _print_export(terminal: Terminal, bundle: Bundle, sizes: Mapping[str, RecipeSize]) -> None:
    manifest = bundle.manifest
    terminal.print(f"{shown(bundle.path)}: {shown(manifest.architecture)} with its cache, for {manifest.target}\n")
    print_files(terminal, bundle)
    kept = _cache_text(manifest.cache_bytes, manifest.program.max_cache_len)
    terminal.print(f"\nweights {bytes_text(manifest.weights_bytes)}, {kept}")
    print_verification(terminal, bundle)
    print_recipe_sizes(terminal, sizes)
    terminal.print("next:" if sizes else "\nnext:")
    for line in next_steps(bundle):
        terminal.print(f"  {line}")


def next_steps(bundle: Bundle) -> Iterator[str]:
    """Yield the commands that run a bundle here, and the guide of its target."""
    from ..backends.registry import backend_for
    from ..program.inputs.multimodal import kinds_taken

    manifest, path = bundle.manifest, shlex.quote(str(bundle.path))
    if manifest.tokenizer is not None and DELEGATES[manifest.options.get("delegate", "xnnpack")].verified == "executed":
        kinds = kinds_taken(manifest.description().methods)
        # `generate` takes no videos, and reads files with the model's processor.
        files = [f"--{kind} FILE" for kind in kinds if kind in ("image", "audio") and bundle.has_processor]
        prompt = " ".join(["--prompt TEXT", *files] if "text" in kinds else files[:1] or [f"--{kinds[0]} FILE"])
        trust = " --trust" if backend_for(manifest.target).machine_code else ""
        start = "exportable-cache"
        if manifest.ranks is not None:
            start = f"torchrun --nproc-per-node {manifest.ranks.size} -m exportable_cache"
        yield f"{start} generate {path} {prompt}{trust}"
        if manifest.ranks is None and "text" in kinds:
            if any(name.startswith("tokenizer/chat_template") for name in manifest.files):
                yield f"{start} chat {path}{trust}"
            yield f"{start} serve {path}{trust}"
    yield f"guide: {_GUIDES.get(manifest.target, 'docs/bundles.md')}"


def print_files(terminal: Terminal, bundle: Bundle) -> None:
    """Print every file of the manifest and its content."""
    table = simple_table("file", "size", "holds", right=("size",))
    for name, file in bundle.manifest.model_dump(mode="json")["files"].items():
        table.add_row(name, bytes_text(file["bytes"]), file["holds"])
    terminal.print(table)


def print_dtype(terminal: Terminal, bundle: Bundle) -> None:
    """Print how the stored dtype of the weights was changed, if it was."""
    import torch

    from ..pipeline.dtypes import DtypeChoice, choose_dtype

    manifest = bundle.manifest
    if manifest.stored_dtype in (None, manifest.dtype):
        return
    stored, chosen = getattr(torch, manifest.stored_dtype), getattr(torch, manifest.dtype)
    usual = choose_dtype(stored, None, manifest.target, manifest.options, manifest.quantization is not None)
    terminal.print(str(usual if usual.chosen == chosen else DtypeChoice(stored, chosen)))


def print_verification(terminal: Terminal, bundle: Bundle) -> None:
    """Print remarks and the recorded verification."""
    from ..verification.report import VerifyReport

    for remark in bundle.manifest.remarks:
        terminal.print(shown(remark))
    print_dtype(terminal, bundle)
    recorded = bundle.manifest.verification
    if recorded is None:
        terminal.print(f"not verified; run: exportable-cache verify {shown(bundle.path)} --model MODEL")
    else:
        terminal.print(shown(VerifyReport.recorded(recorded)))
    print_quantization(terminal, bundle)
    print_kv_cache(terminal, bundle)
    print_draft(terminal, bundle)
    print_recipe(terminal, bundle)
    if needs_native_kernels(bundle.manifest.options):
        terminal.print(NATIVE_KERNELS_NEEDED)


def print_recipe(terminal: Terminal, bundle: Bundle) -> None:
    """Print the recipe of a bundle, its size on disk, its distance from the model, and what it lacks."""
    manifest = bundle.manifest
    if manifest.recipe is None:
        return
    changed = ", ".join(f"{name} {value}" for name, value in manifest.recipe.changed.items())
    text = f"recipe {manifest.recipe.name}{f' with {changed}' if changed else ''}: "
    text += f"{bytes_text(sum(file.bytes for file in manifest.files.values()))} on disk"
    from ..verification.report import distance_from_model

    distance = distance_from_model(manifest)
    text += "" if distance is None else f", max |logit difference| from the model {distance:.1e}"
    terminal.print(shown(text))
    remark = remark_of(manifest.recipe.name, manifest.target, manifest.options, manifest.dtype, manifest.stored_dtype)
    if remark:
        terminal.print(remark)


def print_kv_cache(terminal: Terminal, bundle: Bundle) -> None:
    """Print size and effect of a quantized cache, if there is one."""
    kept = bundle.manifest.kv_cache
    if kept is None:
        return
    text = (
        f"keys and values in {kept.dtype}: {bytes_text(bundle.manifest.cache_bytes)} instead of "
        f"{bytes_text(kept.float_bytes)}"
    )
    if kept.max_difference is not None:
        text += (
            f"; against the model without rounding, {kept.positions} positions of random tokens: max |logit "
            f"difference| {kept.max_difference:.1e}, same argmax {kept.argmax_agreement:.1%}"
        )
    terminal.print(text)


def print_draft(terminal: Terminal, bundle: Bundle) -> None:
    """Print the acceptance of the draft head, if there is one."""
    draft = bundle.manifest.draft
    if draft is not None:
        measured = draft.acceptance or "acceptance not measured, see --draft-text of export"
        terminal.print(shown(f"draft head {draft.head}: {measured}"))


def print_quantization(terminal: Terminal, bundle: Bundle) -> None:
    """Print how weights were quantized and the effect, if they were."""
    quantized = bundle.manifest.quantization
    if quantized is None:
        return
    text = f"quantised: {Quantization(quantized.linear, quantized.group_size, quantized.embeddings)}"
    if quantized.quantized_bytes is not None:
        text += f"; {bytes_text(quantized.quantized_bytes)} of integers and scales"
        text += f", {bytes_text(quantized.other_bytes)} stay {bundle.manifest.dtype}"
    terminal.print(text)
    calibrated = quantized.calibration
    if calibrated is not None:
        text = f"calibrated on {calibrated.tokens:,} tokens"
        if calibrated.distance_before is not None:
            text += (
                f", {calibrated.layers} layers: their outputs on held-out text differ from the float model's by "
                f"{calibrated.distance_before:.2%} of their magnitude before, {calibrated.distance_after:.2%} after"
            )
        terminal.print(text)
    if quantized.max_difference is not None:
        terminal.print(
            f"against the float model, {quantized.positions} positions of random tokens: max |logit difference| "
            f"{quantized.max_difference:.1e}, same argmax {quantized.argmax_agreement:.1%}"
        )
    if quantized.accuracy_after is not None:
        terminal.print(
            f"correct of {quantized.questions} questions of the demo's task: {quantized.accuracy_before:.1%} before, "
            f"{quantized.accuracy_after:.1%} after"
        )


_RECIPE: Any = Literal[tuple(RECIPES)]
RecipeOption = Annotated[
    _RECIPE | None,
    typer.Option("--recipe", help="Plan for an ExecuTorch program with this recipe.", show_default=False),
]


@takes(
    declared("model", ModelArgument),
    *options_of([CacheSpec, Split], _CACHE_LEN),
    declared("target", PlanTargetOption, None),
    declared("recipe", RecipeOption, None),
    declared("json", JsonOption, False),
)
def plan(ctx: typer.Context, model: str, target: str | None, recipe: str | None, json: bool, **given: Any) -> None:
    """Plan the cache of a model, without loading its weights."""
    from ..errors import UnsupportedModelError

    terminal: Terminal = ctx.obj
    with terminal.progress(f"reading the config of {model}"):
        from ..pipeline.plan import plan as plan_model

        made = plan_model(model, target=target, recipe=recipe, **given)
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
