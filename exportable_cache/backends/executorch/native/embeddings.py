"""Tables of embeddings whose numbers bfloat16 or float16 has without loss, as those of a checkpoint that is stored so.

One that the head is tied to is kept as the head's operator reads it, once, and looked up there by
`exportable_cache::embedding_bfloat16` or `embedding_float16`; see `native/linears.py`. Any other is kept in 16 bits,
and its rows are made float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from executorch.backends.transforms.utils import get_param_tensor, is_param

from ....common.tensors import exact_dtype
from ..passes.graph_edits import insert_call, packed_weight, replace_call
from .linears import is_own
from .weights import NAMES, pack_float, unpack_float

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node

_LOOKUP = torch.ops.aten.embedding.default
_EMBEDDING = "(Tensor weights, Tensor tokens, int rows, int dim"

_library = torch.library.Library("exportable_cache", "FRAGMENT")


def tables_to_own(program: ExportedProgram) -> ExportedProgram:
    """Rewrite each lookup in such a table, in place; others are left as they are. To be called before the linear layers
    are rewritten.
    """
    graph = program.graph
    for node in graph.find_nodes(op="call_function", target=_LOOKUP):
        table, tokens = _arguments(node)
        if not is_param(program, table) or table.meta["val"].dtype != torch.float32:
            continue
        layers = [user for user in table.users if user.target is not _LOOKUP]
        if tokens.meta["val"].dtype != torch.int64 or not all(is_own(program, layer) for layer in layers):
            continue
        numbers = get_param_tensor(program, table)
        dtype = exact_dtype(numbers)
        if dtype != torch.float32:
            replace_call(node, _looked_up(program, node, numbers.to(dtype), bool(layers)))
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program


def _arguments(lookup: Node) -> tuple[Node, Node]:
    """The table and the tokens."""
    found: Any = lookup.args
    return found[0], found[1]


def _looked_up(program: ExportedProgram, node: Node, numbers: torch.Tensor, is_tied: bool) -> Node:
    """A lookup in the table's numbers, which are of the type that it is kept in."""
    table, tokens = _arguments(node)
    if is_tied:
        table = packed_weight(program, table, lambda: pack_float(numbers, numbers.dtype))
        with program.graph.inserting_before(node):
            operator = getattr(torch.ops.exportable_cache, f"embedding_{NAMES[numbers.dtype]}").default
            result = insert_call(program.graph, operator, table, tokens, *numbers.shape)
    else:
        table = packed_weight(program, table, numbers.detach)
        with program.graph.inserting_before(node):
            rows = insert_call(program.graph, _LOOKUP, table, tokens)
            result = insert_call(program.graph, torch.ops.aten.to.dtype, rows, torch.float32)
    result.meta = {**node.meta, "val": result.meta["val"]}
    return result


def embedding(weights: torch.Tensor, tokens: torch.Tensor, rows: int, dim: int) -> torch.Tensor:
    """Rows of a table, in plain operators: what the kernels compute.

    Args:
        weights: bfloat16 or float16, of `pack_float`.
        tokens: int64 [...], of 0 to rows - 1.
        rows: How many there are.
        dim: A row's numbers.

    Returns:
        float32 [..., dim].
    """
    return unpack_float(weights, dim, rows)[tokens]


def _into(weights: torch.Tensor, tokens: torch.Tensor, rows: int, dim: int, *, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(embedding(weights, tokens, rows, dim))


def _output(weights: torch.Tensor, tokens: torch.Tensor, rows: int, dim: int) -> torch.Tensor:
    return weights.new_empty(*tokens.shape, dim, dtype=torch.float32)


for _name in ("embedding_bfloat16", "embedding_float16"):
    # ExecuTorch calls those that are named out.
    for _schema, _function in (
        (f"{_name}{_EMBEDDING}) -> Tensor", embedding),
        (f"{_name}.out{_EMBEDDING}, *, Tensor(a!) out) -> Tensor(a!)", _into),
    ):
        _library.define(_schema)
        _library.impl(_schema[: _schema.index("(")], _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"exportable_cache::{_name}", _output, lib=_library)
