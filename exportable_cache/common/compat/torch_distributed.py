"""Private names of torch.distributed, seen in 2.13.0.

| name | without it |
|---|---|
| `torch.distributed._functional_collectives.broadcast` | several steps in one graph cannot agree on tokens |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


def broadcast_in_graph(tensor: torch.Tensor, first: int, group: ProcessGroup) -> torch.Tensor:
    """What global rank `first` has, as an operator that graphs may have inside."""
    # Here, as most programs are one process's.
    from torch.distributed import _functional_collectives as functional

    return functional.broadcast(tensor, first, group)
