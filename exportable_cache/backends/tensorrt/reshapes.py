"""Reshapes whose sizes were traced, written down as numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...common.compat.torch import RESHAPE_COPY

if TYPE_CHECKING:
    from torch.fx import GraphModule

_RESHAPES = (RESHAPE_COPY, torch.ops.aten.view.default, torch.ops.aten.reshape.default)


def state_sizes(graph: GraphModule) -> None:
    """Give every reshape to at most one unknown size the others as numbers and -1 for that one, in place.

    `view(batch, length, -1, head_dim)` leaves the number of heads to TensorRT, which divides it out of the other sizes.
    Behind some layers (the sum over experts) it does not see that two of these are one, and takes the number of heads
    for unknown, with which its attention layer cannot be made.
    """
    for node in graph.graph.nodes:
        # Passes of torch_tensorrt add nodes of which nothing was traced.
        if node.target in _RESHAPES and isinstance(node.meta.get("val"), torch.Tensor):
            sizes = node.meta["val"].shape
            if sum(not isinstance(size, int) for size in sizes) <= 1 and 0 not in sizes:
                stated = [size if isinstance(size, int) else -1 for size in sizes]
                node.args = (node.args[0], stated)
    graph.graph.eliminate_dead_code()
    graph.recompile()
