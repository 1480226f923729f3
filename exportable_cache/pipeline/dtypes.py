"""Choice of the dtype that a model is exported in: the requested one, or the best one of the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..backends.base import target_dtypes
from ..common.tensors import dtype_name
from ..errors import InputError


@dataclass(frozen=True)
class DtypeChoice:
    """The dtype that a model is exported in.

    `DtypeChoice(torch.bfloat16, torch.float32, "executorch computes best")`.

    Attributes:
        stored: Dtype of the stored weights.
        chosen: Dtype of the exported weights.
        reason: Reason for the choice, if it was not requested.
        kept: True if weights keep their stored dtype in the file and are converted when they are multiplied.
        rounded: True if inputs of layers with kept weights are rounded to the stored dtype.
    """

    stored: torch.dtype
    chosen: torch.dtype
    reason: str = ""
    kept: bool = False
    rounded: bool = False

    @property
    def widened(self) -> bool:
        """True if weights stored in 16 bits are exported in another dtype, so that the two round differently."""
        return self.stored != self.chosen and self.stored.itemsize == 2

    def __str__(self) -> str:
        stored, chosen = dtype_name(self.stored), dtype_name(self.chosen)
        if self.stored == self.chosen:
            return f"weights are stored and exported in {stored}"
        if self.rounded:
            return (
                f"weights are stored and kept in {stored}; products are of {stored} and sums in {chosen}, as requested"
            )
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
        InputError: If the target is not correct in this dtype, or quantized kernels do not compute in it; or if
            `compute` is given without native linear layers, with another dtype or with quantized weights.
    """
    rounded, compute = target_dtypes(target, options).rounded, options.get("compute", "float32")
    # Not checked with the other options, because whether layers are native may follow from options of the export.
    if compute != "float32" and rounded is None:
        raise InputError(
            f"compute must be 'float32' without native linear layers, got {compute!r}; pass kernels='native' or "
            "linears='native', or leave compute out"
        )
    if rounded is not None and (quantized or requested not in (None, torch.float32)):
        other = "quantize" if quantized else f"dtype={dtype_name(requested or torch.float32)!r}"
        raise InputError(
            f"compute must be 'float32' with {other}, got {dtype_name(rounded)!r}, because it is for weights that are "
            f"kept in {dtype_name(rounded)}; leave one of them out (recipe 'half' sets compute)"
        )
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
    allowed = target_dtypes(target, options).quantized
    if quantized and requested not in allowed:
        raise InputError(
            f"dtype must be {' or '.join(map(dtype_name, allowed))} with quantize, got {name!r}; leave dtype out, "
            "because weights are quantised from any stored dtype"
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
        InputError: See `check_dtype`; or if `compute` is given for weights that are not stored in bfloat16.
    """
    check_dtype(requested, target, options, quantized)
    rounded = target_dtypes(target, options).rounded
    if rounded is not None and stored != rounded:
        raise InputError(
            f"compute must be 'float32' for weights stored in {dtype_name(stored)}, got {dtype_name(rounded)!r}; leave "
            f"out compute and recipe 'half', or export a checkpoint in {dtype_name(rounded)}"
        )
    dtypes = target_dtypes(target, options)
    if quantized and requested is None:
        chosen = stored if stored in dtypes.quantized else dtypes.quantized[0]
        return DtypeChoice(stored, chosen, "quantised kernels compute in")
    chosen, reason = (dtypes.preferred(stored), f"{target} computes best") if requested is None else (requested, "")
    kept = dtypes.keeps_exact and not quantized and stored.itemsize < chosen.itemsize
    return DtypeChoice(stored, chosen, reason, kept, rounded is not None)
