"""Keys and values in 8 bits: a quarter of float32's bytes, plus 4 bytes per token and head for each of the two."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .rounded import RoundedStorage


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
