"""Specs of what each layer of a model keeps, read from the model by running one token through it, and of its ids."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
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
from ...common.compat.transformers import cache_argument, type_of_layer
from ...errors import InputError, UnsupportedModelError
from ...parallel.ranks import whole_shape
from ..loading.support import (
    BIASED_BY_SLOT,
    COMPRESSED_TYPES,
    NEEDED_OPTIONS,
    REFUSED_OPTIONS,
    STATES_OF_LAYERS,
    WITHOUT_CACHE,
    check_sizes,
)
from ..loading.without_weights import ask_without_weights, model_without_weights
from ..positions import text_model_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...cache.cache import LayeredCache


@dataclass(frozen=True)
class Codebooks:
    """A description of a model's codebooks. Sessions and programs use ids of shape [batch, length, count].

    Attributes:
        count: Number of ids per token.
        vocab_size: Ids are less than this; some codebooks may have fewer.
        folds_ids: True if the model takes ids as [batch * count, length].
        folds_logits: True if the model returns logits of every codebook, [batch * count, length, vocab]. Others predict
            one id, [batch, length, vocab].
    """

    count: int
    vocab_size: int
    folds_ids: bool = False
    folds_logits: bool = False

    def taken(self, ids: torch.Tensor) -> torch.Tensor:
        """Convert ids, int64 [batch, length, count], to the model's layout."""
        return ids.transpose(1, 2).reshape(-1, ids.shape[1]) if self.folds_ids else ids

    def given(self, logits: torch.Tensor) -> torch.Tensor:
        """Convert the model's logits to [batch, length, count, vocab] if it predicts every codebook."""
        return logits.unflatten(0, (-1, self.count)).transpose(1, 2) if self.folds_logits else logits


def codebooks_of(config: PreTrainedConfig) -> Codebooks | None:
    """Return the codebooks of a model that takes several ids per token, or None."""
    if config.model_type in ("musicgen_decoder", "musicgen_melody_decoder"):
        # One more id than codes, which begins and pads a sequence.
        return Codebooks(config.num_codebooks, config.vocab_size + 1, folds_ids=True, folds_logits=True)
    if config.model_type == "dia":
        decoder = config.decoder_config
        return Codebooks(decoder.num_channels, decoder.vocab_size, folds_logits=True)
    if config.model_type == "kyutai_speech_to_text":
        # All codebooks share a table after that of the text; its last row pads.
        rows = config.vocab_size + config.num_codebooks * config.codebook_vocab_size + 1
        return Codebooks(config.num_codebooks + 1, rows)
    return None


#: Name of a draft head among the modules of a model, see `models.draft_heads`.
DRAFT_HEAD = "draft_head"
# Config fields of models whose key sizes are not head_dim and num_key_value_heads: latent attention, JetMoE, DBRX.
_UNLIKE_FIELDS = ("kv_lora_rank", "kv_channels", "attn_config")


def check_model_type(config: PreTrainedConfig) -> None:
    """Check that a model type and its options can use a static cache, before the model runs.

    Raises:
        UnsupportedModelError: If they cannot.
    """
    if config.model_type in WITHOUT_CACHE:
        raise UnsupportedModelError(
            f"{config.model_type!r} cannot use a static cache: {WITHOUT_CACHE[config.model_type]}"
        )
    for field, (types, reason) in REFUSED_OPTIONS.items():
        if config.model_type in types and getattr(config.get_text_config(decoder=True), field, False):
            raise UnsupportedModelError(f"{config.model_type!r} with {field}=True cannot use a static cache: {reason}")
    for field, (types, reason) in NEEDED_OPTIONS.items():
        if config.model_type in types and not getattr(config, field, False):
            raise UnsupportedModelError(f"{config.model_type!r} with {field}=False cannot use a static cache: {reason}")


