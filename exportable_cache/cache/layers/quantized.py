"""Keys and values in 8 bits: one scale per token and head, kept as tensors beside them.

A quarter of float32's bytes, plus 4 bytes per token and head for each of the two. The storage policies are those of the layers
they derive from: where a token goes, what may be seen and what can be taken back do not depend on how it is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .full import FullLayer
from .key_value import KeyValueLayer, read_slots, write_slots, write_slots_
from .layer import CacheLayer, StateTensor
from .ring import RingLayer
from .sink import SinkLayer

_LARGEST = 127
_PARTS = ("keys", "key_scales", "values", "value_scales")


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric rounding to 8 bits, one scale per last dimension.

    Args:
        rows: [..., dim], floating.

    Returns:
        int8 [..., dim] in -127 to 127, and float32 scales [..., 1].
    """
    wide = rows.to(torch.float32)
    # A row of zeros gets a scale as well: nothing is divided by zero.
    scales = wide.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / _LARGEST
    return torch.round(wide / scales).clamp(-_LARGEST, _LARGEST).to(torch.int8), scales


def dequantize_rows(stored: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `quantize_rows` has kept, in `dtype`."""
    return (stored.to(torch.float32) * scales).to(dtype)


class QuantizedKeyValueLayer(KeyValueLayer):
    """Storage of the layers below: keys and values int8, scales float32 [batch_size, num_heads, capacity, 1].

    Attention is over what is stored, for new tokens too, so that logits do not depend on how a prompt is cut into chunks.
    """

    state = {
        "keys": StateTensor("batch_size", "num_heads", "capacity", "head_dim", dtype=torch.int8),
        "key_scales": StateTensor("batch_size", "num_heads", "capacity", "scale", dtype=torch.float32),
        "values": StateTensor("batch_size", "num_heads", "capacity", "value_head_dim", dtype=torch.int8),
        "value_scales": StateTensor("batch_size", "num_heads", "capacity", "scale", dtype=torch.float32),
        "cumulative_length": StateTensor("batch_size", dtype=torch.int64),
    }

    #: Name of the dtype that keys and values come in and go out in.
    dtype: str

    def allocate(self, sizes: dict[str, int], dtype: torch.dtype, device: torch.device | str) -> None:
        self.dtype = str(dtype).removeprefix("torch.")
        super().allocate({**sizes, "scale": 1}, dtype, device)

    @property
    def states_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def _given_out(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention gets, of what the layer derived from has returned: the stored buffers, or rows given out already."""
        return self._read(self.capacity) if keys is self.keys else (keys, values)

    def _read(self, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [getattr(self, name) for name in _PARTS]
        if slots < self.capacity:  # ExecuTorch copies even a slice of everything.
            parts = [part[:, :, :slots] for part in parts]
        keys, key_scales, values, value_scales = parts
        return dequantize_rows(keys, key_scales, self.states_dtype), dequantize_rows(
            values, value_scales, self.states_dtype
        )

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        super()._append(key_states, value_states)
        return self._read(self.slots_read)

    def _write(self, slots: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        for name, rows in zip(_PARTS, (*quantize_rows(key_states), *quantize_rows(value_states)), strict=True):
            if self.in_place:
                write_slots_(getattr(self, name), slots, rows)
            else:
                setattr(self, name, write_slots(getattr(self, name), slots, rows))

    def _turn(
        self, key_states: torch.Tensor, value_states: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        length = self.cumulative_length[:, None]
        slot = torch.arange(self.capacity, device=self.device)
        source = torch.where(positions >= length, self.capacity + positions - length, slot)
        seen = []
        for name, rows in zip(_PARTS, (*quantize_rows(key_states), *quantize_rows(value_states)), strict=True):
            joined = torch.cat([getattr(self, name), rows], dim=2)
            seen.append(joined)
            if self.in_place:
                getattr(self, name).copy_(read_slots(joined, source))
            else:
                setattr(self, name, read_slots(joined, source))
        self.advance(key_states.shape[2])
        return dequantize_rows(*seen[:2], self.states_dtype), dequantize_rows(*seen[2:], self.states_dtype)


class QuantizedFullLayer(QuantizedKeyValueLayer, FullLayer):
    """A `FullLayer` in 8 bits."""

    config_names = (*FullLayer.config_names, "dtype")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `FullLayer.update`; what is stored is given out in the dtype of the new keys and values."""
        return self._given_out(*super().update(key_states, value_states))


class QuantizedRingLayer(QuantizedKeyValueLayer, RingLayer):
    """A `RingLayer` in 8 bits."""

    config_names = (*RingLayer.config_names, "dtype")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RingLayer.update`; what is stored is given out in the dtype of the new keys and values."""
        return self._given_out(*super().update(key_states, value_states))


class QuantizedSinkLayer(QuantizedKeyValueLayer, SinkLayer):
    """A `SinkLayer` in 8 bits."""

    config_names = (*SinkLayer.config_names, "dtype")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `SinkLayer.update`; what is stored is given out in the dtype of the new keys and values."""
        return self._given_out(*super().update(key_states, value_states))


#: The layers above by the class they keep in 8 bits.
QUANTIZED: dict[type[KeyValueLayer], type[QuantizedKeyValueLayer]] = {
    FullLayer: QuantizedFullLayer,
    RingLayer: QuantizedRingLayer,
    SinkLayer: QuantizedSinkLayer,
}


def is_rounding(layers: Sequence[CacheLayer]) -> bool:
    """Whether these layers keep keys and values in 8 bits."""
    return any(isinstance(layer, QuantizedKeyValueLayer) for layer in layers)
