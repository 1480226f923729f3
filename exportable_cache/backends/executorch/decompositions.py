"""Operators spelled out before lowering, because a kernel of the runtime computes them otherwise than torch does."""

from __future__ import annotations

import functools
from math import pi, sqrt
from typing import TYPE_CHECKING

import torch

from .graph_edits import insert_call, replace_call

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Graph, Node

_ATEN = torch.ops.aten


def spell_out_gelus(program: ExportedProgram) -> ExportedProgram:
    """Write each `gelu(x, approximate="tanh")` in elementary operators, in place; other forms are left alone.

    ExecuTorch 1.4.1's XNNPACK delegate drops `approximate` and evaluates the exact form: up to 4.7e-4 off per element,
    which Gemma 2 and 3 carry into their logits.
    """
    gelus = program.graph.find_nodes(op="call_function", target=_ATEN.gelu.default)
    approximate = [node for node in gelus if node.kwargs.get("approximate") == "tanh"]
    for node in approximate:
        with program.graph.inserting_before(node):
            replace_call(node, _tanh_gelu(program.graph, node.args[0]))
    if approximate:
        program.graph_module.recompile()
    return program


def _tanh_gelu(graph: Graph, x: Node) -> Node:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    call = functools.partial(insert_call, graph)
    multiply, add = _ATEN.mul.Tensor, _ATEN.add.Tensor
    cube = call(multiply, call(multiply, call(multiply, x, 0.044715), x), x)
    tanh = call(_ATEN.tanh.default, call(multiply, call(add, cube, x), sqrt(2.0 / pi)))
    return call(multiply, call(add, tanh, 1.0), call(multiply, x, 0.5))