def layer_types_and_windows(config: PreTrainedConfig) -> list[tuple[str, int | None]]:
    """Return type and sliding window of each layer of the text decoder.

    Raises:
        UnsupportedModelError: If a layer's type is not supported.
    """
    check_model_type(config)
    if getattr(config, "is_encoder_decoder", False):
        return _decoder_layer_types(config)
    types, options = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    if config.model_type in STATES_OF_LAYERS:
        types = ["linear_attention"] * len(types)
    crosses = cross_layers_of(config)
    # Transformers 5.20 keeps the types of layers without attention.
    types = ["dummy" if index in crosses or one in ("mlp", "moe") else one for index, one in enumerate(types)]
    is_compressed = [layer_type in COMPRESSED_TYPES for layer_type in types]
    types = ["indexed_attention" if of_entries else one for one, of_entries in zip(types, is_compressed, strict=True)]
    for index, layer_type in enumerate(types):
        if layer_type not in SUPPORTED_LAYER_TYPES:
            raise UnsupportedModelError(
                f"layer {index} of this {config.model_type!r} model is of type {layer_type!r}, which has no static "
                f"cache layer; supported types: {', '.join(SUPPORTED_LAYER_TYPES)}"
            )
    # A compressed layer keeps all tokens, and its window applies to the mask only.
    windows = [
        None if of_entries else option.get("sliding_window") for of_entries, option in zip(is_compressed, options)
    ]
    kinds = list(zip(types, windows, strict=True))
    _check_windows(config, kinds)
    if item_slots_of(config):
        return [(CROSS_ATTENTION, None) if index in crosses else one for index, one in enumerate(kinds)]
    return kinds + _layers_of_loops(config, kinds)


def _layers_of_loops(config: PreTrainedConfig, kinds: Sequence[tuple[str, int | None]]) -> list[tuple[str, int | None]]:
    """Return the cache layers that a model appends, because each further loop over its layers keeps its own keys.

    Raises:
        UnsupportedModelError: If loops read the keys of the last loop.
    """
    text = config.get_text_config(decoder=True)
    if text.model_type == "inkling2_loop_text":
        return list(kinds[text.loop_layer_index_start : text.loop_layer_index_end]) * (text.loop_num_passes - 1)
    loops = getattr(config, "n_recurrent_loops", 1) if config.model_type == "dory" else 1
    if loops == 1:
        return []
    if config.recurrent_kv_cache_mode != "per_loop":
        raise UnsupportedModelError(
            f"recurrent_kv_cache_mode of a {config.model_type!r} model must be 'per_loop' for a static cache, got "
            f"{config.recurrent_kv_cache_mode!r}: its earlier loops append tokens to the keys of the last one without "
            "writing them; use DynamicCache"
        )
    return list(kinds[config.n_input_layers :][: config.n_recurrent_layers]) * (loops - 1)


def _check_windows(config: PreTrainedConfig, kinds: Sequence[tuple[str, int | None]]) -> None:
    """Check that windowed layers have a window, because transformers cannot make a mask without its length."""
    for index, (layer_type, window) in enumerate(kinds):
        if layer_type in WINDOWED_TYPES and (type(window) is not int or window < 1):
            raise UnsupportedModelError(
                f"layer {index} of this {config.model_type!r} model is of type {layer_type!r}, whose sliding_window "
                f"(or attention_chunk_size) must be a positive int, got {window!r}; set it in the config, or make the "
                "layer full_attention"
            )


