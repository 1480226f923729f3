"""Keys and values as the model writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .storage import Part, Storage

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class FloatStorage(Storage, kind="float"):
    """Keys [..., head_dim] and values [..., value_head_dim] in their own dtype; nothing is computed."""

    dtype: str

    rounds = False

    @property
    def parts(self) -> dict[str, Part]:
        return {"keys": Part("head_dim", self.rows_dtype), "values": Part("value_head_dim", self.rows_dtype)}

    def sizes(self, head_dim: int, value_head_dim: int) -> dict[str, int]:
        return {"head_dim": head_dim, "value_head_dim": value_head_dim}

    def head_dim(self, stored: int) -> int:
        return stored

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return keys, values

    def decode(self, stored: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = stored
        return keys, values
