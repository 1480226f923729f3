"""Quantised embedding tables through ExecuTorch's own kernels, which read the rows asked for.

A quantised model exports as `dequantize_affine(integers, ...)` in front of a plain operator. XNNPACK takes the linear
layers; a table that is left so would be dequantised whole, for every token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import executorch.kernels.quantized  # noqa: F401  registers their kernels, here and in the runtime
import torch
from executorch.backends.transforms.utils import get_param_tensor
from torch.fx import Node

from ....common.compat.executorch import register_quantized_operators
from ..passes.graph_edits import add_constant, replace_call

if TYPE_CHECKING:
    from torch.export import ExportedProgram

register_quantized_operators()

_INT4 = (-8, 7)


def fuse_quantized_embeddings(program: ExportedProgram) -> ExportedProgram:
    """Rewrite each lookup in a dequantised table as one operator on the integers, in place; other programs are left as
    they are.

    Tables are symmetric (no zero points), one scale per row or per group of a row.
    """
    graph = program.graph
    lookups = [
        node for node in graph.nodes if node.target == torch.ops.aten.embedding.default and _is_dequantize(node.args[0])
    ]
    for node in lookups:
        (integers, _, scale, zero_point, _, *limits), indices = node.args[0].args[:7], node.args[1]
        if zero_point is not None and bool(get_param_tensor(program, zero_point).any()):
            raise ValueError(f"{integers.name} has zero points; quantise it symmetrically")
        operator = torch.ops.quantized_decomposed.embedding_byte.default
        if tuple(limits) == _INT4:
            operator = torch.ops.quantized_decomposed.embedding_4bit.default
            packed = pack_int4(get_param_tensor(program, integers))
            integers = add_constant(program, f"{integers.name}_packed", packed, persistent=True)
        with graph.inserting_before(node):
            fused = graph.call_function(operator, (integers, scale, None, *limits, indices))
        fused.meta = dict(node.meta)
        replace_call(node, fused)
    if lookups:
        graph.eliminate_dead_code()
        program.graph_module.recompile()
    return program


def pack_int4(integers: torch.Tensor) -> torch.Tensor:
    """Two values of -8 to 7 per byte, the first in the high half, as `embedding_4bit` reads them.

    Args:
        integers: int8 [rows, dim], dim even.

    Returns:
        uint8 [rows, dim // 2].
    """
    shifted = (integers + 8).to(torch.uint8)
    return (shifted[:, 0::2] << 4) | shifted[:, 1::2]


def _is_dequantize(node: object) -> bool:
    return isinstance(node, Node) and node.target == torch.ops.torchao.dequantize_affine.default