def check_sinks(config: PreTrainedConfig, layer_specs: Sequence[LayerSpec]) -> None:
    """Check that a model can have attention sinks.

    Raises:
        InputError: If no layer attends to all tokens.
        UnsupportedModelError: If full-attention layers keep states, or positions are derived from slots.
    """
    full = [layer_spec for layer_spec in layer_specs if layer_spec.num_heads is not None and layer_spec.window is None]
    if not full:
        raise InputError(
            f"no layer of this {config.model_type!r} model attends to all tokens, so it has no length limit; leave out "
            "attention_sinks"
        )
    if any(layer_spec.index_head_dim or layer_spec.conv_states or layer_spec.recurrent_states for layer_spec in full):
        raise UnsupportedModelError(
            f"the full-attention layers of {config.model_type!r} keep more than keys and values, which layers with "
            "sinks do not support; leave out attention_sinks"
        )
    if config.model_type in BIASED_BY_SLOT:
        raise UnsupportedModelError(
            f"{config.model_type!r} derives its position bias from the slots of the cache, which sinks move; leave "
            "out attention_sinks"
        )


def _decoder_layer_types(config: PreTrainedConfig) -> list[tuple[str, int | None]]:
    """Return the self-attention layers of an encoder-decoder, then its cross-attention layers."""
    text_config = config.get_text_config(decoder=True)
    types, options = get_layer_types_and_kwargs(text_config)
    kinds = [(layer_type, option.get("sliding_window")) for layer_type, option in zip(types, options, strict=True)]
    _check_windows(config, kinds)
    # The T5 family has a separate number of decoder layers, which are all of one type.
    count = getattr(text_config, "num_decoder_layers", None)
    if count is not None and len(set(kinds)) == 1:
        kinds = kinds[:1] * count
    for index, (layer_type, _) in enumerate(kinds):
        if layer_type not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(
                f"decoder layer {index} of this {config.model_type!r} model is of type {layer_type!r}, "
                "which has no static cache layer in an encoder-decoder; use DynamicCache"
            )
    return [*kinds, *[(CROSS_ATTENTION, None)] * len(kinds)]


def cached_layers(model: PreTrainedModel) -> list[tuple[str, int | None]]:
    """Return type and sliding window of each layer of a cache for a model: its own, and those of its draft head."""
    head = getattr(model, DRAFT_HEAD, None)
    return layer_types_and_windows(model.config) + ([] if head is None else layer_types_and_windows(head.config))


def check_layers(model: PreTrainedModel, cache: LayeredCache) -> None:
    """Check that a cache has the layers that a model needs, because a wrong window would silently change logits.

    Raises:
        InputError: If the number of layers, the kind of a layer, or the length of a ring is wrong.
    """
    kinds = cached_layers(model)
    if len(cache.layers) != len(kinds):
        raise InputError(
            f"the cache must have {len(kinds)} layers like the model, got {len(cache.layers)}; allocate it with "
            "ExportableCache.from_model"
        )
    for index, ((layer_type, window), layer) in enumerate(zip(kinds, cache.layers, strict=True)):
        found = (layer.policy.keeps_keys, isinstance(layer, LinearLayer))
        expected = (
            layer_type in (*KEY_TYPES, *HYBRID_TYPES, CROSS_ATTENTION),
            layer_type in STATE_TYPES + HYBRID_TYPES,
        )
        if found != expected or isinstance(layer.policy, (CrossPolicy, ItemsPolicy)) is not (
            layer_type == CROSS_ATTENTION
        ):
            raise InputError(
                f"layer {index} of the cache must fit the model's layer of type {layer_type!r}, got {layer!r}; "
                "allocate the cache with ExportableCache.from_model"
            )
        if isinstance(layer.policy, RingPolicy) and layer.policy.window != window:
            needed = "attends to all tokens" if window is None else f"attends to {window} tokens"
            raise InputError(
                f"layer {index} of the cache must fit the model's layer, which {needed}, got {layer!r}; "
                "allocate the cache with ExportableCache.from_model"
            )


