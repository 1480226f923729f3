"""Offloaded layers, whose state is in host memory or in a file, and two of which are on the device."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..common.tensors import ordinary_tensors
from ..errors import InputError

if TYPE_CHECKING:
    from typing_extensions import Self

    from .layers import CacheLayer

Layer = TypeVar("Layer", bound="CacheLayer")
#: Value of `offload` for host memory instead of a folder.
HOST = "host"
#: Alignment of tensors in bytes.
_ALIGNMENT = 64


class Residence:
    """Offloading of layers: copies each layer and the next one to the device before it is used, and back afterwards.

    The device has two buffers, each as large as the largest layer, and layers alternate between them. So every layer
    has one address in every step, and no graph depends on tensor contents. A layer's own tensors (`keys`, `values`)
    are the offloaded ones, which are saved, reset and copied. While a layer is used, a copy of it around the tensors of
    a buffer is read and written.

    Transformers' offloaded caches allocate a layer in each step, and keep sliding and linear layers on the device.

    Args:
        layers: Layers that keep state, on the meta device; their tensors are allocated here, zeroed.
        home: `host`, or a folder for mapped files, which are unlinked at once.
        device: Device of the steps.

    Attributes:
        device: Device of the steps.
        buffers: The two buffers, uint8.

    Raises:
        InputError: If there is not enough memory.
    """

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
                self.buffers = [torch.zeros(max(sizes), dtype=torch.uint8, device=self.device) for _ in range(2)]
        except (OSError, RuntimeError) as error:
            raise InputError(
                f"cannot keep {sum(sizes):,} bytes of layers in {str(home)!r} and two times {max(sizes):,} on "
                f"{self.device} ({error}); pass a smaller max_cache_len or batch_size, or a folder with more room"
            ) from error
        for index, (layer, at_home) in enumerate(zip(layers, homes, strict=True)):
            for name, tensor in at_home.items():
                setattr(layer, name, tensor)
            with ordinary_tensors():
                for name, tensor in _counters(layer).items():
                    setattr(layer, name, torch.zeros(tensor.shape, dtype=tensor.dtype, device=self.device))
            layer.residence, layer.place = self, index
        self._layers = list(layers)
        self._copies = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        #: Current layer, and index of the layer that was copied ahead.
        self._current: CacheLayer | None = None
        self._ahead: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        self.finish()
        other = memo[id(self)] = type(self).__new__(type(self))
        other.device, other._current, other._ahead = self.device, None, None
        other.buffers = [buffer.clone() for buffer in self.buffers]
        other._copies = torch.cuda.Stream(self.device) if self._copies is not None else None
        other._layers = [copy.deepcopy(layer, memo) for layer in self._layers]
        return other

    @property
    def nbytes(self) -> int:
        """Bytes on the device, except lengths."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def turn(self, layer: Layer) -> Layer:
        """Return the layer around tensors on the device, and copy the previous one back.

        Args:
            layer: Layer of a step.
        """
        if layer.twin is None:
            here = _cut(layer, self.buffers[layer.place % 2])
            layer.twin = layer.with_state({**here, **_counters(layer)}, layer.context)
            layer.twin.residence = None
        if self._current is not layer:
            self.end()
            if self._ahead != layer.place:
                self._fetch(layer.place, layer.context.kv_read_len)
            self._wait()
            self._current, self._ahead = layer, None
            # Not after the last layer, because the next step may have another state.
            if layer.place + 1 < len(self._layers):
                self._ahead = layer.place + 1
                self._fetch(layer.place + 1, layer.context.kv_read_len)
        return layer.twin

    def end(self) -> None:
        """Copy the current layer back; call it at the end of a step."""
        layer, self._current = self._current, None
        if layer is None:
            return
        index, read = layer.place, layer.context.kv_read_len
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
        layer, found = self._layers[index], {}
        policy = layer.policy
        slots = None
        if policy.keeps_keys and not policy.wraps(read):
            slots = policy.slots_read(read)
        # Sliced here, in a trace, because the buffers are inputs of graphs, and their slices share memory.
        for name, here in _cut(layer, self.buffers[index % 2]).items():
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
        home: See `Residence`.
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
