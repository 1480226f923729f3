"""What each layer of a model keeps: read from the model itself, by running one token through it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicIndexedLayer, LinearAttentionLayer, get_layer_types_and_kwargs

from ...cache.layer_spec import (
    CROSS_ATTENTION,
    HYBRID_TYPES,
    KEY_TYPES,
    STATE_TYPES,
    SUPPORTED_LAYER_TYPES,
    WINDOWED_TYPES,
    LayerSpec,
)
from ...cache.layers import LinearLayer, StateShape
from ...cache.policies import CrossPolicy, ItemsPolicy, RingPolicy
from ...common.compat.transformers import type_of_layer
from ...errors import InputError, UnsupportedModelError
from ..loading.support import (
    BIASED_BY_SLOT,
    COMPRESSED_TYPES,
    LONGEST,
    NEEDED_OPTIONS,
    REFUSED_OPTIONS,
    STATES_OF_LAYERS,
    WITHOUT_CACHE,
    check_sizes,
)
from ..loading.without_weights import ask_without_weights, model_without_weights
from ..weights import whole_shape
from .codebooks import codebooks_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...cache.cache import LayeredCache


# Where a config has one of these, head_dim and num_key_value_heads do not say what a layer keeps (latent attention;
# JetMoE; DBRX).
_UNLIKE_FIELDS = ("kv_lora_rank", "kv_channels", "attn_config")


def check_model_type(config: PreTrainedConfig) -> None:
    """Refuse the models of `support`, before anything of theirs runs.

    Raises:
        UnsupportedModelError: With what the model does that no cache here fits.
    """
    if config.model_type in WITHOUT_CACHE:
        raise UnsupportedModelError(
            f"{config.model_type!r} has no place for a static cache: {WITHOUT_CACHE[config.model_type]}"
        )
    for field, (types, reason) in REFUSED_OPTIONS.items():
        if config.model_type in types and getattr(config.get_text_config(decoder=True), field, False):
            raise UnsupportedModelError(f"{config.model_type!r} with {field}=True cannot have a static cache: {reason}")
    for field, (types, reason) in NEEDED_OPTIONS.items():
        if config.model_type in types and not getattr(config, field, False):
            raise UnsupportedModelError(
                f"{config.model_type!r} with {field}=False cannot have a static cache: {reason}"
            )


def layer_types_and_windows(config: PreTrainedConfig) -> list[tuple[str, int | None]]:
    """Type and sliding window of each layer of the text decoder.

    Raises:
        UnsupportedModelError: If a layer's type has no storage policy here.
    """
    check_model_type(config)
    if getattr(config, "is_encoder_decoder", False):
        return _decoder_layer_types(config)
    types, options = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    if config.model_type in STATES_OF_LAYERS:
        types = ["linear_attention"] * len(types)
    crosses = cross_layers_of(config)
    types = ["dummy" if index in crosses else one for index, one in enumerate(types)]
    is_compressed = [layer_type in COMPRESSED_TYPES for layer_type in types]
    types = ["indexed_attention" if of_entries else one for one, of_entries in zip(types, is_compressed, strict=True)]
    for index, layer_type in enumerate(types):
        if layer_type not in SUPPORTED_LAYER_TYPES:
            raise UnsupportedModelError(
                f"layer {index} of this {config.model_type!r} model is of type {layer_type!r}, which has no static "
                f"cache layer; supported types: {', '.join(SUPPORTED_LAYER_TYPES)}"
            )
    # The window of a compressed layer is the mask's, its tokens are all kept.
    windows = [
        None if of_entries else option.get("sliding_window") for of_entries, option in zip(is_compressed, options)
    ]
    kinds = list(zip(types, windows, strict=True))
    _check_windows(config, kinds)
    if item_slots_of(config):
        return [(CROSS_ATTENTION, None) if index in crosses else one for index, one in enumerate(kinds)]
    return kinds


def _check_windows(config: PreTrainedConfig, kinds: Sequence[tuple[str, int | None]]) -> None:
    """Refuse a layer that is to see a window of no length: transformers sizes no mask for it."""
    for index, (layer_type, window) in enumerate(kinds):
        if layer_type in WINDOWED_TYPES and (type(window) is not int or window < 1):
            raise UnsupportedModelError(
                f"layer {index} of this {config.model_type!r} model is of type {layer_type!r}, but its sliding_window "
                f"(or attention_chunk_size) is {window!r}; set that in the config, or make the layer full_attention"
            )


def check_longest(config: PreTrainedConfig, max_cache_len: int) -> None:
    """Refuse more slots than the model's own code serves alike, however many of them are filled.

    Raises:
        UnsupportedModelError: If there are more.
    """
    for field, (types, reason) in LONGEST.items():
        limit: Any = getattr(config, field, None)
        if config.model_type in types and isinstance(max_cache_len, int) and max_cache_len > limit:
            raise UnsupportedModelError(
                f"max_cache_len is {max_cache_len}, {field} of this {config.model_type!r} model is {limit}: {reason}; "
                "use at most that"
            )


def check_sinks(config: PreTrainedConfig, layer_specs: Sequence[LayerSpec]) -> None:
    """Refuse attention sinks where they would do nothing, or give other logits than the tokens kept.

    Raises:
        InputError: If no layer attends to all tokens.
        UnsupportedModelError: If the model computes with slots instead of positions.
    """
    full = [layer_spec for layer_spec in layer_specs if layer_spec.num_heads is not None and layer_spec.window is None]
    if not full:
        raise InputError(
            f"no layer of this {config.model_type!r} model attends to all tokens, so it runs without end as it is; "
            "leave out attention_sinks"
        )
    if any(layer_spec.index_head_dim or layer_spec.conv_states or layer_spec.recurrent_states for layer_spec in full):
        raise UnsupportedModelError(
            f"the full-attention layers of {config.model_type!r} keep more than keys and values, for which there is no "
            "layer with sinks; leave out attention_sinks"
        )
    if config.model_type in BIASED_BY_SLOT:
        raise UnsupportedModelError(
            f"{config.model_type!r} derives its position bias from the slots of the cache, which sinks move; leave "
            "out attention_sinks"
        )


def _decoder_layer_types(config: PreTrainedConfig) -> list[tuple[str, int | None]]:
    """The self-attention layers of an encoder-decoder, then its cross-attention layers."""
    text_config = config.get_text_config(decoder=True)
    types, options = get_layer_types_and_kwargs(text_config)
    kinds = [(layer_type, option.get("sliding_window")) for layer_type, option in zip(types, options, strict=True)]
    _check_windows(config, kinds)
    # T5's family counts the decoder's layers apart, and has no kinds of them.
    count = getattr(text_config, "num_decoder_layers", None)
    if count is not None and len(set(kinds)) == 1:
        kinds = kinds[:1] * count
    for index, (layer_type, _) in enumerate(kinds):
        if layer_type not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(
                f"decoder layer {index} of this {config.model_type!r} model is of type {layer_type!r}, "
                "which has no static cache layer in an encoder-decoder"
            )
    return [*kinds, *[(CROSS_ATTENTION, None)] * len(kinds)]


def check_layers(model: PreTrainedModel, cache: LayeredCache) -> None:
    """Refuse a cache whose layers are not those the model's need: another window would give other logits, silently.

    Raises:
        InputError: If the number of layers differs, a layer is of another kind, or a ring is not as long as the layer's
            window.
    """
    kinds = layer_types_and_windows(model.config)
    if len(cache.layers) != len(kinds):
        raise InputError(
            f"the cache has {len(cache.layers)} layers, the model {len(kinds)}; allocate it with "
            "ExportableCache.from_model"
        )
    for index, ((layer_type, window), layer) in enumerate(zip(kinds, cache.layers, strict=True)):
        if layer.is_dummy and getattr(cache, "stage", None) is not None:
            continue
        found = (layer.policy.keeps_keys, isinstance(layer, LinearLayer))
        expected = (
            layer_type in (*KEY_TYPES, *HYBRID_TYPES, CROSS_ATTENTION),
            layer_type in STATE_TYPES + HYBRID_TYPES,
        )
        if found != expected or isinstance(layer.policy, (CrossPolicy, ItemsPolicy)) is not (
            layer_type == CROSS_ATTENTION
        ):
            raise InputError(
                f"layer {index} of the cache is {layer!r}, but that layer of the model is of type {layer_type!r}; "
                "allocate the cache with ExportableCache.from_model"
            )
        if isinstance(layer.policy, RingPolicy) and layer.policy.window != window:
            needed = "attends to all tokens" if window is None else f"attends to {window} tokens"
            raise InputError(
                f"layer {index} of the cache is {layer!r}, but that layer of the model {needed}; "
                "allocate the cache with ExportableCache.from_model"
            )


class ProbeCache(DynamicCache):
    """What a model is given to see what it keeps. Patched layers that know no cache upstream write to it as well."""

    is_probe = True

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        states = STATES_OF_LAYERS.get(config.model_type)
        if states is not None:
            self.layers = [LinearAttentionLayer(number_of_states=states) for _ in self.layers]
        self.layers = [
            DynamicIndexedLayer() if type_of_layer(layer) in COMPRESSED_TYPES else layer for layer in self.layers
        ]


def probe_tokens(model: PreTrainedModel, length: int = 1) -> torch.Tensor:
    """Tokens as the model takes them: int64 [1, length], of several codebooks in its own order."""
    codebooks = codebooks_of(model.config)
    tokens = torch.zeros(1, length, dtype=torch.int64, device=model.device)
    return tokens if codebooks is None else codebooks.taken(tokens[..., None].expand(-1, -1, codebooks.count))


def layer_specs_from_model(
    model: PreTrainedModel, owned: range | None = None
) -> tuple[list[LayerSpec], torch.dtype, torch.device]:
    """Shapes, dtype and device of each layer's keys and values, from one token run through the model.

    The model is the only reliable source: configs state head counts and sizes in many ways, some of them per layer.

    Args:
        model: In any mode.
        owned: Layers that this process has, of a model that is split by layers; it keeps nothing of the others.

    Raises:
        UnsupportedModelError: If the model keeps no keys and values in a transformers cache.
    """
    kinds = layer_types_and_windows(model.config)
    cache = ProbeCache(config=model.config)
    token = probe_tokens(model)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            model(input_ids=token, use_cache=True, **{cache_argument(model): cache}, **probe_pictures(model))
    finally:
        model.train(was_training)
    if len(cache.layers) != len(kinds):
        raise UnsupportedModelError(
            f"{type(model).__name__} wrote {len(cache.layers)} layers to the cache, its config names {len(kinds)}; "
            "a cache of its own kind is not supported"
        )
    layer_specs = [
        _layer_spec_of(index, model, layer, *kind) if owned is None or index in owned else LayerSpec("dummy")
        for index, (kind, layer) in enumerate(zip(kinds, cache.layers, strict=True))
    ]
    found = (getattr(layer, "keys", None) for layer in cache.layers)
    keys = [one for one in found if isinstance(one, torch.Tensor)]
    return (layer_specs, keys[0].dtype, keys[0].device) if keys else (layer_specs, model.dtype, model.device)


def _layer_spec_of(index: int, model: PreTrainedModel, layer: Any, layer_type: str, window: int | None) -> LayerSpec:
    """What one layer of a `DynamicCache` holds after a token."""
    # Unlimited OCR keeps its prompt apart.
    keys, values = (getattr(layer, f"prefill_{name}", getattr(layer, name, None)) for name in ("keys", "values"))
    conv, recurrent = _state_shapes(layer, "conv_states", model.dtype), _state_shapes(layer, "recurrent_states", None)
    if layer_type in (*KEY_TYPES, *HYBRID_TYPES, CROSS_ATTENTION) and not isinstance(keys, torch.Tensor):
        raise UnsupportedModelError(
            f"{type(model).__name__} wrote no keys and values to layer {index} of the cache, which is of type "
            f"{layer_type!r}; layers that keep them elsewhere are not supported"
        )
    if layer_type in STATE_TYPES + HYBRID_TYPES and not any((*conv, *recurrent)):
        raise UnsupportedModelError(
            f"{type(model).__name__} wrote no state to layer {index} of the cache, which is of type {layer_type!r}; "
            "layers that keep it elsewhere are not supported"
        )
    indexer_keys = getattr(layer, "indexer_keys", None)
    sizes: dict[str, Any] = {}
    if isinstance(keys, torch.Tensor):
        assert isinstance(values, torch.Tensor)
        sizes = {
            "num_heads": keys.shape[1],
            "head_dim": keys.shape[3],
            "value_head_dim": values.shape[3],
            "window": window,
        }
    return LayerSpec(
        layer_type,
        **sizes,
        item_slots=item_slots_of(model.config) if layer_type == CROSS_ATTENTION else None,
        index_head_dim=None if indexer_keys is None else indexer_keys.shape[-1],
        conv_states=conv,
        recurrent_states=recurrent,
    )


def _state_shapes(layer: Any, name: str, model_dtype: torch.dtype | None) -> tuple[StateShape | None, ...]:
    states = getattr(layer, name, None) or {}
    shapes = [states[index] for index in sorted(states)]
    # Convolutions take their inputs in the model's dtype; recurrences often keep a wider one, whatever the model's.
    return tuple(
        None
        if state is None
        else StateShape(tuple(state.shape[1:]), None if state.dtype == model_dtype else state.dtype)
        for state in shapes
    )


def vocab_size_of(model: PreTrainedModel) -> int:
    """Rows of the token embeddings that the text decoder looks ids up in."""
    codebooks = codebooks_of(model.config)
    if codebooks is not None:
        return codebooks.vocab_size
    try:
        weight = getattr(model.get_input_embeddings(), "weight", None)
        # A stage behind the first has none.
        if isinstance(weight, torch.Tensor):
            return whole_shape(weight)[0]
    except NotImplementedError:  # a model in which transformers does not find them (PP-FormulaNet)
        pass
    return model.config.get_text_config(decoder=True).vocab_size


def logits_size_of(model: PreTrainedModel) -> int:
    """Tokens that have a logit: fewer than are looked up where images have ids of their own (Llama 3.2 Vision)."""
    try:
        head = model.get_output_embeddings()
    except NotImplementedError:
        head = None
    return getattr(head, "out_features", vocab_size_of(model))


def cache_argument(model: PreTrainedModel) -> str:
    """Name of the argument of `model.forward` that takes the cache: Mamba's family calls it `cache_params`."""
    parameters = inspect.signature(model.forward).parameters
    return "cache_params" if "cache_params" in parameters and "past_key_values" not in parameters else "past_key_values"


