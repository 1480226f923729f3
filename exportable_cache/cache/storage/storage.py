"""Interface of a storage: the tensors that keep keys and values, and how rows are encoded and decoded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch

from ...errors import InputError
from ..component import Component


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
