"""Private names of torch.distributed, seen in 2.13.0.

| name | without it |
|---|---|
| `torch.distributed._functional_collectives.broadcast` | several steps in one graph cannot agree on tokens |
| `all_reduce`, `wait_tensor` of the same | no context over ranks |
| `torch.ops._c10d_functional.all_reduce`, `wait_tensor` | programs of ranks cannot sum over them |
| `_register_process_group`, `_unregister_process_group` of `distributed_c10d` | they cannot be run |
| `ProcessGroup._get_backend`, `options._timeout` of a backend | a lost rank is waited for as torch's default says |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: What programs call the processes that they sum over: a name that no group has until a program is opened.
GROUP = "exportable_cache.ranks"
#: What a sum is in a graph: the operators, by the names that torch writes.
SUM, WAIT = "torch.ops._c10d_functional.all_reduce.default", "torch.ops._c10d_functional.wait_tensor.default"


def broadcast_in_graph(tensor: torch.Tensor, first: int, group: ProcessGroup) -> torch.Tensor:
    """What global rank `first` has, as an operator that graphs may have inside."""
    # Here, as most programs are one process's.
    from torch.distributed import _functional_collectives as functional

    return functional.broadcast(tensor, first, group)


def sum_in_graph(tensor: torch.Tensor, group: str = GROUP) -> torch.Tensor:
    """The sum of the tensors of a group's processes, as operators that a program may have inside.

    Args:
        tensor: Of the same shape and dtype in each.
        group: Name of the group, which need not exist while a program is traced.
    """
    # The import brings what the operators give on tensors without values.
    from torch.distributed import _functional_collectives  # noqa: F401

    functional = torch.ops._c10d_functional
    # Seen as another shape, as the tensor that the sum writes must never be a result that Python holds: gloo's thread
    # would need the interpreter to let go of it, and machine code keeps the interpreter while it waits for that thread.
    return functional.wait_tensor(functional.all_reduce(tensor.flatten(), "sum", group)).view(tensor.shape)


def reduced(tensor: torch.Tensor, operation: str, group: ProcessGroup) -> torch.Tensor:
    """The sum (`sum`) or the largest (`max`) of a group's tensors, as an operator that graphs may have inside."""
    from torch.distributed import _functional_collectives as functional

    return functional.wait_tensor(functional.all_reduce(tensor, operation, group))


def is_sum(operator: object) -> bool:
    """Whether it is the operator that sums over ranks."""
    return str(operator) == "_c10d_functional.all_reduce.default"


def name_group(group: ProcessGroup, name: str = GROUP) -> None:
    """Give a group the name that programs know it by, in the place of one that had it."""
    from torch.distributed import distributed_c10d as private

    _forget_name(name)
    private._register_process_group(name, group)  # type: ignore[arg-type]


def group_apart(group: ProcessGroup) -> ProcessGroup:
    """Another group of the same processes, with threads of its own and the same timeout; all have to call it."""
    from torch import distributed

    backend = group._get_backend(torch.device("cpu"))
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    # Not of the whole default group, which may be larger.
    made = distributed.new_group(distributed.get_process_group_ranks(group), timeout, use_local_synchronization=True)
    return made


@contextmanager
def group_to_come(rank: int, size: int, name: str = GROUP) -> Iterator[None]:
    """A block in which a name stands for processes that are not there: a compiler asks how many they will be."""
    from torch import distributed

    group = distributed.ProcessGroup(distributed.HashStore(), rank, size)
    name_group(group, name)
    try:
        yield
    finally:
        _forget_name(name)


def _forget_name(name: str) -> None:
    from torch.distributed import distributed_c10d as private

    # torch has no question for whether there is one.
    with suppress(RuntimeError):
        private._unregister_process_group(name)  # type: ignore[arg-type]