def layer_specs_from_config(config: PreTrainedConfig, model: PreTrainedModel | None = None) -> list[LayerSpec]:
    """Like `layer_specs_from_model`, without weights: the model is built and run where tensors have no values.

    Where its code cannot run there (it looks at values), sizes are read off the config.

    Args:
        model: See `model_without_weights`, where the caller has it.

    Raises:
        InputError: If `config` is not a transformers config, or its sizes are those of no model.
        UnsupportedModelError: See `layer_types_and_windows`.
    """
    if not isinstance(config, PreTrainedConfig):
        raise InputError(f"expected a transformers config, got {type(config).__name__}; pass model.config")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{config.model_type!r} is an encoder-decoder, whose encoder has to be looked at; use "
            "ExportableCache.from_model"
        )
    check_sizes(config, config.model_type)
    kinds = layer_types_and_windows(config)
    model = model_without_weights(config) if model is None else model
    found = ask_without_weights(config, lambda one: layer_specs_from_model(one)[0], model)
    if found is not None:
        return found
    for layer_type, _ in kinds:
        if layer_type in (*STATE_TYPES, *HYBRID_TYPES, CROSS_ATTENTION):
            raise UnsupportedModelError(
                f"the sizes of a {layer_type!r} layer of {config.model_type!r} are known from the model only; use "
                "ExportableCache.from_model"
            )
    layers = config.get_text_config(decoder=True).per_layer_config
    return [_layer_spec_from_fields(layer, *kind) for layer, kind in zip(layers, kinds, strict=True)]


