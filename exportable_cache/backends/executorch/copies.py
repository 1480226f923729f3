"""Copies that make nothing new: an exported `contiguous()` or `reshape()` of what an operator has just written.

XNNPACK's compiler removes them itself, by the first of 17 passes, each of which traces a partition again. A partition
without them needs one pass only: see `needed_passes`.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ...common.compat.executorch import operator_of
from .graph_edits import replace_call

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

_CLONE = torch.ops.aten.clone.default


class RemoveNeedlessCopies(PassBase):
    """Let the readers of such a copy read the original, where no one else does.

    With another reader the original may be a cache that is written in between, or a result of the program.
    """

    def call(self, graph_module: GraphModule) -> PassResult:
        graph = graph_module.graph
        copies = [node for node in graph.nodes if operator_of(node.target) is _CLONE and _is_needless(node)]
        for copy in copies:
            replace_call(copy, copy.all_input_nodes[0])
        if copies:
            graph_module.recompile()
        return PassResult(graph_module, bool(copies))


def _is_needless(copy: Node) -> bool:
    (original,) = copy.all_input_nodes
    # What a call with several results gives may be one of its operands.
    if original.op != "call_function" or original.target is operator.getitem or len(original.users) > 1:
        return False
    return all(node.meta["val"].is_contiguous() for node in (copy, original))
