"""The halves that rotary embeddings swap as a product with a constant, so that the rotation stays inside the XNNPACK delegate.

XNNPACK takes no slices of a tensor of dynamic length. Left as it is, the rotation leaves the delegate in every layer, between the
projections and the attention: for four slices, of a few numbers each where one token is fed.
"""

from __future__ import annotations

import torch
from executorch.backends.transforms.utils import create_constant_placeholder
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node


def rotations_to_linear(program: ExportedProgram) -> ExportedProgram:
    """Rewrite each float32 `cat([-x[..., n:], x[..., :n]], -1)` of a static size 2 n as `linear(x, rotation(n))`, in place.

    The result is the same to the bit for finite numbers: every sum has one term that is not zero.
    """
    graph = program.graph
    inputs = next(iter(graph.nodes))
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default):
        rotated = _rotated(node)
        if rotated is None:
            continue
        half = rotated.meta["val"].shape[-1] // 2
        with graph.inserting_before(inputs):
            weight = create_constant_placeholder(
                program, graph, f"rotation_of_{2 * half}", InputKind.PARAMETER, rotation(half)
            )
        with graph.inserting_before(node):
            linear = graph.call_function(torch.ops.aten.linear.default, (rotated, weight))
        linear.meta = dict(node.meta)
        node.replace_all_uses_with(linear)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program


def rotation(half: int) -> torch.Tensor:
    """The matrix R float32 [2 half, 2 half] with `x @ R.T == cat([-x[half:], x[:half]])`."""
    matrix = torch.zeros(2 * half, 2 * half)
    indices = torch.arange(half)
    matrix[indices, half + indices] = -1.0
    matrix[half + indices, indices] = 1.0
    return matrix


def _rotated(node: Node) -> Node | None:
    """The tensor whose halves a concatenation swaps, None if it does something else."""
    parts, value = node.args[0], node.meta["val"]
    if value.dtype != torch.float32 or len(parts) != 2 or not isinstance(value.shape[-1], int):
        return None
    last, half = value.dim() - 1, value.shape[-1] // 2
    if len(node.args) < 2 or node.args[1] not in (-1, last) or parts[0].target != torch.ops.aten.neg.default:
        return None
    second, first = parts[0].args[0], parts[1]
    if first.target != torch.ops.aten.slice.Tensor or second.target != torch.ops.aten.slice.Tensor:
        return None
    source = first.args[0]
    whole = source is second.args[0] and source.meta["val"].shape[-1] == 2 * half and first.args[1] in (-1, last) and second.args[1] in (-1, last)
    if not whole or first.args[2:] != (0, half) or second.args[2] != half or second.args[3] < 2 * half or len(second.args) > 4:
        return None
    return source