def _layer_spec_from_fields(config: PreTrainedConfig, layer_type: str, window: int | None) -> LayerSpec:
    heads = getattr(config, "num_attention_heads", None)
    hidden = getattr(config, "hidden_size", None)
    if not heads or not hidden:
        raise UnsupportedModelError(
            f"config of {config.model_type!r} states no num_attention_heads and hidden_size; "
            "use ExportableCache.from_model, which reads the sizes from the model"
        )
    if layer_type == "dummy":
        return LayerSpec(layer_type)
    unlike = next((name for name in _UNLIKE_FIELDS if getattr(config, name, None) is not None), None)
    if unlike is not None:
        raise UnsupportedModelError(
            f"{config.model_type!r} states the sizes of its keys in a way of its own ({unlike}) and cannot run without "
            "weights; use ExportableCache.from_model, which reads the sizes from the model"
        )
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return LayerSpec(layer_type, kv_heads, head_dim, head_dim, window)


def cross_layers_of(config: PreTrainedConfig) -> tuple[int, ...]:
    """Which layers of a text decoder attend to pictures; they keep nothing of a token of text."""
    return tuple(getattr(config.get_text_config(decoder=True), "cross_attention_layers", None) or ())


def tiles_of(config: PreTrainedConfig) -> int:
    """Parts of one picture that tokens see or do not, of a model that has `cross_layers_of`; 0 without pictures."""
    return getattr(getattr(config, "vision_config", None), "max_num_tiles", 0) if cross_layers_of(config) else 0