class ProbeCache(DynamicCache):
    """A dynamic cache that shows what a model keeps. Patched layers write to it too."""

    is_probe = True

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        states = STATES_OF_LAYERS.get(config.model_type)
        if states is not None:
            self.layers = [LinearAttentionLayer(number_of_states=states) for _ in self.layers]
        self.layers = [
            DynamicIndexedLayer() if type_of_layer(layer) in COMPRESSED_TYPES else layer for layer in self.layers
        ]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return a state, or None if there is none. Caches of transformers 5.20 do not have this method."""
        layer: Any = self.layers[layer_idx]
        return layer.recurrent_states[state_idx]


def probe_tokens(model: PreTrainedModel, length: int = 1) -> torch.Tensor:
    """Return input ids in the model's layout, int64 [1, length], or with a dimension of codebooks."""
    codebooks = codebooks_of(model.config)
    tokens = torch.zeros(1, length, dtype=torch.int64, device=model.device)
    return tokens if codebooks is None else codebooks.taken(tokens[..., None].expand(-1, -1, codebooks.count))


def layer_specs_from_model(model: PreTrainedModel) -> tuple[list[LayerSpec], torch.dtype, torch.device]:
    """Run one token through a model and return the spec of each layer, and the dtype and device of keys and values.

    The model is the only reliable source, because configs state heads and sizes in many ways, some of them per layer.

    Args:
        model: A model in training or eval mode.

    Raises:
        UnsupportedModelError: If the model does not keep its keys, values and states in a transformers cache.
    """
    kinds = layer_types_and_windows(model.config)
    cache = ProbeCache(config=model.config)
    token = probe_tokens(model)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            text_model = text_model_of(model)
            options = {cache_argument(text_model): cache, **probe_image_inputs(model)}
            text_model(input_ids=token, use_cache=True, **options)
    finally:
        model.train(was_training)
    if len(cache.layers) != len(kinds):
        raise UnsupportedModelError(
            f"{type(model).__name__} wrote {len(cache.layers)} layers to the cache, but its config has "
            f"{len(kinds)}; models with a cache class of another kind are not supported"
        )
    layer_specs = [
        layer_spec_of(index, model, layer, *kind)
        for index, (kind, layer) in enumerate(zip(kinds, cache.layers, strict=True))
    ]
    found = (getattr(layer, "keys", None) for layer in cache.layers)
    keys = [one for one in found if isinstance(one, torch.Tensor)]
    return (layer_specs, keys[0].dtype, keys[0].device) if keys else (layer_specs, model.dtype, model.device)


def layer_spec_of(index: int, model: PreTrainedModel, layer: Any, layer_type: str, window: int | None) -> LayerSpec:
    """Return the spec of one layer of a `DynamicCache` after a token."""
    # Unlimited OCR keeps its prompt in separate attributes.
    keys, values = (getattr(layer, f"prefill_{name}", getattr(layer, name, None)) for name in ("keys", "values"))
    conv, recurrent = _state_shapes(layer, "conv_states", model.dtype), _state_shapes(layer, "recurrent_states", None)
    # MiniMax M3 names them otherwise, with a dimension of heads; only the last dimension counts.
    indexer_keys = getattr(layer, "indexer_keys", getattr(layer, "idx_keys", None))
    if indexer_keys is not None and keys is None:
        # The layer reads another layer's keys (Mistral Large 4).
        return LayerSpec(layer_type, num_heads=1, head_dim=indexer_keys.shape[-1], value_head_dim=0)
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
    # Convolution states have the model's dtype; recurrent states often have a wider one, independent of the model's.
    return tuple(
        None
        if state is None
        else StateShape(tuple(state.shape[1:]), None if state.dtype == model_dtype else state.dtype)
        for state in shapes
    )


def vocab_size_of(model: PreTrainedModel) -> int:
    """Return the number of rows of the text decoder's token embeddings."""
    codebooks = codebooks_of(model.config)
    if codebooks is not None:
        return codebooks.vocab_size
    try:
        weight = getattr(model.get_input_embeddings(), "weight", None)
        if isinstance(weight, torch.Tensor):
            return whole_shape(weight)[0]
    except NotImplementedError:  # transformers does not find the embeddings of PP-FormulaNet
        pass
    return model.config.get_text_config(decoder=True).vocab_size


