"""Means over the last dimension as products with a constant, so that RMSNorm stays inside the XNNPACK delegate.

XNNPACK takes no mean over one dimension. Left as it is, every RMSNorm cuts the graph in two around a portable kernel.
"""

from __future__ import annotations

import torch
from executorch.backends.transforms.utils import create_constant_placeholder
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node


def means_to_linear(program: ExportedProgram) -> ExportedProgram:
    """Rewrite each float32 `mean(x, -1, keepdim=True)` of a static size n as `linear(x, full([1, n], 1 / n))`, in place."""
    graph = program.graph
    inputs = next(iter(graph.nodes))
    for node in [node for node in graph.nodes if _is_mean_over_last(node)]:
        size = node.args[0].meta["val"].shape[-1]
        with graph.inserting_before(inputs):
            weight = create_constant_placeholder(
                program, graph, f"mean_over_{size}", InputKind.PARAMETER, torch.full((1, size), 1.0 / size)
            )
        with graph.inserting_before(node):
            linear = graph.call_function(torch.ops.aten.linear.default, (node.args[0], weight))
        linear.meta = dict(node.meta)
        node.replace_all_uses_with(linear)
        graph.erase_node(node)
    program.graph_module.recompile()
    return program


def _is_mean_over_last(node: Node) -> bool:
    if node.target is not torch.ops.aten.mean.dim or "dtype" in node.kwargs or len(node.args) != 3:
        return False
    (_, dims, keepdim), value = node.args, node.args[0].meta["val"]
    return (
        bool(keepdim)
        and value.dtype == torch.float32
        and value.dim() > 1
        and list(dims) in ([-1], [value.dim() - 1])
        and isinstance(value.shape[-1], int)
    )
