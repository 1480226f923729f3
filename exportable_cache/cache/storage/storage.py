"""The interface of a storage: which tensors keep keys and values, and how rows go in and come out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch

from ...errors import InputError
from ..component import Component


class Part(NamedTuple):
    """One tensor that keeps a row per slot and head.

    Attributes:
        dim: Name of its last dimension.
        dtype: Element type.
    """

    dim: str
    dtype: torch.dtype


class Storage(Component, ABC):
    """How keys and values [..., dim] are kept, whatever the dimensions before the last: a target may order them as it
    likes.

    Members are frozen dataclasses of one field, `dtype`, the name of the floating dtype that keys and values come in
    and go out in.

    Raises:
        InputError: If `dtype` is not the name of a floating dtype.
    """

    family = "storage"
    kinds: ClassVar[dict[str, type[Storage]]] = {}

    #: Whether what comes out differs from what went in.
    rounds: ClassVar[bool]
    #: Sizes of those last dimensions that are the same for heads of any size.
    known_sizes: ClassVar[dict[str, int]] = {}

    dtype: str

    def __post_init__(self) -> None:
        dtype = getattr(torch, self.dtype, None) if isinstance(self.dtype, str) else None
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise InputError(f"dtype of a cache layer is {self.dtype!r}; it must be a floating dtype such as float32")

    @classmethod
    def of(cls, dtype: torch.dtype) -> Storage:
        """The storage for keys and values of `dtype`.

        Raises:
            InputError: If it is no floating dtype.
        """
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise InputError(f"dtype of a cache layer is {dtype!r}; it must be a floating dtype such as torch.float32")
        return cls(str(dtype).removeprefix("torch."))  # type: ignore[call-arg]

    @property
    def rows_dtype(self) -> torch.dtype:
        """Of the keys and values that come in and go out."""
        return getattr(torch, self.dtype)

    @property
    @abstractmethod
    def parts(self) -> dict[str, Part]:
        """The tensors by name, `keys` and `values` first: no other is needed to tell them apart in files."""

    @abstractmethod
    def sizes(self, head_dim: int, value_head_dim: int) -> dict[str, int]:
        """Size of each last dimension that `parts` names.

        Raises:
            InputError: If heads of these sizes cannot be kept so.
        """

    @abstractmethod
    def head_dim(self, stored: int) -> int:
        """Size of a head whose row takes `stored` elements of `keys` or `values`."""

    @abstractmethod
    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What is kept of keys [..., head_dim] and values [..., value_head_dim], in the order of `parts`."""

    @abstractmethod
    def decode(self, stored: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The way back, of tensors in the order of `parts`: keys [..., head_dim] and values [..., value_head_dim]."""
