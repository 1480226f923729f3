"""What a step tells the layers: where it starts, how far it reads, and whether it writes in place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class StepContext:
    """One step over a cache, handed to its layers as they are put around the step's tensors
    (`LayeredCache.with_state`).

    Models call a cache in transformers' signatures, some call its layers, and none has a place for an argument of ours:
    so each layer of a step holds the step's context, and nothing about a step is ever set on a layer.

    Attributes:
        start: Length of each row before the step, int64 [batch_size], where a program takes it as an input; None in
            plain use, where the layers count.
        kv_read_len: A position that no row will reach in this step, so that slots from there on need not be read; None
            where that is unknown. A static int, one per compiled or exported method: what makes a step cost what the
            filled part costs, not what is allocated.
        kv_slots: Slots to read of layers that are read up to `kv_read_len`, at most that and beyond what any row will
            hold; a size that may differ from step to step, so that one graph reads as far as it needs to. None for all
            of `kv_read_len`.
        in_place: Whether the state tensors are mutated (buffers of a resident program, eager and compiled use) or the
            attributes are bound to new ones (explicit programs, whose state is a graph input and output).
        sees_items: Whether it says which pictures each token sees, and so runs the layers that attend to them.
        length: What `start` holds, where rows agree and the host knows it, see `starting_at`; None otherwise, and in
            every traced step.
        shared: What layers have computed for all of them, see `once`.
    """

    start: torch.Tensor | None = None
    kv_read_len: int | None = None
    in_place: bool = True
    kv_slots: int | None = None
    sees_items: bool = False
    length: int | None = None
    shared: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def counts(self) -> bool:
        """Whether layers advance their lengths. Not in a resident program, whose length is an input that no step may
        change.
        """
        return self.start is None or not self.in_place

    def once(self, name: Any, compute: Callable[[], Any]) -> Any:
        """What `compute` gave the first time that a layer of this step asked for `name`."""
        if name not in self.shared:
            self.shared[name] = compute()
        return self.shared[name]


#: Plain use: lengths are counted, everything is read and written in place.
PLAIN = StepContext()


class _Known(threading.local):
    """Of this thread's step, see `models.scans`."""

    def __init__(self) -> None:
        self.start: torch.Tensor | None = None
        self.length: int | None = None


_known = _Known()


@contextmanager
def starting_at(start: torch.Tensor, length: int | None) -> Iterator[None]:
    """A block in which the host knows what a tensor of lengths holds.

    Models ask a cache for its length to make masks and positions of that size. Of a tensor on a GPU a step that runs as
    it is would wait for the value, and everything that was launched before.

    Args:
        start: int64 [batch_size], the very tensor that the step is given.
        length: Of all rows; None where they differ.
    """
    before = _known.start, _known.length
    _known.start, _known.length = start, length
    try:
        yield
    finally:
        _known.start, _known.length = before


def known_length(start: torch.Tensor) -> int | None:
    """The one length that `start` holds, if the host was told; never in a traced step, which serves every length."""
    if torch.compiler.is_compiling() or _known.start is not start:
        return None
    return _known.length
