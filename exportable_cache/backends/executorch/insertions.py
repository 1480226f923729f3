"""The end of a lowering: what single operators stood for takes their place again, in one pass over each program."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from executorch.exir.pass_base import ExportPass, NodeMetadata
from torch.fx.node import map_arg

from ...common.compat.executorch import call_delegate_operator, operator_of
from ...common.compat.torch import OpOverload
from .branches import AttentionBranches, is_choice
from .delegate_shapes import with_known_shapes
from .segment_calls import is_segment

if TYPE_CHECKING:
    from executorch.exir import EdgeProgramManager
    from executorch.exir.lowered_backend_module import LoweredBackendModule
    from executorch.exir.pass_base import ProxyValue
    from torch.fx import Node

    from .segment_calls import StampedSegments


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
        return [values[result] for result in template.graph_module.graph.output_node().args[0]]

    def _call(self, target: Any, args: tuple, kwargs: dict[str, Any], meta: NodeMetadata) -> Any:
        if target is operator.getitem:
            return self.call_getitem(*args, meta)
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
