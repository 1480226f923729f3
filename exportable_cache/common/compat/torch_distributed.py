"""Private names of torch.distributed, seen in 2.13.0.

| name | without it |
|---|---|
| `torch.distributed._functional_collectives.broadcast` | several steps in one graph cannot agree on tokens |
| `torch.ops._c10d_functional.all_reduce`, `wait_tensor` | programs of ranks cannot sum over them |
| `_register_process_group`, `_unregister_process_group` of `distributed_c10d` | programs of ranks cannot be run |
| `ProcessGroup._get_backend`, `options._timeout` of a backend | a lost rank is detected after torch's default timeout |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Name of the process group in programs. No group has it until a program is opened.
GROUP = "exportable_cache.ranks"
#: Names of a sum's operators in a graph.
SUM, WAIT = "torch.ops._c10d_functional.all_reduce.default", "torch.ops._c10d_functional.wait_tensor.default"


def broadcast_in_graph(tensor: torch.Tensor, first: int, group: ProcessGroup) -> torch.Tensor:
    """Return the tensor of global rank `first`, by an operator that can be captured in a graph."""
    # Imported here, because most programs run in one process.
    from torch.distributed import _functional_collectives as functional

    return functional.broadcast(tensor, first, group)


def sum_in_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor over the ranks' processes, by operators that can be captured in a program.

    The group `GROUP` need not exist while a program is traced.

    Args:
        tensor: Tensor of the same shape and dtype in each process.
    """
    # The import registers the operators for fake tensors.
    from torch.distributed import _functional_collectives  # noqa: F401

    functional = torch.ops._c10d_functional
    # Viewed as another shape, because Python must not hold the tensor that the sum writes. Gloo's thread would need the
    # interpreter to release it, while machine code holds the interpreter and waits for that thread.
    return functional.wait_tensor(functional.all_reduce(tensor.flatten(), "sum", GROUP)).view(tensor.shape)


def is_sum(operator: object) -> bool:
    """Return True for the operator that sums over ranks."""
    return str(operator) == "_c10d_functional.all_reduce.default"


def name_group(group: ProcessGroup) -> None:
    """Give a group the name `GROUP`, which programs use; a previous group of that name loses it."""
    from torch.distributed import distributed_c10d as private

    _forget_name()
    private._register_process_group(GROUP, group)  # type: ignore[arg-type]


def separate_group(group: ProcessGroup) -> ProcessGroup:
    """Return a new group of the same processes with separate threads and the same timeout.

    All processes have to call it.
    """
    from torch import distributed

    backend = group._get_backend(torch.device("cpu"))
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    # With local synchronization, because the default group may be larger.
    made = distributed.new_group(distributed.get_process_group_ranks(group), timeout, use_local_synchronization=True)
    return made


@contextmanager
def placeholder_group(rank: int, size: int) -> Iterator[None]:
    """Register a placeholder group within a block, because the compiler needs the number of processes."""
    from torch import distributed

    group = distributed.ProcessGroup(distributed.HashStore(), rank, size)
    name_group(group)
    try:
        yield
    finally:
        _forget_name()


def _forget_name() -> None:
    from torch.distributed import distributed_c10d as private

    # torch cannot tell whether the name is registered.
    with suppress(RuntimeError):
        private._unregister_process_group(GROUP)  # type: ignore[arg-type]