def item_slots_of(config: PreTrainedConfig) -> int:
    """Positions of one picture in the layers of `cross_layers_of`: of each tile its patches and one more, as
    `MllamaForConditionalGeneration._prepare_static_cache` counts them. 0 without pictures.
    """
    tiles = tiles_of(config)
    if not tiles:
        return 0
    vision = config.vision_config
    return int(tiles * ((vision.image_size // vision.patch_size) ** 2 + 1))


def check_in_one_place(config: PreTrainedConfig, *elsewhere: Any) -> None:
    """Refuse a model with `cross_layers_of` whose layers live in several processes, or not on the device.

    Args:
        elsewhere: What says so, None or False each where it does not.

    Raises:
        UnsupportedModelError: If one does.
    """
    if cross_layers_of(config) and any(elsewhere):
        raise UnsupportedModelError(
            f"{config.model_type!r} reads the keys of its layers of cross-attention as they are, so they live in one "
            "process and on its device; leave out offload, split_context and the split of the model"
        )


def probe_pictures(model: PreTrainedModel) -> dict[str, Any]:
    """What a model is given beside a token of text, so that layers of cross-attention write keys and values."""
    if not item_slots_of(model.config) or "cross_attention_states" not in inspect.signature(model.forward).parameters:
        return {}
    size = model.config.get_text_config(decoder=True).hidden_size
    return {"cross_attention_states": torch.zeros(1, 1, size, dtype=model.dtype, device=model.device)}
