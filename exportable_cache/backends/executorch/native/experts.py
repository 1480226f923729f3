"""Native operators for the experts of mixtures, and how their weights are packed.

`exportable_cache::experts_4bit` and, for float weights, `experts_float`, `experts_bfloat16`, `experts_float16` are the
linear operators of `linears.py` over the weights of all experts. A step reads only those of the chosen experts. Each
expert's weights are packed like a layer's, one after the other. `kernels/src/experts.h` reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from executorch.backends.transforms.utils import get_param_tensor, is_param

from ....common.tensors import exact_dtype
from ....errors import UnsupportedModelError
from ....models.experts import EXPERT_LINEAR, by_expert
from ..graph_edits import insert_call, packed_weight, replace_call
from .linears import NAMES, define_operator, linear_4bit, linear_float, pack, pack_float

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node

    from ....common.fs.tensor_files import Scratch

_EXPERTS = "(Tensor source, Tensor weights, Tensor? bias, Tensor indices, Tensor? factors, int outputs"


def pack_experts(count: int, pack_one: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Pack the weights of all experts one at a time, because packing takes several times the memory of its result.

    Args:
        count: Number of experts.
        pack_one: Returns the packed weights of an expert, given its index.
    """
    first = pack_one(0)
    packed = first.new_empty(count, *first.shape)
    for expert in range(count):
        packed[expert] = pack_one(expert) if expert else first
    return packed


def experts_to_native(program: ExportedProgram, scratch: Scratch | None = None) -> ExportedProgram:
    """Rewrite each linear layer of experts as a native operator, in place.

    Args:
        program: Program to rewrite.
        scratch: See `packed_weight`.

    Raises:
        UnsupportedModelError: If the weights of experts are computed in the program.
    """
    graph = program.graph
    layers = graph.find_nodes(op="call_function", target=EXPERT_LINEAR)
    for node in layers:
        with graph.inserting_before(node):
            call = _inserted(program, node, scratch)
        call.meta = {**node.meta, "val": call.meta["val"]}
        replace_call(node, call)
    if layers:
        graph.eliminate_dead_code()
        program.graph_module.recompile()
    return program


def _inserted(program: ExportedProgram, node: Node, scratch: Scratch | None) -> Node:
    arguments: tuple[Any, ...] = node.args
    source, weight, scale, bias, indices, factors, transposed, *rounds = arguments
    if scale is not None and False in rounds:
        raise UnsupportedModelError(
            "native operators must have experts in 8da4w, got weights that are quantised alone; export with "
            "quantize='8da4w'"
        )
    if not is_param(program, weight):
        raise UnsupportedModelError(
            f"weights of experts must be parameters of the model, got {weight.name}, which the program computes; pass "
            "linears='delegate'"
        )
    numbers = get_param_tensor(program, weight).detach()
    if scale is not None:
        scales = get_param_tensor(program, scale).detach()
        name, outputs = "4bit", numbers.shape[1]

        def pack_one(expert: int) -> torch.Tensor:
            return pack(numbers[expert], scales[expert])

    else:
        rows = numbers.transpose(1, 2) if transposed else numbers
        dtype = exact_dtype(numbers)
        name, outputs = NAMES[dtype], rows.shape[1]

        def pack_one(expert: int) -> torch.Tensor:
            return pack_float(rows[expert], dtype)

    packed = packed_weight(program, weight, lambda: pack_experts(len(numbers), pack_one), scratch)
    operator = getattr(torch.ops.exportable_cache, f"experts_{name}").default
    return insert_call(program.graph, operator, source, packed, bias, indices, factors, outputs)


def _plain(linear: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a layer of experts in plain operators, as the kernel computes it, from the layer of one expert."""

    def experts(
        source: torch.Tensor,
        weights: torch.Tensor,
        bias: torch.Tensor | None,
        indices: torch.Tensor,
        factors: torch.Tensor | None,
        outputs: int,
    ) -> torch.Tensor:
        def layer(expert: int, rows: torch.Tensor) -> torch.Tensor:
            return linear(rows, weights[expert], None if bias is None else bias[expert], outputs)

        return by_expert(source, indices, factors, outputs, layer)

    return experts


def _output(
    source: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor | None,
    indices: torch.Tensor,
    factors: torch.Tensor | None,
    outputs: int,
) -> torch.Tensor:
    return source.new_empty(*(indices.shape if factors is None else indices.shape[:1]), outputs)


for _name in NAMES.values():
    define_operator(f"experts_{_name}", _EXPERTS, _plain(linear_float), _output)
define_operator("experts_4bit", _EXPERTS, _plain(linear_4bit), _output)
