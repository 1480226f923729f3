"""The same values written wherever a mask holds, as a choice between two tensors.

ExecuTorch 1.4.1's `index_put_` takes no mask over several dimensions (error 0x12: Kimi K2.5 clears the ids of its
pictures so, and T5Gemma 2 sets the embedding of its end of pictures), and ends the process where it writes a scalar
past dimensions that it leaves whole (Chameleon's logits of picture tokens).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .graph_edits import add_constant, constant_of, insert_call, replace_call

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node

_WRITES = {torch.ops.aten.index_put.default: False, torch.ops.aten.index_put_.default: True}


def masked_writes_to_where(program: ExportedProgram) -> ExportedProgram:
    """Rewrite each `x[mask] = value` and `x[..., constant indices] = value` as `where`, in place.

    The value is one number, or one tensor for every place, as large as the dimensions behind those of the index.
    """
    graph = program.graph
    for node in [node for node in graph.nodes if node.target in _WRITES]:
        target, indices, value, *accumulate = node.args
        index = indices[-1]
        if any(accumulate) or index is None or any(other is not None for other in indices[:-1]):
            continue
        # A mask takes as many dimensions as it has, indices take one.
        taken = index.meta["val"].dim() if index.meta["val"].dtype == torch.bool else 1
        behind = target.meta["val"].dim() - (len(indices) - 1) - taken
        if value.meta["val"].numel() != 1 and value.meta["val"].dim() > behind:
            continue
        mask = _mask_of(program, node)
        if mask is None:
            continue
        with graph.inserting_before(node):
            for _ in range(behind):
                mask = insert_call(graph, torch.ops.aten.unsqueeze.default, mask, -1)
            result = insert_call(graph, torch.ops.aten.where.self, mask, value, target)
            if _WRITES[node.target]:
                result = insert_call(graph, torch.ops.aten.copy_.default, target, result)
        replace_call(node, result)
    program.graph_module.recompile()
    return program


def _mask_of(program: ExportedProgram, node: Node) -> Node | None:
    """Where a write with one index lands, bool over the dimensions that the index takes; None for indices that are no
    constants.
    """
    target, indices = node.args[:2]
    index, size = indices[-1], target.meta["val"].shape[len(indices) - 1]
    if index.meta["val"].dtype == torch.bool:
        return index
    chosen = constant_of(program, index)
    if chosen is None or not isinstance(size, int):
        return None
    mask = torch.zeros(size, dtype=torch.bool)
    mask[chosen] = True
    return add_constant(program, f"{node.name}_mask", mask)
