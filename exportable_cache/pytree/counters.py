"""Python counters as tensors: the number of tokens a transformers layer has seen, kept out of the pytree context.

Several transformers layers count their tokens in a Python int. In the context it would change the tree spec at every
step, and a program traced at one length would refuse the next. So a counter is a child: a 0-D int64 tensor on the CPU,
made into what the class needs when the object is rebuilt:

* a tensor with a value gives the int, so the rebuilt layer is the layer it was;
* while a graph is traced it gives `tensor.item()`, a symbol: the graph reads the length from its input, adds to it, and
  returns it, and one program serves every step. Where the class *branches* on the length (`StaticSlidingWindowLayer`,
  or the mask sizes of a `DynamicSlidingWindowLayer` past its window), tracing stops with torch's data-dependent error
  rather than keep the branch of the example;
* anything else (fake tensors before tracing, None, strings) is held as it is and given back as it is.

A child that is an int was the alternative. torch.export bakes it in as a constant, so the program runs at one length
only, unless every user marks it dynamic; and `tree_map(torch.clone, cache)` breaks on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from . import _torch_private


@dataclass(frozen=True)
class Held:
    """What stands for a counter (or a tensor) and has no value of that kind; arithmetic on it is a TypeError."""

    leaf: Any
    counter: bool = True


def is_counter(value: Any) -> bool:
    """Whether an attribute named as a counter is one here: some classes keep a tensor under the same name."""
    if isinstance(value, Held):
        return value.counter
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def to_leaf(value: int | torch.SymInt | Held) -> Any:
    """The pytree child of a counter."""
    if isinstance(value, Held):
        return value.leaf
    return torch.scalar_tensor(value, dtype=torch.int64, device="cpu")  # type: ignore[arg-type]


def from_leaf(leaf: Any) -> Any:
    """The counter of a pytree child: an int, a symbol while tracing, or `Held`."""
    if _torch_private.is_plain(leaf):
        return int(leaf)
    if _torch_private.is_traced(leaf):
        return leaf.item()
    return Held(leaf)
