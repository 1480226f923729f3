"""Products with a part of a weight as products with a weight of its own.

Attention over latents multiplies queries by one part of the expansion of keys and values, and what comes out by the
other (`own_kernel.OwnLatentKernel`). Left as slices of one weight, both would be copied out of it in every step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from executorch.backends.transforms.utils import delete_constant_placeholder

from .graph_edits import add_weight

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node

_PRODUCT = torch.ops.aten.bmm.default
#: What gives a part of a tensor, or the same in another order.
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.slice.Tensor, torch.ops.aten.transpose.int)


def parts_to_weights(program: ExportedProgram) -> ExportedProgram:
    """Rewrite each `bmm` whose second operand is a view of a weight, in place."""
    graph, parameters = program.graph, program.graph_signature.inputs_to_parameters
    replaced = False
    for node in graph.find_nodes(op="call_function", target=_PRODUCT):
        part = node.all_input_nodes[-1]
        views = _views(part)
        if not views or views[0].all_input_nodes[0].name not in parameters:
            continue
        value = program.state_dict[parameters[views[0].all_input_nodes[0].name]].detach()
        for view in views:
            operator: Any = view.target
            value = operator(value, *view.args[1:], **view.kwargs)
        node.replace_input_with(part, add_weight(program, f"{node.name}_weight", value.contiguous()))
        replaced = True
    if replaced:
        graph.eliminate_dead_code()
        for node in graph.find_nodes(op="placeholder"):
            if not node.users and node.name in parameters:
                delete_constant_placeholder(program, node)
        program.graph_module.recompile()
    return program


def _views(node: Node) -> list[Node]:
    """The views that lead to a node, from what they are of on; their sizes are numbers."""
    views: list[Node] = []
    while node.op == "call_function" and node.target in _VIEWS and len(node.all_input_nodes) == 1:
        views.insert(0, node)
        node = node.all_input_nodes[0]
    return views