def logits_size_of(model: PreTrainedModel) -> int:
    """Return the number of logits: fewer than embeddings if images have separate ids (Llama 3.2 Vision)."""
    if isinstance(spread := getattr(model, "row_of_token", None), torch.Tensor):
        # A reduced vocabulary, see `keep_tokens`.
        return len(spread)
    try:
        head = model.get_output_embeddings()
    except NotImplementedError:
        head = None
    return getattr(head, "out_features", vocab_size_of(model))


def layer_specs_from_config(config: PreTrainedConfig, model: PreTrainedModel | None = None) -> list[LayerSpec]:
    """Return the specs of `layer_specs_from_model` without weights, by running the model on the meta device.

    If its code reads values, and so cannot run there, sizes are taken from the config.

    Args:
        config: The model's config.
        model: The model of `model_without_weights`, if the caller has it.

    Raises:
        InputError: If `config` is not a transformers config, or has impossible sizes.
        UnsupportedModelError: See `layer_types_and_windows`.
    """
    if not isinstance(config, PreTrainedConfig):
        raise InputError(f"config must be a transformers config, got {type(config).__name__}; pass model.config")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"config must not be an encoder-decoder's, because its encoder has to run, got {config.model_type!r}; use "
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
            f"config of {config.model_type!r} must have num_attention_heads and hidden_size; "
            "use ExportableCache.from_model, which reads the sizes from the model"
        )
    if layer_type == "dummy":
        return LayerSpec(layer_type)
    unlike = next((name for name in _UNLIKE_FIELDS if getattr(config, name, None) is not None), None)
    if unlike is not None:
        raise UnsupportedModelError(
            f"config of {config.model_type!r} states the sizes of keys by {unlike}, and the model cannot run without "
            "weights; use ExportableCache.from_model, which reads the sizes from the model"
        )
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return LayerSpec(layer_type, kv_heads, head_dim, head_dim, window)


def cross_layers_of(config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the indices of layers that attend to images (Llama 3.2 Vision); they keep nothing of text tokens."""
    return tuple(getattr(config.get_text_config(decoder=True), "cross_attention_layers", None) or ())


def tiles_of(config: PreTrainedConfig) -> int:
    """Return the tiles of one image in a model with `cross_layers_of`; 0 without images."""
    return getattr(getattr(config, "vision_config", None), "max_num_tiles", 0) if cross_layers_of(config) else 0


def item_slots_of(config: PreTrainedConfig) -> int:
    """Return the slots of one image in the layers of `cross_layers_of`: the patches of each tile plus one.

    They are counted as in `MllamaForConditionalGeneration._prepare_static_cache`; 0 without images.
    """
    tiles = tiles_of(config)
    if not tiles:
        return 0
    vision = config.vision_config
    return int(tiles * ((vision.image_size // vision.patch_size) ** 2 + 1))


def check_cross_layers(config: PreTrainedConfig, *elsewhere: Any) -> None:
    """Check that a model with `cross_layers_of` is in one process and not offloaded.

    Args:
        config: Config of the model.
        elsewhere: Options that split or offload its layers; each is None or False if it does not.

    Raises:
        UnsupportedModelError: If an option splits or offloads them.
    """
    if cross_layers_of(config) and any(elsewhere):
        raise UnsupportedModelError(
            f"{config.model_type!r} reads the keys of its cross-attention layers directly, so they must be in one "
            "process and on its device; leave out offload and the split of the model"
        )


def probe_image_inputs(model: PreTrainedModel) -> dict[str, Any]:
    """Return model inputs that make cross-attention layers write keys and values, for a token of text."""
    if not item_slots_of(model.config) or "cross_attention_states" not in inspect.signature(model.forward).parameters:
        return {}
    size = model.config.get_text_config(decoder=True).hidden_size
    return {"cross_attention_states": torch.zeros(1, 1, size, dtype=model.dtype, device=model.device)}
