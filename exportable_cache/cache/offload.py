"""Layers whose state lives in host memory or in a file, and comes to the device two at a time."""

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
#: Where layers live that are not on the device, instead of a folder.
HOST = "host"
#: Tensors begin at multiples of so many bytes.
_ALIGNMENT = 64


class Residence:
    """Brings each layer to the device before its turn and the next one behind it, and takes it back afterwards.

    There are two places on the device, each as large as the largest layer, which layers take in turn: so every layer is
    at one address in every step, and nothing depends on what the tensors hold. A layer's own tensors (`keys`, `values`)
    are those at home: they are what is saved, reset and copied. While a layer has its turn it is a twin of itself,
    around tensors of one of the places, that is read and written.

    Transformers' offloaded caches allocate a layer anew at each turn, and keep sliding and linear layers on the device.

    Args:
        layers: Those that keep something, on the meta device; their tensors are allocated here, zeroed.
        home: `host`, or a folder for files that are mapped, and have no names from then on.
        device: Where steps are computed.

    Attributes:
        device: See above.
        places: The two buffers, uint8.

    Raises:
        InputError: If there is no room.
    """

    def __init__(self, layers: Sequence[CacheLayer], home: str | Path, device: torch.device | str) -> None:
        self.device = torch.device(device)
        sizes = [_aligned_bytes(layer) for layer in layers]
        try:
            with ordinary_tensors():
                # Each by itself: compiled graphs take no tensors that share memory.
                homes = [
                    {name: _at_home(tensor, home, self.device) for name, tensor in _stored(layer).items()}
                    for layer in layers
                ]
                self.places = [torch.zeros(max(sizes), dtype=torch.uint8, device=self.device) for _ in range(2)]
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
        #: Whose turn it is, and which twin has come ahead of its turn.
        self._current: CacheLayer | None = None
        self._ahead: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        self.finish()
        other = memo[id(self)] = type(self).__new__(type(self))
        other.device, other._current, other._ahead = self.device, None, None
        other.places = [place.clone() for place in self.places]
        other._copies = torch.cuda.Stream(self.device) if self._copies is not None else None
        other._layers = [copy.deepcopy(layer, memo) for layer in self._layers]
        return other

    @property
    def nbytes(self) -> int:
        """Bytes on the device, but for lengths."""
        return sum(place.nbytes for place in self.places)

    def turn(self, layer: Layer) -> Layer:
        """A layer around tensors on the device, as its home has them: it is this one's turn until another one's.

        Args:
            layer: As a step sees it.
        """
        if layer.twin is None:
            here = _cut(layer, self.places[layer.place % 2])
            layer.twin = layer.with_state({**here, **_counters(layer)}, layer.context)
            layer.twin.residence = None
        if self._current is not layer:
            self.end()
            if self._ahead != layer.place:
                self._fetch(layer.place, layer.context.kv_read_len)
            self._wait()
            self._current, self._ahead = layer, None
            # Not beyond the last: what comes next is a step that may find another state.
            if layer.place + 1 < len(self._layers):
                self._ahead = layer.place + 1
                self._fetch(layer.place + 1, layer.context.kv_read_len)
        return layer.twin

    def end(self) -> None:
        """Take back the layer whose turn it was; to be called at the end of a step."""
        layer, self._current = self._current, None
        if layer is None:
            return
        place, read = layer.place, layer.context.kv_read_len
        for at_home, here in self._pairs(place, read).values():
            at_home.copy_(here, non_blocking=self._copies is not None)

    def finish(self) -> None:
        """`end`, and wait for it: what is at home can be read."""
        self.end()
        self._ahead = None
        if self._copies is not None and not torch.compiler.is_compiling():
            torch.cuda.current_stream(self.device).synchronize()

    def forget(self) -> None:
        """At the start of a step: leave what one that was cut off has left on the device."""
        self._current = self._ahead = None

    def _fetch(self, place: int, read: int | None) -> None:
        stream = None if torch.compiler.is_compiling() else self._copies
        if stream is None:
            for at_home, here in self._pairs(place, read).values():
                here.copy_(at_home)
            return
        # Behind the layer that was at this place before, and what it has written at home.
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for at_home, here in self._pairs(place, read).values():
                here.copy_(at_home, non_blocking=True)

    def _wait(self) -> None:
        if self._copies is not None and not torch.compiler.is_compiling():
            torch.cuda.current_stream(self.device).wait_stream(self._copies)

    def _pairs(self, place: int, read: int | None) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Of each tensor of a layer the part that a step may touch, at home and on the device.

        Args:
            read: See `StepContext.kv_read_len`.
        """
        layer, found = self._layers[place], {}
        policy = layer.policy
        slots = None
        if policy.keeps_keys and not policy.wraps(read):
            slots = policy.slots_read(read)
        # Cut here, in a trace: of graphs the places are inputs, and not what shares their memory.
        for name, here in _cut(layer, self.places[place % 2]).items():
            at_home, dims = getattr(layer, name), layer.state[name].dims
            if slots is not None and "capacity" in dims:
                dim = dims.index("capacity")
                at_home, here = at_home.narrow(dim, 0, slots), here.narrow(dim, 0, slots)
            found[name] = (at_home, here)
        return found


def _stored(layer: CacheLayer) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in layer.named_state() if tensor.dim() > 1}


def _counters(layer: CacheLayer) -> dict[str, torch.Tensor]:
    """Lengths [batch_size], which masks are computed from before any layer has its turn: they stay on the device."""
    return {name: tensor for name, tensor in layer.named_state() if tensor.dim() == 1}


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _aligned_bytes(layer: CacheLayer) -> int:
    return sum(_aligned(tensor.nbytes) for tensor in _stored(layer).values())


def _cut(layer: CacheLayer, memory: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors of a layer's shapes, one behind the other in `memory` uint8 [bytes]."""
    found, start = {}, 0
    for name, like in _stored(layer).items():
        found[name] = memory[start : start + like.nbytes].view(like.dtype).view(like.shape)
        start += _aligned(like.nbytes)
    return found


def _at_home(like: torch.Tensor, home: str | Path, device: torch.device) -> torch.Tensor:
    """Zeros in host memory or in a mapped file.

    Args:
        like: Of the shape and dtype wanted.
        home: See `Residence`.
        device: What they are copied to.

    Raises:
        OSError: If the folder is none, or has no room.
    """
    if home == HOST:
        return torch.zeros(like.shape, dtype=like.dtype, pin_memory=device.type == "cuda")
    handle, path = tempfile.mkstemp(prefix="exportable-cache-", dir=home)
    try:
        # All of it now: a disk that is full later would end the process.
        os.posix_fallocate(handle, 0, like.nbytes)
        return torch.from_file(path, shared=True, size=like.numel(), dtype=like.dtype).view(like.shape)
    finally:
        os.close(handle)
        os.unlink(path)
