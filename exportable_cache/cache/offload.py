"""Offloaded layers, whose state is in host memory or in a file, and two of which are on the device."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..common.tensors import ordinary_tensors
from ..errors import InputError
from .layers import CacheLayer, IndexedLayer, LinearLayer, PromptLayer, register_layer
from .step import PLAIN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

    from .step import StepContext

#: Value of `offload` for host memory instead of a folder.
HOST = "host"
#: Alignment of tensors in bytes.
_ALIGNMENT = 64


class OffloadedLayer(CacheLayer):
    """A layer whose tensors are offloaded: each call goes to a copy of the layer on the device.

    Attributes:
        resident_class: Class of the copy, which is the class of the layer if it were not offloaded.
        offloader: Copies the tensors to the device and back.
        offload_index: Index among the layers of the offloader.
    """

    resident_class: type[CacheLayer] = CacheLayer

    offloader: Offloader
    offload_index: int
    _on_device: Any

    def with_state(self, tensors: Mapping[str, Any], context: StepContext = PLAIN) -> Self:
        """See `CacheLayer.with_state`."""
        layer = super().with_state(tensors, context)
        layer.offloader, layer.offload_index = self.offloader, self.offload_index
        return layer

    def begin(self, context: StepContext, max_len_ever: int | None) -> None:
        """See `CacheLayer.begin`."""
        super().begin(context, max_len_ever)
        self._on_device = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `CacheLayer.update`."""
        return self._resident().update(key_states, value_states, *args, **kwargs)

    def _resident(self) -> Any:
        """Return the copy of this layer on the device, after the offloader has copied its tensors there."""
        if self._on_device is None:
            tensors = {**self.offloader.buffers_of(self.offload_index), **_counters(self)}
            self._on_device = self._as(self.resident_class, tensors, self.context)
        self.offloader.fetch(self)
        return self._on_device

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        layer = super().__deepcopy__(memo)
        # Made again, because the copied offloader has other buffers.
        layer._on_device = None
        return layer

    def __reduce__(self) -> tuple[Any, ...]:
        # A resident layer, because an offloader is not pickled.
        rebuilt, (_, *parts) = super().__reduce__()
        return rebuilt, (self.resident_class, *parts)


class OffloadedPromptLayer(OffloadedLayer, PromptLayer):
    """An offloaded `PromptLayer`."""

    resident_class = PromptLayer


# `IndexedLayer` comes first, because it counts the tokens of a step around `update`.
class OffloadedIndexedLayer(IndexedLayer, OffloadedLayer):
    """An offloaded `IndexedLayer`."""

    resident_class = IndexedLayer

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """See `IndexedLayer.update_indexer`."""
        return self._resident().update_indexer(indexer_key_states)


class OffloadedLinearLayer(OffloadedLayer, LinearLayer):
    """An offloaded `LinearLayer`."""

    resident_class = LinearLayer

    def begin_reads(self) -> None:
        """See `LinearLayer.begin_reads`."""
        self._resident().begin_reads()

    def get_conv_state(self, state_idx: int = 0) -> torch.Tensor | None:
        """See `LinearLayer.get_conv_state`."""
        return self._resident().get_conv_state(state_idx)

    def get_recurrent_state(self, state_idx: int = 0) -> torch.Tensor | None:
        """See `LinearLayer.get_recurrent_state`."""
        return self._resident().get_recurrent_state(state_idx)

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """See `LinearLayer.update_conv_state`."""
        return self._resident().update_conv_state(conv_states, state_idx, **kwargs)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """See `LinearLayer.update_recurrent_state`."""
        return self._resident().update_recurrent_state(recurrent_states, state_idx, **kwargs)


_CLASSES = {
    cls.resident_class: cls
    for cls in (OffloadedLayer, OffloadedPromptLayer, OffloadedIndexedLayer, OffloadedLinearLayer)
}
for _resident_class, _class in _CLASSES.items():
    register_layer(_class, _resident_class)


