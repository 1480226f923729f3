"""Storages: the tensors that keep the keys and values of a slot, and how rows are encoded and decoded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from ..common.settings import check_choice
from ..errors import InputError
from .component import Component
from .spec import KV_DTYPES


class Part(NamedTuple):
    """A tensor that keeps a row per slot and head.

    Attributes:
        dim: Name of its last dimension.
        dtype: Element type.
    """

    dim: str
    dtype: torch.dtype


class Storage(Component, ABC):
    """Interface of how keys and values [..., dim] are stored, for any dimensions before the last.

    Members are frozen dataclasses of one field, `dtype`: the name of the floating dtype of keys and values before and
    after.

    Raises:
        InputError: If `dtype` is not the name of a floating dtype.
    """

    family = "storage"
    kinds: ClassVar[dict[str, type[Storage]]] = {}

    #: True if decoded rows differ from the encoded ones.
    rounds: ClassVar[bool]
    #: Sizes of last dimensions that do not depend on the head size.
    known_sizes: ClassVar[dict[str, int]] = {}

    dtype: str

    def __post_init__(self) -> None:
        dtype = getattr(torch, self.dtype, None) if isinstance(self.dtype, str) else None
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise InputError(f"dtype of a cache layer must be a floating dtype such as float32, got {self.dtype!r}")

    @classmethod
    def of(cls, dtype: torch.dtype) -> Storage:
        """Return the storage for keys and values of `dtype`.

        Raises:
            InputError: If it is not a floating dtype.
        """
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise InputError(f"dtype of a cache layer must be a floating dtype such as torch.float32, got {dtype!r}")
        return cls(str(dtype).removeprefix("torch."))  # type: ignore[call-arg]

    @property
    def rows_dtype(self) -> torch.dtype:
        """Dtype of keys and values before encoding and after decoding."""
        return getattr(torch, self.dtype)

    @property
    @abstractmethod
    def parts(self) -> dict[str, Part]:
        """Stored tensors by name, `keys` and `values` first."""

    @abstractmethod
    def sizes(self, head_dim: int, value_head_dim: int) -> dict[str, int]:
        """Return the size of each last dimension that `parts` names.

        Raises:
            InputError: If heads of these sizes cannot be stored.
        """

    @abstractmethod
    def head_dim(self, stored: int) -> int:
        """Return the size of a head whose row takes `stored` elements of `keys` or `values`."""

    @abstractmethod
    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the stored tensors, ordered as `parts`, of keys [..., head_dim] and values [..., value_head_dim]."""

    @abstractmethod
    def decode(self, stored: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys [..., head_dim] and values [..., value_head_dim] of tensors in the order of `parts`."""


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


class RoundedStorage(Storage):
    """Storage of keys and values in 8 or 4 bits, with scales float32 [..., 1].

    Attention reads the stored rows, also of new tokens, so that logits do not depend on how a prompt is cut into
    chunks.
    """

    rounds = True
    known_sizes = {"scale": 1}
    #: Bits of a stored number.
    bits: ClassVar[int]
    #: Element type of `keys` and `values`.
    stored_dtype: ClassVar[torch.dtype]
    #: Names of the last dimensions of `keys` and of `values`.
    stored_dims: ClassVar[tuple[str, str]] = ("head_dim", "value_head_dim")

    @property
    def largest(self) -> int:
        """Largest stored number, which represents the largest element of a row."""
        return 2 ** (self.bits - 1) - 1

    @property
    def parts(self) -> dict[str, Part]:
        """See `Storage.parts`."""
        return {
            "keys": Part(self.stored_dims[0], self.stored_dtype),
            "values": Part(self.stored_dims[1], self.stored_dtype),
            "key_scales": Part("scale", torch.float32),
            "value_scales": Part("scale", torch.float32),
        }

    def sizes(self, head_dim: int, value_head_dim: int) -> dict[str, int]:
        """See `Storage.sizes`."""
        if value_head_dim == 0:
            raise InputError(
                "value_head_dim must be at least 1 for a quantized cache, got 0, because empty values have no scale; "
                f"leave kv_dtype out, which keeps {self.dtype}"
            )
        return {"head_dim": head_dim, "value_head_dim": value_head_dim, "scale": 1}

    def head_dim(self, stored: int) -> int:
        """See `Storage.head_dim`."""
        return stored

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See `Storage.encode`."""
        (stored_keys, key_scales), (stored_values, value_scales) = self.quantize(keys), self.quantize(values)
        return stored_keys, stored_values, key_scales, value_scales

    def decode(self, stored: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Storage.decode`."""
        keys, values, key_scales, value_scales = stored
        return self.dequantize(keys, key_scales), self.dequantize(values, value_scales)

    def quantize(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Round rows symmetrically, with one scale per last dimension.

        Args:
            rows: [..., dim], floating.

        Returns:
            The stored rows [..., dim], and float32 scales [..., 1].
        """
        wide = rows.to(torch.float32)
        # A row of zeros has a scale as well, because it is a divisor.
        scales = wide.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / self.largest
        return self.pack(torch.round(wide / scales).clamp(-self.largest, self.largest)), scales

    def dequantize(self, stored: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return the rows that `quantize` stored, in their original dtype."""
        return (self.unpack(stored) * scales).to(self.rows_dtype)

    @abstractmethod
    def pack(self, rounded: torch.Tensor) -> torch.Tensor:
        """Return whole numbers [..., dim] of float32, from -largest to largest, in the stored form."""

    @abstractmethod
    def unpack(self, stored: torch.Tensor) -> torch.Tensor:
        """Return stored numbers as float32 [..., dim]."""


@dataclass(frozen=True)
class Int8Storage(RoundedStorage, kind="int8"):
    """Storage of numbers from -127 to 127, one per byte."""

    dtype: str

    bits = 8
    stored_dtype = torch.int8

    def pack(self, rounded: torch.Tensor) -> torch.Tensor:
        """See `Storage.pack`."""
        return rounded.to(torch.int8)

    def unpack(self, stored: torch.Tensor) -> torch.Tensor:
        """See `Storage.unpack`."""
        return stored.to(torch.float32)


@dataclass(frozen=True)
class Int4Storage(RoundedStorage, kind="int4"):
    """Storage of numbers from -7 to 7, two per byte, each plus 8.

    The first half of a row is in the low bits, the second half in the high bits.
    """

    dtype: str

    bits = 4
    stored_dtype = torch.uint8
    stored_dims = ("packed_head_dim", "packed_value_head_dim")

    def sizes(self, head_dim: int, value_head_dim: int) -> dict[str, int]:
        """See `Storage.sizes`."""
        sizes = super().sizes(head_dim, value_head_dim)
        for name in ("head_dim", "value_head_dim"):
            if sizes[name] % 2:
                raise InputError(
                    f"{name} must be even for kv_dtype 'int4', which stores two numbers per byte, got {sizes[name]}; "
                    "pass kv_dtype='int8'"
                )
        return {"packed_head_dim": head_dim // 2, "packed_value_head_dim": value_head_dim // 2, "scale": sizes["scale"]}

    def head_dim(self, stored: int) -> int:
        """See `Storage.head_dim`."""
        return 2 * stored

    def pack(self, rounded: torch.Tensor) -> torch.Tensor:
        """See `Storage.pack`."""
        low, high = (rounded + 8).chunk(2, dim=-1)
        return (low + 16 * high).to(torch.uint8)

    def unpack(self, stored: torch.Tensor) -> torch.Tensor:
        """See `Storage.unpack`."""
        # In float32, where integers below 256 are exact, because few targets support shifts of bytes.
        both = stored.to(torch.float32)
        high = torch.floor(both / 16)
        return torch.cat([both - 16 * high, high], dim=-1) - 8


def storage_of(dtype: torch.dtype, kv_dtype: str | None = None) -> Storage:
    """Return the storage for keys and values of `dtype` that are kept in `kv_dtype`, or unchanged without one.

    Raises:
        InputError: If `dtype` is not a floating dtype, or `kv_dtype` is unknown.
    """
    if kv_dtype is not None:
        check_choice("kv_dtype", kv_dtype, KV_DTYPES, optional=True)
    if kv_dtype is None or str(dtype) == f"torch.{kv_dtype}":
        return FloatStorage.of(dtype)
    return Storage.kinds[kv_dtype].of(dtype)
