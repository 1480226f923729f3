"""Choice of the dtype that a model is exported in: the requested one, or the best one of the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..backends.base import target_dtypes
from ..common.tensors import dtype_name
from ..errors import InputError

#: Floating dtype of quantized kernels, in every scheme.
QUANTIZED_COMPUTES_IN = torch.float32


@dataclass(frozen=True)
class DtypeChoice:
    """The dtype that a model is exported in.

    `DtypeChoice(torch.bfloat16, torch.float32, "executorch computes best")`.

    Attributes:
        stored: Dtype of the stored weights.
        chosen: Dtype of the exported weights.
        reason: Reason for the choice, if it was not requested.
        kept: True if weights keep their stored dtype in the file and are converted when they are multiplied.
    """

    stored: torch.dtype
    chosen: torch.dtype
    reason: str = ""
    kept: bool = False

    @property
    def widened(self) -> bool:
        """True if weights stored in 16 bits are exported in another dtype, so that the two round differently."""
        return self.stored != self.chosen and self.stored.itemsize == 2

    def __str__(self) -> str:
        stored, chosen = dtype_name(self.stored), dtype_name(self.chosen)
        if self.stored == self.chosen:
            return f"weights are stored and exported in {stored}"
        weights = f"stored and kept in {stored}; products are" if self.kept else f"stored in {stored}; exported"
        return f"weights are {weights} in {chosen}, {f'which {self.reason}' if self.reason else 'as requested'}"


def check_dtype(
    requested: torch.dtype | None, target: str, options: Mapping[str, Any], quantized: bool = False
) -> None:
    """Check that a requested dtype is possible, before any weights are read.

    Args:
        requested: Requested dtype, or None.
        target: Name of the target.
        options: Options of the target.
        quantized: True if weights are to be quantized.

    Raises:
        InputError: If the target is not correct in this dtype, or quantized kernels do not compute in it.
    """
    if requested is None:
        return
    name = dtype_name(requested)
    reason = target_dtypes(target, options).refused.get(requested)
    if reason is not None:
        best = dtype_name(target_dtypes(target, options).preferred(requested))
        raise InputError(
            f"dtype must not be {name!r} for target {target!r}, because {reason}; leave dtype out, which gives "
            f"{best}, or export for target 'pt2'"
        )
    if quantized and requested != QUANTIZED_COMPUTES_IN:
        raise InputError(
            f"dtype must be {dtype_name(QUANTIZED_COMPUTES_IN)} with quantize, got {name!r}; leave dtype out, because "
            "weights are quantised from any stored dtype"
        )


def choose_dtype(
    stored: torch.dtype,
    requested: torch.dtype | None,
    target: str,
    options: Mapping[str, Any],
    quantized: bool = False,
) -> DtypeChoice:
    """Return the dtype to export weights in that are stored in `stored`.

    Args:
        stored: Dtype of the stored weights.
        requested: Requested dtype, or None.
        target: Name of the target.
        options: Options of the target.
        quantized: True if weights are to be quantized.

    Raises:
        InputError: See `check_dtype`.
    """
    check_dtype(requested, target, options, quantized)
    if quantized and requested is None:
        return DtypeChoice(stored, QUANTIZED_COMPUTES_IN, "quantised kernels compute in")
    dtypes = target_dtypes(target, options)
    chosen, reason = (dtypes.preferred(stored), f"{target} computes best") if requested is None else (requested, "")
    kept = dtypes.keeps_exact and not quantized and stored.itemsize < chosen.itemsize
    return DtypeChoice(stored, chosen, reason, kept)
