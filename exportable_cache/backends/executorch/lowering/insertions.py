"""Replace placeholder operators at the end of a lowering, and insert branches between forms of attention."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from executorch.exir import to_edge
from executorch.exir.pass_base import ExportPass, NodeMetadata
from torch.export import Dim
from torch.fx.node import map_arg

from ....common.compat.executorch import call_delegate_operator, edge_config, operator_of
from ....common.compat.torch import OpOverload, without_modes
from ..attention.forms import Form, forms_of, least_single
from ..dedup.cloned_delegates import with_known_shapes
from ..dedup.segment_calls import is_segment
from ..graph_edits import forget_histories

if TYPE_CHECKING:
    from executorch.exir import EdgeProgramManager
    from executorch.exir.lowered_backend_module import LoweredBackendModule
    from executorch.exir.pass_base import ProxyValue
    from torch.fx import GraphModule, Node

    from ..dedup.segment_calls import StampedSegments


_OPERATOR = torch.ops.exportable_cache.fused_attention.default


class AttentionBranches(ExportPass):
    """Replace each `exportable_cache::fused_attention` by `torch.cond` over its forms.

    The forms are lowered once for all layers of one kind and shape, of all programs of a process. They hold operators
    alone, nothing that a delegate would have to pack twice.
    """

    def call_operator(self, op: Any, args: tuple, kwargs: dict[str, Any], meta: NodeMetadata) -> ProxyValue:
        if not is_choice(op):
            return super().call_operator(op, args, kwargs, meta)
        operands, single, kind, fold, capacity, scaling = args
        tensors = [operand.data for operand in operands]
        # A pass runs under the fake mode of its program, a trace makes its own.
        with without_modes():
            lowered = _lowered_forms(kind, fold, capacity, scaling, tuple(map(_example_of, tensors)))
        one, several = (_with_inputs(form, tensors) for form in lowered)
        is_single = self.call_sym(operator.ge, (single, least_single(fold)), meta)
        return self.call_cond(is_single, one, several, list(operands), meta)


def is_choice(target: Any) -> bool:
    """Whether a node calls the operator that stands for branches."""
    # The edge dialect wraps operators.
    return operator_of(target) is _OPERATOR


#: What a trace sees of a tensor: its dtype, its sizes, and which of them may differ.
_Example = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]


def _example_of(tensor: torch.Tensor) -> _Example:
    sizes = tuple(size.node.hint if isinstance(size, torch.SymInt) else size for size in tensor.shape)
    return (
        tensor.dtype,
        sizes,
        tuple(index for index, size in enumerate(tensor.shape) if isinstance(size, torch.SymInt)),
    )


# A process that exports many small models spends a quarter of its time here otherwise.
@functools.lru_cache(maxsize=64)
def _lowered_forms(
    kind: str, fold: int, capacity: int, scaling: float, examples: tuple[_Example, ...]
) -> tuple[GraphModule, ...]:
    """The forms in the operators of ExecuTorch's edge dialect, for operands of these shapes."""
    return tuple(_lowered_form(form, examples) for form in forms_of(kind, fold, capacity, scaling))


def _lowered_form(form: Form, examples: tuple[_Example, ...]) -> GraphModule:
    tensors = tuple(torch.empty(sizes, dtype=dtype) for dtype, sizes, _ in examples)
    open_sizes = tuple(dict.fromkeys(symbolic, Dim.AUTO) for _, _, symbolic in examples)
    program = torch.export.export(_Module(form), tensors, dynamic_shapes={"operands": open_sizes})
    config = edge_config(skip_dim_order=True)
    graph_module = to_edge(program, compile_config=config).exported_program().graph_module
    forget_histories(graph_module)
    return graph_module


class _Module(torch.nn.Module):
    def __init__(self, form: Form) -> None:
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


def insert_what_was_taken(edge: EdgeProgramManager, segments: StampedSegments) -> EdgeProgramManager:
    """Branches between forms of attention, and repeated segments; other programs are left as they are."""
    targets = [node.target for name in edge.methods for node in edge.exported_program(name).graph.nodes]
    if not any(is_choice(target) or is_segment(target) for target in targets):
        return edge
    return edge.transform([_Insertions(segments)])


class _SegmentBodies(ExportPass):
    """Replace each `exportable_cache::segment` by its lowered body, with its own delegates."""

    def __init__(self, segments: StampedSegments) -> None:
        super().__init__()
        self._segments = segments

    def call_operator(self, op: Any, args: tuple, kwargs: dict[str, Any], meta: NodeMetadata) -> Any:
        if not is_segment(op):
            return super().call_operator(op, args, kwargs, meta)
        inputs, tensors, name, _ = args
        template, delegates = self._segments.called(name)
        given = iter((*tensors, *inputs))
        values: dict[Node, Any] = {}
        for node in template.graph_module.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                values[node] = delegates[node.target]
            elif node.op == "call_function":
                arguments, keywords = map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = self._call(node.target, arguments, keywords, NodeMetadata(node.meta))
        results: Any = template.graph_module.graph.output_node().args[0]
        return [values[result] for result in results]

    def _call(self, target: Any, args: tuple, kwargs: dict[str, Any], meta: NodeMetadata) -> Any:
        if target is operator.getitem:
            value, key = args
            return self.call_getitem(value, key, meta)
        if target is call_delegate_operator():
            return self.call_delegate(args[0], args[1:], kwargs, meta)
        # Those of the edge dialect wrap others, and are none themselves.
        if isinstance(operator_of(target), OpOverload):
            return self.call_operator(target, args, kwargs, meta)
        return self.call_sym(target, args, meta)

    def call_getitem(self, value: Any, key: int, meta: NodeMetadata) -> ProxyValue:
        # Of a segment's results, which are those of several operators.
        return value[key] if isinstance(value, list) else super().call_getitem(value, key, meta)

    def call_delegate(
        self, lowered_module: LoweredBackendModule, args: tuple, kwargs: dict[str, Any], meta: NodeMetadata
    ) -> ProxyValue:
        return super().call_delegate(with_known_shapes(lowered_module), args, kwargs, meta)


class _Insertions(_SegmentBodies, AttentionBranches):
    """Both at once: a pass works out every operator of a program again."""

    def __init__(self, segments: StampedSegments) -> None:
        AttentionBranches.__init__(self)
        self._segments = segments
