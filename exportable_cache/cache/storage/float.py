"""Floating-point storages: keys and values in the model's dtype, or rounded to 16 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from .storage import Part, Storage


@dataclass(frozen=True)
class FloatStorage(Storage, kind="float"):
    """Storage of keys [..., head_dim] and values [..., value_head_dim] in their own dtype; nothing is computed."""

    dtype: str

    rounds = False

    @property
    def parts(self) -> dict[str, Part]:
        """See `Storage.parts`."""
        return {"keys": Part("head_dim", self.rows_dtype), "values": Part("value_head_dim", self.rows_dtype)}

    def sizes(self, head_dim: int, value_head_dim: int) -> dict[str, int]:
        """See `Storage.sizes`."""
        return {"head_dim": head_dim, "value_head_dim": value_head_dim}

    def head_dim(self, stored: int) -> int:
        """See `Storage.head_dim`."""
        return stored

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Storage.encode`."""
        return keys, values

    def decode(self, stored: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Storage.decode`."""
        keys, values = stored
        return keys, values


class HalfStorage(Storage):
    """Storage of keys [..., head_dim] and values [..., value_head_dim], rounded to the nearest 16-bit number.

    Attention reads the stored rows, also of new tokens, so that logits do not depend on how a prompt is cut into
    chunks.
    """

    rounds = True
    #: Element type of `keys` and `values`.
    stored_dtype: ClassVar[torch.dtype]

    @property
    def parts(self) -> dict[str, Part]:
        """See `Storage.parts`."""
        return {"keys": Part("head_dim", self.stored_dtype), "values": Part("value_head_dim", self.stored_dtype)}

    def sizes(self, head_dim: int, value_head_dim: int) -> dict[str, int]:
        """See `Storage.sizes`."""
        return {"head_dim": head_dim, "value_head_dim": value_head_dim}

    def head_dim(self, stored: int) -> int:
        """See `Storage.head_dim`."""
        return stored

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Storage.encode`."""
        return self.narrow(keys), self.narrow(values)

    def decode(self, stored: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Storage.decode`."""
        keys, values = stored
        return keys.to(self.rows_dtype), values.to(self.rows_dtype)

    def narrow(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows [..., dim] in the stored dtype."""
        return rows.to(self.stored_dtype)


@dataclass(frozen=True)
class Float16Storage(HalfStorage, kind="float16"):
    """Storage with 11 bits of precision and numbers up to 65504; larger ones are clamped.

    They are clamped because an infinite key would turn every score in its row into NaN.
    """

    dtype: str

    stored_dtype = torch.float16

    def narrow(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Storage.narrow`."""
        largest = torch.finfo(torch.float16).max
        return super().narrow(rows.clamp(-largest, largest))


@dataclass(frozen=True)
class BFloat16Storage(HalfStorage, kind="bfloat16"):
    """Storage with 8 bits of precision and the range of float32."""

    dtype: str

    stored_dtype = torch.bfloat16
