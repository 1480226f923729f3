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
from ..dedup.delegates import is_segment, with_known_shapes
from ..graph_edits import drop_provenance

if TYPE_CHECKING:
    from executorch.exir import EdgeProgramManager
    from executorch.exir.lowered_backend_module import LoweredBackendModule
    from executorch.exir.pass_base import ProxyValue
    from torch.fx import GraphModule, Node

    from ..dedup.delegates import ClonedSegments


_OPERATOR = torch.ops.exportable_cache.fused_attention.default


class AttentionBranches(ExportPass):
    """Replace each `exportable_cache::fused_attention` by `torch.cond` over its forms.

    The forms are lowered once per process for all layers of one kind and shape. They hold operators only, and no
    weights that a delegate would pack twice.
    """

    def call_operator(self, op: Any, args: tuple, kwargs: dict[str, Any], meta: NodeMetadata) -> ProxyValue:
        """Replace one operator."""
        if not is_choice(op):
            return super().call_operator(op, args, kwargs, meta)
        operands, single, kind, fold, capacity, scaling = args
        tensors = [operand.data for operand in operands]
        # A pass runs under the fake mode of its program, but a trace makes another.
        with without_modes():
            lowered = _lowered_forms(kind, fold, capacity, scaling, tuple(map(_example_of, tensors)))
        one, several = (_with_inputs(form, tensors) for form in lowered)
        is_single = self.call_sym(operator.ge, (single, least_single(fold)), meta)
        return self.call_cond(is_single, one, several, list(operands), meta)


def is_choice(target: Any) -> bool:
    """Return True if the target is the placeholder for attention branches."""
    return operator_of(target) is _OPERATOR


#: Description of a tensor for a trace: dtype, sizes, and indices of dynamic dimensions.
_Example = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]

# A prime number, because torch.export makes a dynamic size static where its example equals a number of heads.
_EXAMPLE_LENGTH = 997


def _example_of(tensor: torch.Tensor) -> _Example:
    return (
        tensor.dtype,
        tuple(map(_example_size, tensor.shape)),
        tuple(index for index, size in enumerate(tensor.shape) if isinstance(size, torch.SymInt)),
    )


def _example_size(size: int | torch.SymInt) -> int:
    if not isinstance(size, torch.SymInt):
        return size
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, _EXAMPLE_LENGTH)))


# Cached, because a process that exports many small models would spend a quarter of its time here.
@functools.lru_cache(maxsize=64)
def _lowered_forms(
    kind: str, fold: int, capacity: int, scaling: float, examples: tuple[_Example, ...]
) -> tuple[GraphModule, ...]:
    """Return the forms in ExecuTorch's edge dialect, for operands of these shapes."""
    return tuple(_lowered_form(form, examples) for form in forms_of(kind, fold, capacity, scaling))


def _lowered_form(form: Form, examples: tuple[_Example, ...]) -> GraphModule:
    tensors = tuple(torch.empty(sizes, dtype=dtype) for dtype, sizes, _ in examples)
    open_sizes = tuple(dict.fromkeys(symbolic, Dim.AUTO) for _, _, symbolic in examples)
    program = torch.export.export(_Module(form), tensors, dynamic_shapes={"operands": open_sizes})
    config = edge_config(skip_dim_order=True)
    graph_module = to_edge(program, compile_config=config).exported_program().graph_module
    drop_provenance(graph_module)
    return graph_module


class _Module(torch.nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form

    def forward(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.form(*operands)


def _with_inputs(form: GraphModule, operands: Sequence[torch.Tensor]) -> GraphModule:
    """Return a copy of a form whose placeholders have the values of the operands."""
    form = copy.deepcopy(form)
    for placeholder, operand in zip(form.graph.find_nodes(op="placeholder"), operands, strict=True):
        placeholder.meta["val"] = operand
    return form


def replace_placeholders(edge: EdgeProgramManager, segments: ClonedSegments) -> EdgeProgramManager:
    """Insert attention branches and segment bodies; programs without placeholders are returned unchanged."""
    targets = [node.target for name in edge.methods for node in edge.exported_program(name).graph.nodes]
    if not any(is_choice(target) or is_segment(target) for target in targets):
        return edge
    return edge.transform([_Insertions(segments)])


class _SegmentBodies(ExportPass):
    """Replace each `exportable_cache::segment` by its lowered body, with its delegates."""

    def __init__(self, segments: ClonedSegments) -> None:
        super().__init__()
        self._segments = segments

    def call_operator(self, op: Any, args: tuple, kwargs: dict[str, Any], meta: NodeMetadata) -> Any:
        """Replace one operator."""
        if not is_segment(op):
            return super().call_operator(op, args, kwargs, meta)
        inputs, tensors, name, _ = args
        template, delegates = self._segments.body_of(name)
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
        # Unwrapped, because operators of the edge dialect are not OpOverloads.
        if isinstance(operator_of(target), OpOverload):
            return self.call_operator(target, args, kwargs, meta)
        return self.call_sym(target, args, meta)

    def call_getitem(self, value: Any, key: int, meta: NodeMetadata) -> ProxyValue:
        """Return the item; results of a segment are a list of values."""
        return value[key] if isinstance(value, list) else super().call_getitem(value, key, meta)

    def call_delegate(
        self, lowered_module: LoweredBackendModule, args: tuple, kwargs: dict[str, Any], meta: NodeMetadata
    ) -> ProxyValue:
        """Call a delegate whose shapes are known without running it."""
        return super().call_delegate(with_known_shapes(lowered_module), args, kwargs, meta)


class _Insertions(_SegmentBodies, AttentionBranches):
    """Both replacements in one pass, because each pass runs every operator of the program on fake tensors."""

    def __init__(self, segments: ClonedSegments) -> None:
        AttentionBranches.__init__(self)
        self._segments = segments
