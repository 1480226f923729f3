"""Branches between the forms of attention, put into a lowered program in place of the operator that stands for them."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from executorch.exir import to_edge
from executorch.exir.pass_base import ExportPass
from torch.export import Dim

from ...common.compat.executorch import edge_config, operator_of
from ...common.compat.torch import without_modes
from .attention_forms import forms_of, least_single
from .graph_edits import forget_histories

if TYPE_CHECKING:
    from executorch.exir.pass_base import NodeMetadata, ProxyValue
    from torch.fx import GraphModule

_OPERATOR = torch.ops.exportable_cache.fused_attention.default


class AttentionBranches(ExportPass):
    """Replace each `exportable_cache::fused_attention` by `torch.cond` over its forms.

    The forms are lowered once for all layers of one kind and shape. They hold operators alone, nothing that a delegate
    would have to pack twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lowered: dict[tuple, tuple[GraphModule, GraphModule]] = {}

    def call_operator(self, op: Any, args: tuple, kwargs: dict[str, Any], meta: NodeMetadata) -> ProxyValue:
        if not is_choice(op):
            return super().call_operator(op, args, kwargs, meta)
        operands, single, kind, fold, capacity, scaling = args
        tensors = [operand.data for operand in operands]
        key = (kind, fold, capacity, scaling, *(str(tuple(tensor.shape)) for tensor in tensors))
        if key not in self._lowered:
            # A pass runs under the fake mode of its program, a trace makes its own.
            with without_modes():
                self._lowered[key] = tuple(
                    _lowered_form(form, tensors) for form in forms_of(kind, fold, capacity, scaling)
                )
        one, several = (_with_inputs(form, tensors) for form in self._lowered[key])
        is_single = self.call_sym(operator.ge, (single, least_single(fold)), meta)
        return self.call_cond(is_single, one, several, list(operands), meta)


def is_choice(target: Any) -> bool:
    """Whether a node calls the operator that stands for branches."""
    # The edge dialect wraps operators.
    return operator_of(target) is _OPERATOR


def _lowered_form(form: Callable[..., tuple[torch.Tensor, ...]], operands: Sequence[torch.Tensor]) -> GraphModule:
    """A form in the operators of ExecuTorch's edge dialect, for operands of these shapes, symbolic sizes left open."""
    examples = tuple(torch.empty([_example(size) for size in tensor.shape], dtype=tensor.dtype) for tensor in operands)
    sizes = tuple(
        {index: Dim.AUTO for index, size in enumerate(tensor.shape) if isinstance(size, torch.SymInt)}
        for tensor in operands
    )
    program = torch.export.export(_Module(form), examples, dynamic_shapes={"operands": sizes})
    config = edge_config(skip_dim_order=True)
    graph_module = to_edge(program, compile_config=config).exported_program().graph_module
    forget_histories(graph_module)
    return graph_module


def _example(size: int | torch.SymInt) -> int:
    return size.node.hint if isinstance(size, torch.SymInt) else size


class _Module(torch.nn.Module):
    def __init__(self, form: Callable[..., tuple[torch.Tensor, ...]]) -> None:
        super().__init__()
        self.form = form

    def forward(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.form(*operands)


def _with_inputs(form: GraphModule, operands: Sequence[torch.Tensor]) -> GraphModule:
    """A copy of a form whose inputs are known as these tensors, of the program that it is put into."""
    form = copy.deepcopy(form)
    for placeholder, operand in zip(form.graph.find_nodes(op="placeholder"), operands, strict=True):
        placeholder.meta["val"] = operand
    return form
