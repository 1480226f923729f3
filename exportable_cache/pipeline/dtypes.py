"""Which dtype a model is exported in: what was asked for, or what its target computes best in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..backends.dtypes import target_dtypes
from ..common.tensors import dtype_name
from ..errors import InputError

#: What quantised kernels take and give besides integers, in every scheme.
QUANTIZED_COMPUTES_IN = torch.float32


@dataclass(frozen=True)
class DtypeChoice:
    """The dtype that a model is exported in.

    `DtypeChoice(torch.bfloat16, torch.float32, "executorch computes best")`.

    Attributes:
        stored: Of the weights as they are.
        chosen: Of the weights that are exported.
        reason: What the chosen one is for, where nobody asked for it.
        kept: Whether weights are stored as they are, and become the chosen one where they are multiplied.
    """

    stored: torch.dtype
    chosen: torch.dtype
    reason: str = ""
    kept: bool = False

    @property
    def widened(self) -> bool:
        """Whether weights stored in 16 bits are exported in another dtype, so that both round differently."""
        return self.stored != self.chosen and self.stored.itemsize == 2

    def __str__(self) -> str:
        stored, chosen = dtype_name(self.stored), dtype_name(self.chosen)
        if self.stored == self.chosen:
            return f"weights are stored and exported in {stored}"
        weights = f"stored and kept in {stored}; products are" if self.kept else f"stored in {stored}; exported"
        return f"weights are {weights} in {chosen}, {f'which {self.reason}' if self.reason else 'as asked for'}"


def check_dtype(asked: torch.dtype | None, target: str, options: Mapping[str, Any], quantized: bool = False) -> None:
    """Refuse a dtype that was asked for and cannot be had, before any weights are read.

    Args:
        asked: None for none.
        options: Of the target.
        quantized: Whether weights are to be quantised.

    Raises:
        InputError: If the target is not right in it, or quantised kernels do not compute in it.
    """
    if asked is None:
        return
    name = dtype_name(asked)
    reason = target_dtypes(target, options).refused.get(asked)
    if reason is not None:
        best = dtype_name(target_dtypes(target, options).preferred(asked))
        raise InputError(
            f"dtype is {name!r}, in which target {target!r} cannot be right: {reason}; leave dtype out, which gives "
            f"{best}, or export for target 'pt2'"
        )
    if quantized and asked != QUANTIZED_COMPUTES_IN:
        raise InputError(
            f"dtype is {name!r}, but quantised kernels compute in {dtype_name(QUANTIZED_COMPUTES_IN)}; leave dtype "
            "out: weights are quantised from any stored dtype"
        )


def choose_dtype(
    stored: torch.dtype,
    asked: torch.dtype | None,
    target: str,
    options: Mapping[str, Any],
    quantized: bool = False,
) -> DtypeChoice:
    """The dtype to export weights in that are stored in `stored`.

    Raises:
        InputError: See `check_dtype`.
    """
    check_dtype(asked, target, options, quantized)
    if quantized and asked is None:
        return DtypeChoice(stored, QUANTIZED_COMPUTES_IN, "quantised kernels compute in")
    dtypes = target_dtypes(target, options)
    chosen, reason = (dtypes.preferred(stored), f"{target} computes best") if asked is None else (asked, "")
    kept = dtypes.keeps_exact and not quantized and stored.itemsize < chosen.itemsize
    return DtypeChoice(stored, chosen, reason, kept)
