"""Keys and values in 4 bits: an eighth of float32's bytes, plus 4 bytes per token and head for each of the two."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...errors import InputError
from .rounded import RoundedStorage


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
