"""What vision encoders, and Gemma 3n, compute with operators that the ExecuTorch runtime has no
kernel for, in others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...errors import UnsupportedModelError
from .graph_edits import add_constant, add_weight, constant_of, insert_call, replace_call

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node

_WITHOUT_KERNEL = (torch.ops.aten.argsort.default, torch.ops.aten.bucketize.Tensor, torch.ops.aten.erfinv.default)


def patches_to_linear(program: ExportedProgram) -> ExportedProgram:
    """Rewrite each 3-D convolution over one patch, as large as its kernel, as a linear layer over its values, in place.

    So Qwen2-VL and its relatives embed patches that the processor has cut out already. ExecuTorch 1.4.1 knows
    convolutions of one and two dimensions.

    Raises:
        UnsupportedModelError: If there is a 3-D convolution over more than that.
    """
    graph = program.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.conv3d.default):
        patches, weight, bias = (*node.args, None)[:3]
        values = program.state_dict.get(program.graph_signature.inputs_to_parameters.get(weight.name))
        if values is None or not _is_over_one_patch(node):
            raise UnsupportedModelError(
                f"the ExecuTorch runtime has no kernel for a 3-D convolution of {list(patches.meta['val'].shape)} by "
                f"{list(weight.meta['val'].shape)}; export for target 'pt2', or without modalities"
            )
        # Shares the memory of the other: a product in the graph would be no constant to the delegate.
        flat = add_weight(program, f"{weight.name}_flat", values.detach().flatten(1))
        with graph.inserting_before(node):
            rows = insert_call(graph, torch.ops.aten.flatten.using_ints, patches, 1)
            product = insert_call(graph, torch.ops.aten.linear.default, rows, flat, bias)
            embedded = insert_call(graph, torch.ops.aten.view.default, product, list(node.meta["val"].shape))
        replace_call(node, embedded)
    program.graph_module.recompile()
    return program


def fold_constants(program: ExportedProgram) -> ExportedProgram:
    """Replace `argsort`, `bucketize` and `erfinv` of what depends on no input by their values, in place.

    Qwen2.5-VL undoes the order of its windows with the first, SmolVLM numbers its patches with the second, Gemma 3n
    finds the threshold of a sparse activation with the third. ExecuTorch 1.4.1 has kernels for none.
    """
    for node in [node for node in program.graph.nodes if node.target in _WITHOUT_KERNEL]:
        value = constant_of(program, node)
        if value is not None:
            replace_call(node, add_constant(program, f"{node.name}_value", value))
    program.graph_module.recompile()
    return program


def _is_over_one_patch(node: Node) -> bool:
    """Of a call of conv3d(input, weight, bias, stride, padding, dilation, groups): the kernel has one place."""
    _, _, _, _, padding, _, groups = (*node.args, *(None, 1, 0, 1, 1)[len(node.args) - 2 :])
    patches, weight = (argument.meta["val"] for argument in node.args[:2])
    return patches.shape[2:] == weight.shape[2:] and groups == 1 and padding in (0, [0], [0, 0, 0])
