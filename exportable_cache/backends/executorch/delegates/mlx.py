"""The delegate MLX, for GPUs of Macs and iPhones.

The compiler is in every wheel of ExecuTorch. Each method has its own state in the runtime, so programs have one method.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ....common.compat.executorch import prepare_mlx_schema
from .passes import (
    choices_to_comparisons,
    empties_to_zeros,
    floor_divisions_to_floors,
    keep_state_outside,
    maxima_to_parts,
    numbers_to_tensors,
    slices_to_bounds,
    sums_to_dtypes,
    tables_to_selections,
)

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def partitioner() -> Any:
    """Return the partitioner of the delegate."""
    prepare_mlx_schema()
    from executorch.backends.mlx.partitioner import MLXPartitioner

    # It reports each partition at level INFO, through a handler of its own.
    logging.getLogger("executorch.backends.mlx").setLevel(logging.WARNING)

    class Partitioner(MLXPartitioner):
        """A partitioner that leaves state outside if several partitions use it."""

        def partition(self, edge_program: ExportedProgram) -> Any:
            result = super().partition(edge_program)
            keep_state_outside(edge_program, only_split=True)
            return result

    return Partitioner()


def rewrites() -> tuple[Callable[[ExportedProgram], ExportedProgram], ...]:
    """Return passes over exported programs."""
    return (
        choices_to_comparisons,
        slices_to_bounds,
        sums_to_dtypes,
        maxima_to_parts,
        tables_to_selections,
        floor_divisions_to_floors,
    )


def passes() -> list[Any]:
    """Return passes over edge programs, before they are partitioned."""
    prepare_mlx_schema()
    from executorch.backends.mlx.passes import get_default_passes

    return [numbers_to_tensors, empties_to_zeros, *get_default_passes()]
