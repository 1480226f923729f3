"""The cache: the ordered layers of a model, as one `past_key_values`; also in the protocol of `EncoderDecoderCache`."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers import Cache, EncoderDecoderCache

from ..common.compat.transformers import attention_implementation
from ..common.fs.tensor_files import damaged_if_malformed, read_tensors, write_tensors
from ..common.tensors import dtype_name
from ..errors import BundleError, InputError
from .attention import ATTENTION_NAMES
from .checks import check_room, check_rows_agree, check_some, is_traced
from .layers import CacheLayer, CrossLayer, LinearLayer, layer_from
from .layout import PORTABLE
from .offload import OffloadedLayer
from .step import PLAIN

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from typing_extensions import Self

    from .step import StepContext

# File format version. v2 describes layers by their parts instead of a class, v3 adds a checksum.
_FORMAT = "exportable_cache.cache.v3"


class LayeredCache(Cache):
    """A cache of the ordered layers of a model, passed as one `past_key_values`.

    `models.cache_factory.ExportableCache` is made from a model or its config.

    No step depends on how many tokens were seen, so a compiled or exported step serves every position.

    Args:
        layers: One layer per decoder layer, all of one batch size.

    Raises:
        InputError: If there are no layers, one is not a `CacheLayer`, or batch sizes differ.
    """

    #: Layers of this package, instead of transformers' own.
    layers: list[CacheLayer]  # type: ignore[assignment]
    #: Every cache class by name, for rebuilding from a file.
    classes: ClassVar[dict[str, type[LayeredCache]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        LayeredCache.classes[cls.__name__] = cls

    def __init__(self, layers: Sequence[CacheLayer]) -> None:
        layers = list(layers)
        if not layers:
            raise InputError("a cache needs at least one layer, got none")
        for index, layer in enumerate(layers):
            if not isinstance(layer, CacheLayer):
                raise InputError(f"layers must be CacheLayers, got a {type(layer).__name__} at index {index}")
        if all(layer.is_dummy for layer in layers):
            raise InputError("layers must keep some state, got layers that keep nothing; add one that does")
        sizes = [layer.cumulative_length.shape[0] for layer in layers if not layer.is_dummy]
        if len(set(sizes)) > 1:
            raise InputError(f"layers must have one batch size, got {sizes}")
        Cache.__init__(self, layers=[*layers])
        #: Types of its model's configs, or None if the model is unknown.
        self.model_types: tuple[str, ...] | None = None
        self._config: PreTrainedConfig | None = None
        #: Copies offloaded layers to the device; None if all layers are on it.
        self.offloader = next((layer.offloader for layer in layers if isinstance(layer, OffloadedLayer)), None)

    @classmethod
    def from_layers(cls, layers: Any) -> Self:
        """Rebuild a cache around existing layers without checks, because they may be any pytree leaves."""
        cache = cls.__new__(cls)
        cache.layers = layers
        cache.layer_class_to_replicate = None
        cache.offloading = False
        cache.model_types = None
        cache._config = None
        cache.offloader = None
        return cache

    @property
    def is_initialized(self) -> bool:
        """True, because the tensors exist from construction."""
        return True

    # -- lengths and limits -----------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """Batch size."""
        return self.cumulative_length.shape[0]

    @property
    def device(self) -> torch.device:
        """Device of the state."""
        return self.cumulative_length.device

    @property
    def cumulative_length(self) -> torch.Tensor:
        """Tokens seen per row, int64 [batch_size], by the first layer that attends, or the first that keeps a state."""
        return self.layers[self._counting_layer(0)].cumulative_length

    def _counting_layer(self, layer_idx: int) -> int:
        """Return `layer_idx`, or the first layer with keys, because models ask for masks at index 0 by default."""
        if not (self.layers[layer_idx].is_linear or self.layers[layer_idx].is_dummy):
            # Image cross-attention layers do not track the text length; skip them.
            while layer_idx < len(self.layers) - 1 and not self.layers[layer_idx].follows_decoder:
                layer_idx += 1
            return layer_idx
        if self.layers[layer_idx].is_dummy:
            # A full layer if there is one, because a process with some of a model's layers keeps no others.
            for index, layer in enumerate(self.layers):
                if not (layer.is_linear or layer.is_dummy or layer.is_sliding):
                    return index
        for kinds in ((False, False), (True, False)):
            for index, layer in enumerate(self.layers):
                if (layer.is_linear, layer.is_dummy) == kinds:
                    return index
        return layer_idx

    @property
    def is_linear(self) -> list[bool]:
        """True for each layer that keeps states and no keys; transformers' own also counts hybrid layers."""
        return [layer.is_linear for layer in self.layers]

    @property
    def is_dummy(self) -> list[bool]:
        """True for each layer that keeps nothing."""
        return [layer.is_dummy for layer in self.layers]

    @property
    def max_length(self) -> int | None:
        """Maximum number of tokens in a row, or None if only rings keep state."""
        limits = [layer.max_length for layer in self.layers if layer.max_length is not None]
        # Without `default=`, because TorchDynamo cannot trace it for an empty sequence.
        return min(limits) if limits else None

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return `max_length`, or -1 if there is no limit, as transformers does."""
        limit = self.max_length if layer_idx is None else self.layers[layer_idx].max_length
        return -1 if limit is None else limit

    # The types differ because transformers annotates lengths as int, although its static layers keep a tensor.
    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor | int:  # type: ignore[override]
        """Return the length of all rows: int64 0-D, or an int if the host knows it, see `starting_at`.

        Raises:
            InputError: In eager mode, if rows differ.
        """
        if layer_idx >= len(self.layers):
            return 0
        layer = self.layers[self._counting_layer(layer_idx)]
        if layer.context.length is not None and layer.follows_decoder:
            return layer.context.length
        lengths = layer.cumulative_length
        if not is_traced(lengths):
            check_rows_agree(lengths)
        return lengths[0]

    def get_query_offset(self, layer_idx: int = 0) -> torch.Tensor | int:  # type: ignore[override]
        """Return the position of the first new token: int64 0-D, or [batch_size, 1] if rows may differ, or an int."""
        layer = self.layers[self._counting_layer(layer_idx)]
        if layer.context.length is None and self._rows_may_differ:
            return layer.cumulative_length[:, None]
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(  # type: ignore[override]
        self, query_length: int, layer_idx: int
    ) -> tuple[int, int | torch.Tensor]:
        """Return the number of keys that `update` will return, and their offset from `arange`.

        Returns:
            `(kv_length, 0)` or `(kv_length, offset)`, offset int64 [kv_length], or [batch_size, kv_length] if rows may
            differ, or [batch_size, query_length, kv_length] if queries see different keys.

        Raises:
            CacheFullError: In eager mode, if the new tokens do not fit a layer; no layer has written yet.
            InputError: If there are no new tokens.
        """
        layer = self.layers[self._counting_layer(layer_idx)]
        # Programs are not checked, because their callers do it, without reading lengths from a device.
        if layer.context.start is None:
            check_some(layer.cumulative_length, query_length)
            check_room(layer.cumulative_length, query_length, self.max_length)
        kv_length, offset = layer.get_mask_sizes(query_length)
        if isinstance(offset, torch.Tensor) and offset.dim() == 2 and not self._rows_may_differ:
            offset = offset[0]
        return kv_length, offset

    @property
    def _rows_may_differ(self) -> bool:
        # False for transformers' own mask functions, because they take one offset for all rows.
        if self.batch_size == 1:
            return False
        if self._config is not None:
            return attention_implementation(self._config) in ATTENTION_NAMES
        # A rebuilt cache has no model, so one offset must serve both kinds of mask functions, unless rows may differ.
        lengths = self.cumulative_length
        return is_traced(lengths) or bool((lengths != lengths[0]).any())

    # -- linear layers ----------------------------------------------------------------------------------------------

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return True, because a state of zeros is equal to no state.

        Models of transformers 5.20 call it first in a step of a layer. Some read the state only in steps of one token.
        """
        if layer_idx is not None and not state_idx:
            self._linear_layer(layer_idx).begin_reads()
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """See `LinearLayer.get_conv_state`."""
        return self._linear_layer(layer_idx).get_conv_state(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """See `LinearLayer.get_recurrent_state`."""
        return self._linear_layer(layer_idx).get_recurrent_state(state_idx)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """See `LinearLayer.update_conv_state`."""
        return self._linear_layer(layer_idx).update_conv_state(conv_states, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """See `LinearLayer.update_recurrent_state`."""
        return self._linear_layer(layer_idx).update_recurrent_state(recurrent_states, state_idx, **kwargs)

    def _linear_layer(self, layer_idx: int) -> LinearLayer:
        layer = self.layers[layer_idx]
        if not isinstance(layer, LinearLayer):
            raise InputError(
                f"layer {layer_idx} of the cache is {layer!r}, but that layer of the model keeps a linear state; "
                "allocate the cache with ExportableCache.from_model"
            )
        return layer

    # -- state ------------------------------------------------------------------------------------------------------

    def named_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every state tensor with its name, such as `layers.0.keys`."""
        self._copy_back()
        for index, layer in enumerate(self.layers):
            for name, tensor in layer.named_state():
                yield f"layers.{index}.{name}", tensor

    def _copy_back(self) -> None:
        """Copy back the last offloaded layer of a step, which in plain use is still on the device."""
        if self.offloader is not None:
            self.offloader.finish()

    def reset(self) -> None:
        """Empty every layer, in place."""
        self._copy_back()
        super().reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """See `CacheLayer.reorder_cache`."""
        self._copy_back()
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]  # no tensor is an instance of LongTensor

    def stored_state(self) -> dict[str, torch.Tensor]:
        """Return the state without lengths, which a program keeps if its positions are inputs."""
        return {name: tensor for name, tensor in self.named_state() if not name.endswith(".cumulative_length")}

    @property
    def nbytes(self) -> int:
        """Bytes of all state tensors."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def resident_nbytes(self) -> int:
        """Bytes of state on the device; with offloaded layers, two buffers and the lengths."""
        if self.offloader is None:
            return self.nbytes
        lengths = (tensor for layer in self.layers for _, tensor in layer.named_state() if tensor.dim() == 1)
        return self.offloader.nbytes + sum(length.nbytes for length in lengths)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens of every row, in every layer or in none.

        Args:
            tokens_to_remove: Zero, or minus the number of tokens (transformers' convention).

        Raises:
            InputError: If a layer cannot, or the number is invalid; nothing has changed then.
        """
        try:
            tokens_to_remove = operator.index(tokens_to_remove)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"crop takes minus the number of tokens to remove, got {tokens_to_remove!r}") from error
        if tokens_to_remove < 0:
            for layer in self.layers:
                if not layer.is_dummy and layer.follows_decoder:
                    layer.check_rollback(-tokens_to_remove)
        super().crop(tokens_to_remove)

    def with_state(self, tensors: Mapping[str, Any], context: StepContext = PLAIN) -> Self:
        """Return a cache of the layers with other tensors, for one step; this cache is unchanged.

        Args:
            tensors: State by name, see `named_state`; without lengths if the context has a start.
            context: Context of the step.
        """
        layers = []
        for index, layer in enumerate(self.layers):
            state = {name: tensors.get(f"layers.{index}.{name}") for name in layer.state}
            layers.append(layer.with_state(state, context))
        cache = type(self).from_layers(layers)
        cache.model_types = self.model_types
        return cache

    def save(self, path: str | Path) -> None:
        """Write all state to a safetensors file, atomically, with a checksum.

        Raises:
            InputError: If `path` exists and is not a file.
        """
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in self.named_state()}
        layers = [{"config": layer.config(), "high_water": layer._max_len_ever} for layer in self.layers]
        metadata = {
            "format": _FORMAT,
            "cache": type(self).__name__,
            "layers": json.dumps(layers),
            "model_types": json.dumps(self.model_types),
        }
        write_tensors(Path(path), tensors, metadata)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> LayeredCache:
        """Load a cache that `save` wrote; the next step continues where it stopped.

        Every tensor is compared with the config of its layer, even if the checksum is right.

        Raises:
            BundleError: If the file is missing, damaged, of another format, or of unknown parts.
            InputError: If there is no such device.
        """
        tensors, metadata = read_tensors(path, "a saved cache", _FORMAT, "save()", device)
        with damaged_if_malformed(path, "a saved cache"):
            layers = [
                _saved_layer(path, index, described, tensors)
                for index, described in enumerate(json.loads(metadata["layers"]))
            ]
            if tensors:
                raise ValueError(f"tensors {', '.join(sorted(tensors))}, which no layer has")
            cache = LayeredCache.classes[metadata["cache"]](layers)
            types = json.loads(metadata["model_types"])
            if types is not None and not (isinstance(types, list) and all(isinstance(one, str) for one in types)):
                raise ValueError(f"model_types {types!r}, which must be a list of names")
            cache.model_types = None if types is None else tuple(types)
            return cache


def _saved_layer(
    path: str | Path, index: int, described: Mapping[str, Any], tensors: dict[str, torch.Tensor]
) -> CacheLayer:
    """Return a layer of a file, and remove its tensors from `tensors`.

    Raises:
        BundleError: If its parts are unknown, or a tensor does not fit its config.
    """
    try:
        layer = layer_from(described["config"], {})
    except InputError as error:
        raise BundleError(
            f"{path}: layer {index} is of parts that this release does not have: {error}; save the cache again"
        ) from error
    if layer.layout != PORTABLE:
        raise BundleError(
            f"{path}: layer {index} must have the layout {PORTABLE.kind!r}, got {layer.layout.kind!r}, which layers of "
            "a program or of a rank have; save a whole cache"
        )
    prefix = f"layers.{index}."
    state = {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
    misfit = layer.misfit({name: (tensor.shape, dtype_name(tensor.dtype)) for name, tensor in state.items()})
    if misfit is not None:
        raise BundleError(f"{path} is damaged: layers.{index}: {misfit}; save the cache again")
    layer = layer_from(described["config"], state)
    layer._max_len_ever = described["high_water"]
    _check_lengths(layer, index)
    return layer


def _check_lengths(layer: CacheLayer, index: int) -> None:
    """Check the lengths of a loaded layer.

    Raises:
        ValueError: If a length or the most tokens ever held is out of range.
    """
    ever = layer._max_len_ever
    if ever is not None and (type(ever) is not int or not 0 <= ever < 2**62):
        raise ValueError(f"layer {index} held {ever!r} tokens at most")
    for name, most in layer.length_limits().items():
        lengths = getattr(layer, name)
        if bool((lengths < 0).any()) or (most is not None and bool((lengths > most).any())):
            raise ValueError(f"layer {index} holds {lengths.tolist()} tokens, of 0 to {most or 'any number'}")


# The types differ because transformers annotates lengths as int and both halves as `DynamicCache`, although it takes
# any cache.
class EncoderDecoderLayeredCache(LayeredCache, EncoderDecoderCache):  # type: ignore[misc]
    """A `LayeredCache` that is a transformers `EncoderDecoderCache` too (cache_utils.py, 5.23).

    Its layers are those of the self-attention, followed by as many of the cross-attention. `is_updated` says per
    decoder layer whether the cross-attention's keys and values are there: a model computes them where it is false, and
    reads them where it is true.

    Args:
        layers: Self-attention layers, then one `CrossLayer` for each.

    Raises:
        InputError: If the second half are not the `CrossLayer`s of the first.
    """

    def __init__(self, layers: Sequence[CacheLayer]) -> None:
        LayeredCache.__init__(self, layers)
        half = len(self.layers) // 2
        crosses = [isinstance(layer, CrossLayer) for layer in self.layers]
        if crosses != [False] * half + [True] * half:
            raise InputError(
                f"layers are {', '.join(layer.label for layer in self.layers)}; "
                "an encoder-decoder has its self-attention layers first, then as many cross-attention layers"
            )
        self.is_updated = dict.fromkeys(range(half), False)

    @classmethod
    def from_layers(cls, layers: Any) -> Self:
        """See `LayeredCache.from_layers`."""
        cache = super().from_layers(layers)
        cache.is_updated = {}
        return cache

    def __len__(self) -> int:
        """Decoder layers."""
        return len(self.layers) // 2

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.layers})"

    @property
    def self_attention_cache(self) -> LayeredCache:  # type: ignore[override]
        """The self-attention layers, shared, as a cache of their own."""
        cache = LayeredCache.from_layers(self.layers[: len(self)])
        cache._config = self._config
        return cache

    @property
    def cross_attention_cache(self) -> LayeredCache:  # type: ignore[override]
        """The cross-attention layers, shared, as a cache of their own."""
        return LayeredCache.from_layers([_Written(layer) for layer in self.cross_layers])

    @property
    def cross_layers(self) -> list[CrossLayer]:
        """The cross-attention layers."""
        # Not filtered by class, because the layers of a rebuilt cache may be any objects.
        layers: Any = self.layers[len(self) :]
        return layers

    @property
    def is_sliding(self) -> list[bool]:
        """See `LayeredCache.is_sliding`."""
        return [layer.is_sliding for layer in self.layers[: len(self)]]

    @property
    def is_linear(self) -> list[bool]:
        """See `LayeredCache.is_linear`."""
        return [False] * len(self)

    @property
    def is_dummy(self) -> list[bool]:
        """See `LayeredCache.is_dummy`."""
        return [False] * len(self)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """See `LayeredCache.get_max_length`."""
        return LayeredCache.get_max_length(self, layer_idx)

    def reset(self) -> None:
        """Empty all layers; the next step computes the cross-attention's keys and values again."""
        for layer in self.layers:
            layer.reset()
        self.is_updated = dict.fromkeys(range(len(self)), False)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens of the decoder, see `LayeredCache.crop`; the encoder's output stays."""
        self.self_attention_cache.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Give row `i` the state of row `beam_idx[i]`, in all layers."""
        for layer in self.layers:
            layer.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Like `reorder_cache`, for as many rows as there are; refused otherwise."""
        for layer in self.layers:
            layer.batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused: the batch size of a static cache is fixed."""
        for layer in self.layers:
            layer.batch_repeat_interleave(repeats)

    def with_state(self, tensors: Mapping[str, Any], context: StepContext = PLAIN) -> Self:
        """See `LayeredCache.with_state`."""
        cache = super().with_state(tensors, context)
        cache.is_updated = dict(self.is_updated)
        return cache


class _Written:
    """A cross layer as models read it in eager use: without the slots after the newest encoder output.

    Models size the mask of their cross-attention by the encoder output at hand. A program gives them one of all slots,
    with a mask, and so reads them all.
    """

    def __init__(self, layer: CrossLayer) -> None:
        self._layer = layer

    @property
    def keys(self) -> torch.Tensor:
        """See `LayeredCache.keys`."""
        return self._layer.keys[:, :, : self._layer.written]

    @property
    def values(self) -> torch.Tensor:
        """See `LayeredCache.values`."""
        return self._layer.values[:, :, : self._layer.written]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)