def offloaded(layers: Sequence[CacheLayer], home: str | Path, device: torch.device | str) -> list[CacheLayer]:
    """Return layers with those that keep state offloaded.

    Args:
        layers: Empty layers on the meta device.
        home: `host`, or a folder for mapped files, which are unlinked at once.
        device: Device of the steps.

    Raises:
        InputError: If there is not enough memory.
    """
    kept = [layer for layer in layers if not layer.is_dummy]
    offloaded_layers = iter(Offloader(kept, home, device).layers if kept else ())
    return [layer if layer.is_dummy else next(offloaded_layers) for layer in layers]


class Offloader:
    """Copies each layer and the next one to the device before it is used, and back afterwards.

    The device has two buffers, each as large as the largest layer, and layers alternate between them. So every layer
    has one address in every step, and no graph depends on tensor contents. A layer's own tensors (`keys`, `values`)
    are the offloaded ones, which are saved, reset and copied. While a layer is used, a copy of it around the tensors of
    a buffer is read and written.

    Transformers' offloaded caches allocate a layer in each step, and keep sliding and linear layers on the device.

    Args:
        layers: Layers that keep state, on the meta device.
        home: `host`, or a folder for mapped files, which are unlinked at once.
        device: Device of the steps.

    Attributes:
        layers: The offloaded layers, around tensors of zeros.
        device: Device of the steps.
        buffers: The two buffers, uint8.

    Raises:
        InputError: If there is not enough memory.
    """

    layers: list[OffloadedLayer]

    def __init__(self, layers: Sequence[CacheLayer], home: str | Path, device: torch.device | str) -> None:
        self.device = torch.device(device)
        sizes = [_aligned_bytes(layer) for layer in layers]
        try:
            with ordinary_tensors():
                # Separate tensors, because compiled graphs take none that share memory.
                homes = [
                    {name: _at_home(tensor, home, self.device) for name, tensor in _stored(layer).items()}
                    for layer in layers
                ]
                counters = [
                    {name: torch.zeros_like(tensor, device=self.device) for name, tensor in _counters(layer).items()}
                    for layer in layers
                ]
                self.buffers = [torch.zeros(max(sizes), dtype=torch.uint8, device=self.device) for _ in range(2)]
        except (OSError, RuntimeError) as error:
            raise InputError(
                f"cannot keep {sum(sizes):,} bytes of layers in {str(home)!r} and two times {max(sizes):,} on "
                f"{self.device} ({error}); pass a smaller max_cache_len or batch_size, or a folder with more room"
            ) from error
        self.layers = []
        for index, (like, at_home, lengths) in enumerate(zip(layers, homes, counters, strict=True)):
            layer = like._as(_CLASSES[type(like)], {**at_home, **lengths}, PLAIN)
            layer.offloader, layer.offload_index = self, index
            layer.begin(PLAIN, max_len_ever=0)
            self.layers.append(layer)
        self._copies = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        #: Current layer, and index of the layer that was copied ahead.
        self._current: OffloadedLayer | None = None
        self._ahead: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        self.finish()
        other = memo[id(self)] = type(self).__new__(type(self))
        other.device, other._current, other._ahead = self.device, None, None
        other.buffers = [buffer.clone() for buffer in self.buffers]
        other._copies = torch.cuda.Stream(self.device) if self._copies is not None else None
        other.layers = [copy.deepcopy(layer, memo) for layer in self.layers]
        return other

    @property
    def nbytes(self) -> int:
        """Bytes on the device, except lengths."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def buffers_of(self, index: int) -> dict[str, torch.Tensor]:
        """Return the tensors of a layer that lie in its buffer, by name.

        Args:
            index: Index of the layer.
        """
        return _cut(self.layers[index], self.buffers[index % 2])

    def fetch(self, layer: OffloadedLayer) -> None:
        """Copy a layer and the next one to their buffers, and the previous one back.

        Args:
            layer: Layer of a step.
        """
        if self._current is layer:
            return
        index, read = layer.offload_index, layer.context.kv_read_len
        self.end()
        if self._ahead != index:
            self._fetch(index, read)
        self._wait()
        self._current, self._ahead = layer, None
        # Not after the last layer, because the next step may have another state.
        if index + 1 < len(self.layers):
            self._ahead = index + 1
            self._fetch(index + 1, read)

    def end(self) -> None:
        """Copy the current layer back; call it at the end of a step."""
        layer, self._current = self._current, None
        if layer is None:
            return
        index, read = layer.offload_index, layer.context.kv_read_len
        for at_home, here in self._pairs(index, read).values():
            at_home.copy_(here, non_blocking=self._copies is not None)

    def finish(self) -> None:
        """Copy the current layer back and wait, so that the offloaded tensors can be read."""
        self.end()
        self._ahead = None
        if self._copies is not None and not torch.compiler.is_compiling():
            torch.cuda.current_stream(self.device).synchronize()

    def forget(self) -> None:
        """Drop the current layer at the start of a step, because an earlier step may have been interrupted."""
        self._current = self._ahead = None

    def _fetch(self, index: int, read: int | None) -> None:
        stream = None if torch.compiler.is_compiling() else self._copies
        if stream is None:
            for at_home, here in self._pairs(index, read).values():
                here.copy_(at_home)
            return
        # Wait for the layer that used this buffer before, and for its copy back.
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for at_home, here in self._pairs(index, read).values():
                here.copy_(at_home, non_blocking=True)

    def _wait(self) -> None:
        if self._copies is not None and not torch.compiler.is_compiling():
            torch.cuda.current_stream(self.device).wait_stream(self._copies)

    def _pairs(self, index: int, read: int | None) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return the part of each tensor that a step may use, offloaded and on the device.

        Args:
            index: Index of the layer.
            read: See `StepContext.kv_read_len`.
        """
        layer, found = self.layers[index], {}
        policy = layer.policy
        slots = None
        if policy.keeps_keys and not policy.wraps(read):
            slots = policy.slots_read(read)
        # Sliced here, in a trace, because the buffers are inputs of graphs, and their slices share memory.
        for name, here in self.buffers_of(index).items():
            at_home, dims = getattr(layer, name), layer.state[name].dims
            if slots is not None and "capacity" in dims:
                dim = dims.index("capacity")
                at_home, here = at_home.narrow(dim, 0, slots), here.narrow(dim, 0, slots)
            found[name] = (at_home, here)
        return found


