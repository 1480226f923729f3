"""Plan a cache from a model's config: the storage and bytes of every layer, without loading weights."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..backends.registry import check_target
from ..cache.policies import SinkPolicy
from ..cache.spec import CacheSpec
from ..common.tensors import dtype_name
from ..errors import InputError, UnsupportedModelError
from ..models.layers.specs import check_model_type, check_sinks, item_slots_of, layer_specs_from_config
from ..models.loading.loading import live_model, load_config, stored_dtype
from ..models.loading.support import check_sizes
from ..models.loading.without_weights import ask_without_weights, model_without_weights
from ..models.patches.registry import patch_model
from ..models.positions import beyond_positions, check_positions
from ..models.quantization.quantize import check_quantizable
from ..models.quantization.sizes import float_bytes, quantized_bytes
from ..models.quantization.spec import Quantization
from ..parallel.heads import RankPlan, check_tensor_parallel, messages_of_token, split_layers, weights_of_rank
from .dtypes import DtypeChoice, check_dtype, choose_dtype
from .recipes import RECIPES, FilledOptions, fill_options
from .spec import Split, cache_len_of, dtype_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from ..cache.layer_spec import LayerSpec
    from ..cache.layers import CacheLayer

_WHOLE = Split()
#: Upper bound of the search for the longest cache that fits.
MOST_TOKENS = 1 << 27


@dataclass(frozen=True)
class PlannedLayer:
    """A layer of a planned cache.

    `PlannedLayer(0, "sliding_attention", "ring", 512, 512, 4, 64, 64, "float32", 1048584)` is a ring of 512 slots.

    Attributes:
        index: Index in the model.
        layer_type: Transformers' name, as in `config.layer_types`.
        policy: Storage policy: `ring`, `full int8`, `recurrent`.
        slots: Capacity in tokens; a ring overwrites the oldest. None if the layer keeps no keys.
        window: Tokens that a query attends to, including itself and attention sinks; None for all.
        heads: Number of key and value heads.
        head_dim: Size of a key head.
        value_head_dim: Size of a value head.
        dtype: Dtype of keys and values.
        bytes: Bytes of all state tensors.
    """

    index: int
    layer_type: str
    policy: str
    slots: int | None
    window: int | None
    heads: int | None
    head_dim: int | None
    value_head_dim: int | None
    dtype: str
    bytes: int


@dataclass(frozen=True)
class RecipeSize:
    """Sizes of an export to ExecuTorch with a recipe.

    Attributes:
        weights_bytes: Bytes of the weights in the program; None if they are unknown, or the recipe cannot quantize the
            model.
        cache_bytes: Bytes of the cache, which the opened program allocates.
    """

    weights_bytes: int | None
    cache_bytes: int


@dataclass(frozen=True)
class Plan:
    """The result of `plan`.

    Attributes:
        source: The requested model: `demo`, a hub id, a folder, or a class name.
        model_type: Model type of the config.
        architecture: Class of the model, if it is known.
        max_cache_len: Tokens that a full-attention layer would hold.
        batch_size: Number of rows.
        dtype: Dtype of keys, values and exported weights.
        layers: The layers; empty if the model is not supported.
        max_length: Tokens that a row can hold; None if only rings keep state.
        cache_bytes: Bytes of the static cache.
        dynamic_bytes: Bytes of a transformers `DynamicCache` with `max_cache_len` tokens.
        weights_bytes: Bytes of the parameters, counting tied ones once; only the text decoder's if that is a causal LM
            within a larger model. None if the model cannot be built without its weights.
        refusal: Reason why the cache does not support this model, or None.
        target: Target of the plan, if any.
        stored_dtype: Dtype of the stored weights; None if the config does not name it.
        remark: Change of the stored dtype, if there is one.
        positions: A line of text if `max_cache_len` exceeds the positions that the model was trained for.
        tensor_parallel: Share and traffic of each rank, if requested.
        memory: Bytes that a process may use for weights and cache, if given.
        longest: Largest `max_cache_len` that fits into `memory`, 0 if none does, at most `MOST_TOKENS`.
        recipe: Recipe of the plan; None without a target.
        recipes: Sizes with each recipe, by name; empty for other targets than `executorch`.
    """

    source: str
    model_type: str
    architecture: str | None
    max_cache_len: int
    batch_size: int
    dtype: str
    layers: tuple[PlannedLayer, ...]
    max_length: int | None
    cache_bytes: int | None
    dynamic_bytes: int | None
    weights_bytes: int | None
    refusal: str | None = None
    target: str | None = None
    stored_dtype: str | None = None
    remark: str = ""
    positions: str = ""
    tensor_parallel: RankPlan | None = None
    memory: int | None = None
    longest: int | None = None
    recipe: str | None = None
    recipes: dict[str, RecipeSize] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return {**asdict(self), "layers": [asdict(layer) for layer in self.layers]}


def plan(
    model_or_path: str | Path | PreTrainedModel | PreTrainedConfig,
    max_cache_len: int | None = None,
    batch_size: int = 1,
    dtype: torch.dtype | str | None = None,
    target: str | None = None,
    recipe: str | None = None,
    **options: Any,
) -> Plan:
    """Plan the cache of a model from its config, without reading weights or allocating a cache.

    Args:
        model_or_path: `demo`, a hub id, a folder, a model or a config.
        max_cache_len: Tokens that a full-attention layer shall hold; by default that of `export`.
        batch_size: Number of rows.
        dtype: Dtype of keys, values and weights. By default the best one of `target`; without a target the config's, or
            float32.
        target: Target of the export, which need not be installed; `executorch` with a recipe.
        recipe: Recipe of the export, see `export`.
        **options: Further fields of `CacheSpec` and `Split`: tensor_parallel, memory.

    Returns:
        The plan. For an unsupported model it has no layers, and the reason in `refusal`.

    Raises:
        InputError: If an option is out of range, the cache holds more tokens than a model's position table, the target
            does not support the dtype, heads cannot be split evenly over ranks, or there is no such model or target.
        UnsupportedModelError: If transformers does not know the model type, or it is not a causal LM.
    """
    names = {one.name for one in fields(Split)}
    split = Split(**{name: given for name, given in options.items() if name in names})
    further = {name: given for name, given in options.items() if name not in names}
    spec = CacheSpec(cache_len_of(model_or_path, max_cache_len), batch_size, dtype, **further)
    return plan_cache(model_or_path, spec, target, split, recipe)


def plan_cache(
    model_or_path: str | Path | PreTrainedModel | PreTrainedConfig,
    spec: CacheSpec,
    target: str | None = None,
    split: Split = _WHOLE,
    recipe: str | None = None,
) -> Plan:
    """Plan a cache as `plan` does, from a `CacheSpec`."""
    target = "executorch" if target is None and recipe is not None else target
    filled = FilledOptions("")
    if target is not None:
        check_target(target)
        filled = fill_options(recipe, target, {}, {"kv_dtype": spec.kv_dtype, "dtype": dtype_of(spec)})
        check_dtype(dtype_of(spec), target, filled.options)
        spec = replace(spec, kv_dtype=filled.settings["kv_dtype"])
    quantization = filled.quantization
    config, live = load_config(model_or_path), live_model(model_or_path)
    check_sizes(config, _source(model_or_path))
    stored = stored_dtype(live or config)
    choice = _choice(stored or torch.float32, dtype_of(spec), target, filled)
    chosen = choice.chosen
    model = live or model_without_weights(config)
    about: dict[str, Any] = {
        "source": _source(model_or_path),
        "model_type": config.model_type,
        "architecture": _architecture(config, model),
        "max_cache_len": spec.max_cache_len,
        "batch_size": spec.batch_size,
        "dtype": dtype_name(chosen),
        "weights_bytes": None if model is None else weights_bytes(model, choice, quantization),
        "target": target,
        "recipe": filled.recipe or None,
        "stored_dtype": None if stored is None else dtype_name(stored),
        "remark": str(choice) if stored is not None and choice.stored != choice.chosen else "",
        "positions": beyond_positions(config, spec.max_cache_len, spec.sinks is not None),
    }
    try:
        check_model_type(config)
        if live is not None:
            patch_model(live)
        layer_specs = _layer_specs(config, model, spec)
        if spec.sinks is not None:
            check_sinks(config, layer_specs)
    except UnsupportedModelError as error:
        return Plan(**about, layers=(), max_length=None, cache_bytes=None, dynamic_bytes=None, refusal=str(error))
    built = [layer_spec.build(spec, chosen, "meta") for layer_spec in layer_specs]
    limits = [layer.max_length for layer in built if layer.max_length is not None]
    if model is not None:
        check_positions(model, min(limits, default=None))
    ranks = None if split.tensor_parallel is None else _rank_plan(config, model, layer_specs, built, (split, chosen))
    longest = None if split.memory is None else _longest(model, layer_specs, spec, split, chosen)
    assert not isinstance(split.memory, str)
    sinks = spec.sinks
    return Plan(
        **about,
        layers=tuple(
            PlannedLayer(
                index=index,
                layer_type=layer_spec.layer_type,
                policy=layer.label,
                slots=layer.capacity,
                window=sinks.tokens + sinks.window
                if sinks is not None and isinstance(layer.policy, SinkPolicy)
                else layer_spec.window,
                heads=layer_spec.num_heads,
                head_dim=layer_spec.head_dim,
                value_head_dim=layer_spec.value_head_dim,
                dtype=_kept_dtype(layer),
                bytes=layer.nbytes,
            )
            for index, (layer_spec, layer) in enumerate(zip(layer_specs, built, strict=True))
        ),
        max_length=min(limits, default=None),
        cache_bytes=sum(layer.nbytes for layer in built),
        dynamic_bytes=sum(_dynamic_bytes(layer_spec, spec, chosen) for layer_spec in layer_specs),
        tensor_parallel=ranks,
        memory=split.memory,
        longest=longest,
        recipes=_sizes(model, layer_specs, spec, stored) if target == "executorch" else {},
    )


def _rank_plan(
    config: PreTrainedConfig,
    model: PreTrainedModel | None,
    layer_specs: list[LayerSpec],
    built: list[CacheLayer],
    split_and_dtype: tuple[Split, torch.dtype],
) -> RankPlan:
    """Plan the share of one rank. `split_and_dtype` has the number of ranks and the dtype of weights."""
    if model is None or getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"tensor_parallel cannot be planned for {config.model_type!r}, because it is an encoder-decoder or cannot "
            "be built without its weights; leave it out"
        )
    dtype, ranks = split_and_dtype[1], split_and_dtype[0].tensor_parallel
    assert ranks is not None
    check_tensor_parallel(model, layer_specs, ranks)
    split = split_layers(model, layer_specs)
    split_bytes = sum(_bytes_of_heads(built[index]) for index in split)
    total = sum(layer.nbytes for layer in built)
    messages = list(messages_of_token(model, ranks, _rows(built), dtype))
    return RankPlan(
        ranks=ranks,
        weights_bytes=weights_of_rank(model, layer_specs, ranks, dtype),
        cache_bytes=sum(_bytes_on_a_rank(model, layer_specs, built, ranks)),
        split_layers=split,
        replicated_bytes=total - split_bytes,
        messages=len(messages),
        sums=sum(kind == "sum" for kind, _, _ in messages),
        message_bytes=sum(size for _, size, _ in messages),
        sent_bytes=sum(sent for _, _, sent in messages),
    )


def _bytes_on_a_rank(
    model: PreTrainedModel, layer_specs: list[LayerSpec], built: list[CacheLayer], ranks: int | None
) -> list[int]:
    """Return the bytes of each layer on one rank."""
    found = [layer.nbytes for layer in built]
    for index in split_layers(model, layer_specs) if ranks is not None else ():
        heads = _bytes_of_heads(built[index])
        found[index] += heads // min(ranks or 1, layer_specs[index].num_heads or 1) - heads
    return found


def _longest(
    model: PreTrainedModel | None, layer_specs: list[LayerSpec], spec: CacheSpec, split: Split, dtype: torch.dtype
) -> int:
    """Return the largest `max_cache_len` with which every process stays within its memory."""
    memory = split.memory
    if model is None or not isinstance(memory, int):
        raise UnsupportedModelError(
            "memory cannot be planned, because this model cannot be built without its weights; leave it out"
        )

    def fits(tokens: int) -> bool:
        built = [layer_spec.build(replace(spec, max_cache_len=tokens), dtype, "meta") for layer_spec in layer_specs]
        ranks = split.tensor_parallel
        weights = weights_of_rank(model, layer_specs, ranks or 1, dtype)
        return weights + sum(_bytes_on_a_rank(model, layer_specs, built, ranks)) <= memory

    least, most = 0, MOST_TOKENS
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return least


def _bytes_of_heads(layer: CacheLayer) -> int:
    return sum(tensor.nbytes for name, tensor in layer.named_state() if "num_heads" in layer.state[name].dims)


def _rows(built: list[CacheLayer]) -> int:
    return next(layer.cumulative_length.shape[0] for layer in built if not layer.is_dummy)


def sizes_of_recipes(
    model_or_path: str | Path | PreTrainedModel | PreTrainedConfig, spec: CacheSpec
) -> dict[str, RecipeSize]:
    """Return the sizes of exports to ExecuTorch with each recipe that the model's dtype allows, from its config.

    Args:
        model_or_path: A model as for `plan`.
        spec: The cache; its `kv_dtype` is the recipe's.

    Raises:
        UnsupportedModelError: If the sizes cannot be known from the config.
    """
    config, live = load_config(model_or_path), live_model(model_or_path)
    model = live or model_without_weights(config)
    return _sizes(model, _layer_specs(config, model, spec), spec, stored_dtype(live or config))


def _sizes(
    model: PreTrainedModel | None, layer_specs: list[LayerSpec], spec: CacheSpec, stored: torch.dtype | None
) -> dict[str, RecipeSize]:
    sizes = {}
    for name in RECIPES:
        filled = fill_options(name, "executorch", {})
        try:
            choice = _choice(stored or torch.float32, None, "executorch", filled)
        except InputError:
            # `half` is for checkpoints in bfloat16.
            continue
        of_recipe = replace(spec, kv_dtype=filled.settings["kv_dtype"])
        cache = sum(layer_spec.build(of_recipe, choice.chosen, "meta").nbytes for layer_spec in layer_specs)
        try:
            weights = None if model is None else weights_bytes(model, choice, filled.quantization)
        except (InputError, UnsupportedModelError):
            weights = None
        sizes[name] = RecipeSize(weights, cache)
    return sizes


def _choice(
    stored: torch.dtype, requested: torch.dtype | None, target: str | None, filled: FilledOptions
) -> DtypeChoice:
    if target is None:
        return DtypeChoice(stored, requested or stored)
    return choose_dtype(stored, requested, target, filled.options, filled.quantization is not None)


def _kept_dtype(layer: CacheLayer) -> str:
    """Return the dtype of the first tensor of a layer besides its lengths; "-" if there is none."""
    if layer.storage is not None and layer.storage.rounds:
        return layer.storage.kind
    kept = (dtype_name(tensor.dtype) for name, tensor in layer.named_state() if name != "cumulative_length")
    return next(kept, "-")


def _source(model_or_path: Any) -> str:
    return str(model_or_path) if isinstance(model_or_path, (str, Path)) else type(model_or_path).__name__


def _architecture(config: PreTrainedConfig, model: PreTrainedModel | None) -> str | None:
    named = getattr(config, "architectures", None)
    if named:
        return named[0]
    return None if model is None else type(model).__name__


def _layer_specs(config: PreTrainedConfig, model: PreTrainedModel | None, spec: CacheSpec) -> list[LayerSpec]:
    if not getattr(config, "is_encoder_decoder", False):
        if spec.max_encoder_len is not None and not item_slots_of(config):
            raise InputError(
                f"max_encoder_len is {spec.max_encoder_len}, but {config.model_type!r} has no encoder; leave it out"
            )
        return layer_specs_from_config(config, model)
    from ..models.layers.encoder import encoder_decoder_layers, encoder_of

    found = ask_without_weights(
        config,
        lambda one: encoder_decoder_layers(one, encoder_of(one, spec.max_encoder_len, spec.batch_size))[0],
        model,
    )
    if found is None:
        raise UnsupportedModelError(
            f"the sizes of {config.model_type!r} depend on values of its encoder, so a config is not enough; pass the "
            "loaded model, or use ExportableCache.from_model"
        )
    return found


def weights_bytes(model: PreTrainedModel, choice: DtypeChoice, quantization: Quantization | None) -> int:
    """Return the bytes of a model's weights in an export, from shapes alone."""
    if quantization is not None:
        check_quantizable(model, quantization)
        return quantized_bytes(model, quantization, choice.chosen)
    return float_bytes(model, choice.chosen, choice.stored if choice.kept else choice.chosen)


def _dynamic_bytes(layer_spec: LayerSpec, spec: CacheSpec, dtype: torch.dtype) -> int:
    """Return the bytes of transformers' dynamic layer after `max_cache_len` tokens.

    A sliding layer keeps `window - 1` tokens, because the next one is new.
    """
    states = [state for state in (*layer_spec.conv_states, *layer_spec.recurrent_states) if state is not None]
    fixed = sum(math.prod(state.shape) * (state.dtype or dtype).itemsize for state in states)
    tokens = layer_spec.encoder_slots or layer_spec.item_slots or spec.max_cache_len
    kept = tokens if layer_spec.window is None else min(tokens, layer_spec.window - 1)
    per_token = (layer_spec.num_heads or 0) * ((layer_spec.head_dim or 0) + (layer_spec.value_head_dim or 0)) + (
        layer_spec.index_head_dim or 0
    )
    return spec.batch_size * (fixed + per_token * kept * dtype.itemsize)
