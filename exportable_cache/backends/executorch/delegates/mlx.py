"""The delegate MLX, for GPUs of Macs and iPhones.

The compiler is in every wheel of ExecuTorch. Each method has its own state in the runtime, so programs have one method.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from executorch.backends.transforms.utils import get_param_tensor

from ....common.compat.executorch import prepare_mlx_schema
from ....models.experts import EXPERT_LINEAR
from ..graph_edits import insert_call, packed_weight, replace_call
from .passes import (
    bits_of,
    choices_to_comparisons,
    combine_choices,
    empties_to_zeros,
    floor_divisions_to_floors,
    keep_state_outside,
    maxima_to_parts,
    numbers_to_tensors,
    slices_to_bounds,
    sums_to_dtypes,
    tables_to_selections,
)
from .table import DELEGATES

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node

aten = torch.ops.aten
_LARGEST_GROUP = max(DELEGATES["mlx"].groups)


def partitioner() -> Any:
    """Return the partitioner of the delegate."""
    prepare_mlx_schema()
    from executorch.backends.mlx.partitioner import MLXPartitioner

    # It reports each partition at level INFO, through a handler of its own.
    logging.getLogger("executorch.backends.mlx").setLevel(logging.WARNING)

    class Partitioner(MLXPartitioner):
        """A partitioner that leaves state outside if several partitions use it."""

        def partition(self, edge_program: ExportedProgram) -> Any:
            result = super().partition(edge_program)
            keep_state_outside(edge_program, only_split=True)
            return result

    return Partitioner()


def rewrites() -> tuple[Callable[[ExportedProgram], ExportedProgram], ...]:
    """Return passes over exported programs."""
    return (
        experts_to_gathers,
        choices_to_comparisons,
        slices_to_bounds,
        sums_to_dtypes,
        maxima_to_parts,
        tables_to_selections,
        floor_divisions_to_floors,
    )


def passes() -> list[Any]:
    """Return passes over edge programs, before they are partitioned."""
    prepare_mlx_schema()
    from executorch.backends.mlx.passes import get_default_passes

    return [numbers_to_tensors, empties_to_zeros, *get_default_passes()]


def experts_to_gathers(program: ExportedProgram) -> ExportedProgram:
    """Compute linear layers of quantized experts by products with the chosen weights, which stay integers, in place."""
    graph = program.graph
    layers = graph.find_nodes(op="call_function", target=EXPERT_LINEAR)
    if layers:
        prepare_mlx_schema()
        # It registers `torch.ops.mlx`.
        import executorch.backends.mlx.custom_ops  # noqa: F401
    for node in layers:
        with graph.inserting_before(node):
            replace_call(node, _gathered(program, node))
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program


def _gathered(program: ExportedProgram, node: Node) -> Node:
    arguments: tuple[Any, ...] = node.args
    source, weight, scale, bias, indices, factors = arguments[:6]
    graph, row = program.graph, weight.meta["val"].shape[2]
    integers, scales = (get_param_tensor(program, one).detach() for one in (weight, scale))
    size = row // scales.shape[2]
    group = gcd(size, _LARGEST_GROUP)
    if group != size:
        scale = packed_weight(program, scale, lambda: scales.repeat_interleave(size // group, dim=2))
    # Of [tokens, inputs] or [tokens, choices, inputs], one row for each choice.
    rows = insert_call(graph, aten.unsqueeze.default, source, -2)
    if source.meta["val"].dim() == 2:
        rows = insert_call(graph, aten.unsqueeze.default, rows, 1)
    options = (indices, None, True, group, bits_of(integers), "affine", False)
    results = insert_call(graph, torch.ops.mlx.gather_qmm.default, rows, weight, scale, None, *options)
    results = insert_call(graph, aten.squeeze.dim, results, -2)
    return combine_choices(graph, results, bias, indices, factors)