def _stored(layer: CacheLayer) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in layer.named_state() if tensor.dim() > 1}


def _counters(layer: CacheLayer) -> dict[str, torch.Tensor]:
    """Return the lengths [batch_size], which stay on the device, because masks need them before any layer."""
    return {name: tensor for name, tensor in layer.named_state() if tensor.dim() == 1}


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _aligned_bytes(layer: CacheLayer) -> int:
    return sum(_aligned(tensor.nbytes) for tensor in _stored(layer).values())


def _cut(layer: CacheLayer, memory: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return tensors of a layer's shapes, consecutive in `memory` uint8 [bytes]."""
    found, start = {}, 0
    for name, like in _stored(layer).items():
        found[name] = memory[start : start + like.nbytes].view(like.dtype).view(like.shape)
        start += _aligned(like.nbytes)
    return found


def _at_home(like: torch.Tensor, home: str | Path, device: torch.device) -> torch.Tensor:
    """Return zeros in host memory or in a mapped file.

    Args:
        like: Tensor of the shape and dtype.
        home: See `offloaded`.
        device: Device that they are copied to.

    Raises:
        OSError: If the folder does not exist, or is full.
    """
    if home == HOST:
        return torch.zeros(like.shape, dtype=like.dtype, pin_memory=device.type == "cuda")
    handle, path = tempfile.mkstemp(prefix="exportable-cache-", dir=home)
    try:
        # Allocated at once, because a disk that is full later would end the process.
        os.posix_fallocate(handle, 0, like.nbytes)
        return torch.from_file(path, shared=True, size=like.numel(), dtype=like.dtype).view(like.shape)
    finally:
        os.close(handle)
        os.unlink(path)
