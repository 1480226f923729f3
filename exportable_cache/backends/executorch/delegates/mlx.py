"""The delegate MLX, for GPUs of Macs and iPhones.

The compiler is in every wheel of ExecuTorch. Each method has its own state in the runtime, so programs have one method.
"""

from __future__ import annotations

import logging
from typing import Any

from ....common.compat.executorch import prepare_mlx_schema
from .passes import numbers_to_tensors


def partitioner() -> Any:
    """Return the partitioner of the delegate."""
    prepare_mlx_schema()
    from executorch.backends.mlx.partitioner import MLXPartitioner

    # It reports each partition at level INFO, through a handler of its own.
    logging.getLogger("executorch.backends.mlx").setLevel(logging.WARNING)
    return MLXPartitioner()


def passes() -> list[Any]:
    """Return passes over edge programs, before they are partitioned."""
    prepare_mlx_schema()
    from executorch.backends.mlx.passes import get_default_passes

    return [numbers_to_tensors, *get_default_passes()]
