"""Quantized storages: keys and values in 8 or 4 bits, with one scale per token and head."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ...errors import InputError
from .storage import Part, Storage


class RoundedStorage(Storage):
    """Keys and values in few bits, scales float32 [..., 1].

    Attention is over what is stored, for new tokens too, so that logits do not depend on how a prompt is cut into
    chunks.
    """

    rounds = True
    known_sizes = {"scale": 1}
    #: Of a number that is kept.
    bits: ClassVar[int]
    #: Element type of `keys` and `values`.
    stored_dtype: ClassVar[torch.dtype]
    #: Names of the last dimensions of `keys` and of `values`.
    stored_dims: ClassVar[tuple[str, str]] = ("head_dim", "value_head_dim")

    @property
    def largest(self) -> int:
        """Largest number that is kept: a row's largest element, by its scale."""
        return 2 ** (self.bits - 1) - 1

    @property
    def parts(self) -> dict[str, Part]:
        return {
            "keys": Part(self.stored_dims[0], self.stored_dtype),
            "values": Part(self.stored_dims[1], self.stored_dtype),
            "key_scales": Part("scale", torch.float32),
            "value_scales": Part("scale", torch.float32),
        }

    def sizes(self, head_dim: int, value_head_dim: int) -> dict[str, int]:
        if value_head_dim == 0:
            raise InputError(
                "the layer's values have size 0 (its keys are all there is of a token), which has no scale; keep it "
                f"in {self.dtype}: leave kv_dtype out"
            )
        return {"head_dim": head_dim, "value_head_dim": value_head_dim, "scale": 1}

    def head_dim(self, stored: int) -> int:
        return stored

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (stored_keys, key_scales), (stored_values, value_scales) = self.quantize(keys), self.quantize(values)
        return stored_keys, stored_values, key_scales, value_scales

    def decode(self, stored: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values, key_scales, value_scales = stored
        return self.dequantize(keys, key_scales), self.dequantize(values, value_scales)

    def quantize(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Symmetric rounding, one scale per last dimension.

        Args:
            rows: [..., dim], floating.

        Returns:
            The rounded rows [..., dim] as they are stored, and float32 scales [..., 1].
        """
        wide = rows.to(torch.float32)
        # A row of zeros gets a scale as well: nothing is divided by zero.
        scales = wide.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / self.largest
        return self.pack(torch.round(wide / scales).clamp(-self.largest, self.largest)), scales

    def dequantize(self, stored: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """What `quantize` has kept, in the dtype of the rows."""
        return (self.unpack(stored) * scales).to(self.rows_dtype)

    @abstractmethod
    def pack(self, rounded: torch.Tensor) -> torch.Tensor:
        """Whole numbers [..., dim] in float32, from -largest to largest, as they are stored."""

    @abstractmethod
    def unpack(self, stored: torch.Tensor) -> torch.Tensor:
        """The way back, in float32 [..., dim]."""


@dataclass(frozen=True)
class Int8Storage(RoundedStorage, kind="int8"):
    """Numbers from -127 to 127, one a byte."""

    dtype: str

    bits = 8
    stored_dtype = torch.int8

    def pack(self, rounded: torch.Tensor) -> torch.Tensor:
        return rounded.to(torch.int8)

    def unpack(self, stored: torch.Tensor) -> torch.Tensor:
        return stored.to(torch.float32)


@dataclass(frozen=True)
class Int4Storage(RoundedStorage, kind="int4"):
    """Numbers from -7 to 7, two a byte: the first half of a row in the low bits, the second in the high ones, each 8
    more.
    """

    dtype: str

    bits = 4
    stored_dtype = torch.uint8
    stored_dims = ("packed_head_dim", "packed_value_head_dim")

    def sizes(self, head_dim: int, value_head_dim: int) -> dict[str, int]:
        sizes = super().sizes(head_dim, value_head_dim)
        for name in ("head_dim", "value_head_dim"):
            if sizes[name] % 2:
                raise InputError(
                    f"{name} is {sizes[name]}; 4 bits are kept two a byte, so it must be even: pass kv_dtype='int8'"
                )
        return {"packed_head_dim": head_dim // 2, "packed_value_head_dim": value_head_dim // 2, "scale": sizes["scale"]}

    def head_dim(self, stored: int) -> int:
        return 2 * stored

    def pack(self, rounded: torch.Tensor) -> torch.Tensor:
        low, high = (rounded + 8).chunk(2, dim=-1)
        return (low + 16 * high).to(torch.uint8)

    def unpack(self, stored: torch.Tensor) -> torch.Tensor:
        # Whole numbers below 256 are exact in float32, whose arithmetic every target has; shifts of bytes few have.
        both = stored.to(torch.float32)
        high = torch.floor(both / 16)
        return torch.cat([both - 16 * high, high], dim=-1) - 8
