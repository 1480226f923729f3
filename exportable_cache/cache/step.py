"""Context of a step for the layers: where it starts, how far it reads, and whether it writes in place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .attention.operators import FilledKeys


@dataclass(frozen=True, eq=False)
class StepContext:
    """A step over a cache, which its layers get with the step's tensors (`LayeredCache.with_state`).

    Each layer of a step holds the context, because models call a cache and its layers in transformers' signatures,
    which have no argument for it.

    Attributes:
        start: Length of each row before the step, int64 [batch_size], if a program takes it as an input; None in
            plain use, where layers count tokens.
        kv_read_len: A position that no row will reach in this step, so that slots from there on need not be read; None
            where that is unknown. A static int, one per compiled or exported method: what makes a step cost what the
            filled part costs, not what is allocated.
        kv_slots: Slots to read of layers that are read up to `kv_read_len`, at most that and beyond what any row will
            hold; a size that may differ from step to step, so that one graph reads as far as it needs to. None for all
            of `kv_read_len`.
        in_place: True if the state tensors are mutated (buffers of a resident program, eager and compiled use) or the
            attributes are bound to new ones (explicit programs, whose state is a graph input and output).
        sees_items: True if the step has the images that each token sees, and runs the layers that attend to them.
        length: Value of `start`, if rows agree and the host knows it, see `starting_at`; None in traced steps.
        filled: Keys that layers returned in this step, if attention reads their stored form up to the filled slots,
            see `attention.filled`; None if it reads what layers return.
        shared: Results that all layers of the step use, see `once`.
    """

    start: torch.Tensor | None = None
    kv_read_len: int | None = None
    in_place: bool = True
    kv_slots: int | None = None
    sees_items: bool = False
    length: int | None = None
    filled: list[FilledKeys] | None = field(default=None, repr=False)
    shared: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def counts(self) -> bool:
        """True if layers advance their lengths; False in a resident program, whose length is an input."""
        return self.start is None or not self.in_place

    def once(self, name: Any, compute: Callable[[], Any]) -> Any:
        """Return the result of `compute`, which runs once per step and `name`."""
        if name not in self.shared:
            self.shared[name] = compute()
        return self.shared[name]


#: Plain use: lengths are counted, everything is read and written in place.
PLAIN = StepContext()


class _Known(threading.local):
    """The known length of this thread's step, see `models.scans`."""

    def __init__(self) -> None:
        self.start: torch.Tensor | None = None
        self.length: int | None = None


_known = _Known()


@contextmanager
def starting_at(start: torch.Tensor, length: int | None) -> Iterator[None]:
    """Run a block in which the host knows the value of a tensor of lengths.

    Models ask a cache for its length to make masks and positions of that size. Reading it from a GPU tensor would wait
    for all work that was launched before.

    Args:
        start: int64 [batch_size], the tensor object that the step gets.
        length: Length of all rows; None if they differ.
    """
    before = _known.start, _known.length
    _known.start, _known.length = start, length
    try:
        yield
    finally:
        _known.start, _known.length = before


def known_length(start: torch.Tensor) -> int | None:
    """Return the one length that `start` holds, if known; None in a traced step, which serves every length."""
    if torch.compiler.is_compiling() or _known.start is not start:
        return None
    return _known.length
