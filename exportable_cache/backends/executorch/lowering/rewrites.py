"""Graph passes that replace operators which the ExecuTorch runtime lacks, computes differently, or runs slowly."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterable
from math import pi, sqrt
from typing import TYPE_CHECKING, Any

import torch
from executorch.backends.transforms.utils import delete_constant_placeholder
from torch.fx.node import Node, map_arg
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ....common.compat.executorch import operator_of
from ....common.compat.torch import OpOverload, writes_in_place, written_arguments
from ....errors import UnsupportedModelError
from ..graph_edits import add_constant, add_weight, calls_to_linear, constant_of, insert_call, replace_call

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Graph, GraphModule, Node


_ATEN = torch.ops.aten


def decompose_tanh_gelus(program: ExportedProgram) -> ExportedProgram:
    """Decompose each `gelu(x, approximate="tanh")` into elementary operators, in place.

    The XNNPACK delegate of ExecuTorch 1.4.1 drops `approximate` and evaluates the exact form. The error of up to 4.7e-4
    per element reaches the logits of Gemma 2 and 3.
    """
    gelus = program.graph.find_nodes(op="call_function", target=_ATEN.gelu.default)
    approximate = [node for node in gelus if node.kwargs.get("approximate") == "tanh"]
    for node in approximate:
        with program.graph.inserting_before(node):
            replace_call(node, _tanh_gelu(program.graph, node.args[0]))
    if approximate:
        program.graph_module.recompile()
    return program


def indices_to_int64(program: ExportedProgram) -> ExportedProgram:
    """Convert the int32 indices of each lookup in a table to int64, in place.

    Lookups in tables of 4, 8 and 16 bits take int64 only, and ExecuTorch's end the process otherwise. Chameleon looks
    up tokens of images in int32.
    """
    lookups = program.graph.find_nodes(op="call_function", target=_ATEN.embedding.default)
    narrow = [node for node in lookups if node.args[1].meta["val"].dtype == torch.int32]
    for node in narrow:
        with program.graph.inserting_before(node):
            node.update_arg(1, insert_call(program.graph, _ATEN.to.dtype, node.args[1], torch.int64))
    if narrow:
        program.graph_module.recompile()
    return program


def _tanh_gelu(graph: Graph, x: Node) -> Node:
    """Insert 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    call = functools.partial(insert_call, graph)
    multiply, add = _ATEN.mul.Tensor, _ATEN.add.Tensor
    cube = call(multiply, call(multiply, call(multiply, x, 0.044715), x), x)
    tanh = call(_ATEN.tanh.default, call(multiply, call(add, cube, x), sqrt(2.0 / pi)))
    return call(multiply, call(add, tanh, 1.0), call(multiply, x, 0.5))


_CLONE = torch.ops.aten.clone.default


class RemoveNeedlessCopies(PassBase):
    """Let readers of a contiguous copy read the original, if the original has no other reader.

    With another reader, the original may be a cache that is written in between, or a result of the program.
    """

    def call(self, graph_module: GraphModule) -> PassResult:
        """Remove the copies of one graph."""
        graph = graph_module.graph
        copies = [node for node in graph.nodes if operator_of(node.target) is _CLONE and _is_needless(node)]
        for copy in copies:
            replace_call(copy, copy.all_input_nodes[0])
        if copies:
            graph_module.recompile()
        return PassResult(graph_module, bool(copies))


def _is_needless(copy: Node) -> bool:
    (original,) = copy.all_input_nodes
    # A result of a call with several results may alias an operand.
    if original.op != "call_function" or original.target is operator.getitem or len(original.users) > 1:
        return False
    return all(node.meta["val"].is_contiguous() for node in (copy, original))


def means_to_linear(program: ExportedProgram) -> ExportedProgram:
    """Rewrite each float32 `mean(x, -1, keepdim=True)` of static size n as `linear(x, full([1, n], 1 / n))`."""
    return calls_to_linear(program, "mean_over", _averaged, lambda size: torch.full((1, size), 1.0 / size))


def _averaged(node: Node) -> Node | None:
    """Return the tensor that is averaged over its last dimension, or None for other calls."""
    if node.target is not torch.ops.aten.mean.dim or "dtype" in node.kwargs or len(node.args) != 3:
        return None
    arguments: tuple[Any, ...] = node.args
    source, dims, keepdim = arguments
    value = source.meta["val"]
    is_last = value.dim() > 1 and list(dims) in ([-1], [value.dim() - 1]) and isinstance(value.shape[-1], int)
    return source if keepdim and is_last and value.dtype == torch.float32 else None


# End of a slice without a stated end.
_END = 2**63 - 1


def rotations_to_linear(program: ExportedProgram) -> ExportedProgram:
    """Rewrite each float32 `cat([-x[..., n:], x[..., :n]], -1)` as `linear(x, rotation(2 n))`, in place.

    The size 2 n must be static. The result is bit-identical for finite numbers, because every sum has one nonzero term.
    """
    return calls_to_linear(program, "rotation_of", rotated_halves, rotation)


def rotation(size: int) -> torch.Tensor:
    """Return R, float32 [size, size], with `x @ R.T == cat([-x[size // 2:], x[:size // 2]])`; the size is even."""
    half = size // 2
    matrix = torch.zeros(size, size)
    indices = torch.arange(half)
    matrix[indices, half + indices] = -1.0
    matrix[half + indices, indices] = 1.0
    return matrix


def rotated_halves(node: Node) -> Node | None:
    """Return x if a call is the float32 `cat([-x[..., n:], x[..., :n]], -1)`, or None for other calls."""
    arguments: tuple[Any, ...] = node.args
    if node.target is not torch.ops.aten.cat.default or len(arguments[0]) != 2:
        return None
    value, dim = node.meta["val"], arguments[1] if len(arguments) > 1 else 0
    negated, first = arguments[0]
    size = value.shape[-1]
    if (
        value.dtype != torch.float32
        or dim not in (-1, value.dim() - 1)
        or negated.target is not torch.ops.aten.neg.default
    ):
        return None
    second = negated.args[0]
    if not isinstance(size, int) or _bounds(first) != (0, size // 2) or _bounds(second) != (size // 2, size):
        return None
    source = first.args[0]
    return source if source is second.args[0] and source.meta["val"].shape[-1] == size else None


def _bounds(node: Node) -> tuple[int, int] | None:
    """Return start and end of a slice of step 1 over the last dimension, or None for other calls."""
    if node.target is not torch.ops.aten.slice.Tensor:
        return None
    arguments: tuple[Any, ...] = (*node.args, *(0, 0, _END, 1)[len(node.args) - 1 :])
    source, dim, start, end, step = arguments
    shape = source.meta["val"].shape
    return (start, min(end, shape[-1])) if step == 1 and dim in (-1, len(shape) - 1) else None


_WRITES = {torch.ops.aten.index_put.default: False, torch.ops.aten.index_put_.default: True}


def masked_writes_to_where(program: ExportedProgram) -> ExportedProgram:
    """Rewrite each `x[mask] = value` and `x[..., constant indices] = value` as `where`, in place.

    The value is one number, or one tensor for every index, no larger than the dimensions after the index.
    """
    graph = program.graph
    for node in [node for node in graph.nodes if node.target in _WRITES]:
        target, indices, value, *accumulate = node.args
        index = indices[-1]
        if any(accumulate) or index is None or any(other is not None for other in indices[:-1]):
            continue
        # A mask replaces all its dimensions, indices replace one.
        taken = index.meta["val"].dim() if index.meta["val"].dtype == torch.bool else 1
        trailing = target.meta["val"].dim() - (len(indices) - 1) - taken
        if value.meta["val"].numel() != 1 and value.meta["val"].dim() > trailing:
            continue
        mask = _mask_of(program, node)
        if mask is None:
            continue
        with graph.inserting_before(node):
            for _ in range(trailing):
                mask = insert_call(graph, torch.ops.aten.unsqueeze.default, mask, -1)
            result = insert_call(graph, torch.ops.aten.where.self, mask, value, target)
            if _WRITES[node.target]:
                result = insert_call(graph, torch.ops.aten.copy_.default, target, result)
        replace_call(node, result)
    program.graph_module.recompile()
    return program


def _mask_of(program: ExportedProgram, node: Node) -> Node | None:
    """Return the bool mask of a write over the dimensions of its index, or None if the indices are not constant."""
    arguments: tuple[Any, ...] = node.args
    target, indices = arguments[:2]
    index, size = indices[-1], target.meta["val"].shape[len(indices) - 1]
    if index.meta["val"].dtype == torch.bool:
        return index
    chosen = constant_of(program, index)
    if chosen is None or not isinstance(size, int):
        return None
    mask = torch.zeros(size, dtype=torch.bool)
    mask[chosen] = True
    return add_constant(program, f"{node.name}_mask", mask)


_PRODUCT = torch.ops.aten.bmm.default
#: Views of a tensor.
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.slice.Tensor, torch.ops.aten.transpose.int)


def parts_to_weights(program: ExportedProgram) -> ExportedProgram:
    """Rewrite each `bmm` whose second operand is a view of a weight to use a separate weight, in place."""
    graph, parameters = program.graph, program.graph_signature.inputs_to_parameters
    replaced = False
    for node in graph.find_nodes(op="call_function", target=_PRODUCT):
        part = node.all_input_nodes[-1]
        views = _views(part)
        if not views or views[0].all_input_nodes[0].name not in parameters:
            continue
        value = program.state_dict[parameters[views[0].all_input_nodes[0].name]].detach()
        for view in views:
            operator: Any = view.target
            value = operator(value, *view.args[1:], **view.kwargs)
        node.replace_input_with(part, add_weight(program, f"{node.name}_weight", value.contiguous()))
        replaced = True
    if replaced:
        graph.eliminate_dead_code()
        for node in graph.find_nodes(op="placeholder"):
            if not node.users and node.name in parameters:
                delete_constant_placeholder(program, node)
        program.graph_module.recompile()
    return program


def _views(node: Node) -> list[Node]:
    """Return the views of static size that lead to a node, first to last."""
    views: list[Node] = []
    while node.op == "call_function" and node.target in _VIEWS and len(node.all_input_nodes) == 1:
        views.insert(0, node)
        node = node.all_input_nodes[0]
    return views


_WITHOUT_KERNEL = (torch.ops.aten.argsort.default, torch.ops.aten.bucketize.Tensor, torch.ops.aten.erfinv.default)

#: Limit in bytes of a folded value; larger ones, such as masks of thousands of patches, are computed in each run.
_LARGEST_FOLDED = 16 * 2**20


def patches_to_linear(program: ExportedProgram) -> ExportedProgram:
    """Rewrite each 3-D convolution over one patch of its kernel's size as a linear layer, in place.

    Qwen2-VL and related models embed patches that the processor has cut out so. ExecuTorch 1.4.1 has 1-D and 2-D
    convolutions only.

    Raises:
        UnsupportedModelError: If a 3-D convolution moves over its input.
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
        # A view of the weight, because the delegate would not treat a reshape in the graph as a constant.
        flat = add_weight(program, f"{weight.name}_flat", values.detach().flatten(1))
        with graph.inserting_before(node):
            rows = insert_call(graph, torch.ops.aten.flatten.using_ints, patches, 1)
            product = insert_call(graph, torch.ops.aten.linear.default, rows, flat, bias)
            embedded = insert_call(graph, torch.ops.aten.view.default, product, list(node.meta["val"].shape))
        replace_call(node, embedded)
    program.graph_module.recompile()
    return program


def state_of(programs: Iterable[ExportedProgram]) -> frozenset[str]:
    """Return the names of buffers that any method of the file writes."""
    names: set[str] = set()
    for program in programs:
        buffers = program.graph_signature.inputs_to_buffers
        names |= {buffers[node.name] for node in _write_targets(program) if node.name in buffers}
    return frozenset(names)


def fold_constants(program: ExportedProgram, state: Collection[str] = ()) -> ExportedProgram:
    """Replace values that depend on neither inputs nor state by constants, in place.

    Encoders compute positions, windows and masks from the size of their input, which is constant. ExecuTorch 1.4.1 has
    no kernels for `argsort`, `bucketize` and `erfinv`, so calls of these are folded in any graph; Gemma 3n computes the
    threshold of a sparse activation by `erfinv`.

    Args:
        program: Program to change.
        state: Buffers that another method of the file writes (`state_of`), although this method may only read them, as
            a decoder reads the keys of its encoder.
    """
    if not program.graph_signature.buffers_to_mutate:
        _fold_all(program, state)
    for node in [node for node in program.graph.nodes if node.target in _WITHOUT_KERNEL]:
        value = constant_of(program, node, state)
        if value is not None:
            replace_call(node, add_constant(program, f"{node.name}_value", value))
    program.graph_module.recompile()
    return program


def _fold_all(program: ExportedProgram, state: Collection[str]) -> None:
    """Replace calls of constants that other calls use; parameters are not constants, as they would be stored twice."""
    signature = program.graph_signature
    known = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    stored = {**program.state_dict, **program.constants}
    values: dict[Node, Any] = {}
    written = _write_targets(program)
    for node in program.graph.nodes:
        if node in written:
            continue
        if node.op == "placeholder" and known.get(node.name) in state:
            continue
        if node.op == "placeholder" and isinstance(stored.get(known.get(node.name)), torch.Tensor):
            values[node] = stored[known[node.name]]
        elif node.op == "call_function" and _is_pure(node) and all(each in values for each in node.all_input_nodes):
            arguments, keywords = map_arg((node.args, node.kwargs), values.__getitem__)
            value = node.target(*arguments, **keywords)
            if not (isinstance(value, torch.Tensor) and value.nbytes > _LARGEST_FOLDED):
                values[node] = value
    for node, value in values.items():
        is_used = any(user not in values for user in node.users)
        if node.op == "call_function" and is_used and isinstance(value, torch.Tensor):
            constant = value.detach().clone().contiguous()
            node.replace_all_uses_with(add_constant(program, f"{node.name}_value", constant))
    for node in reversed(values):
        # This also removes assertions over constants.
        if node.op == "call_function" and not node.users:
            program.graph.erase_node(node)
    program.graph.eliminate_dead_code()
    for node in [node for node in values if node.op == "placeholder" and not node.users]:
        # The constant, too, because passes of ExecuTorch look up an input for every constant.
        program.graph.erase_node(node)
        signature.input_specs[:] = [spec for spec in signature.input_specs if spec.arg.name != node.name]
        program.constants.pop(known[node.name], None)


def _write_targets(program: ExportedProgram) -> set[Node]:
    """Return the nodes that calls write to, and their sources, because a target may be a view."""
    waiting: list[Any] = []
    for node in program.graph.nodes:
        if isinstance(node.target, OpOverload):
            for index, name in written_arguments(node.target):
                waiting.append(node.args[index] if index < len(node.args) else node.kwargs.get(name))
    found: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, Node) and node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def _is_pure(node: Node) -> bool:
    """Return True if a call has no side effects and the same result each time.

    Only torch's operators count, because folding those of torchao would store dequantized weights.
    """
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem
    return (
        node.target.namespace == "aten"
        and not writes_in_place(node.target)
        and torch.Tag.nondeterministic_seeded not in node.target.tags
    )


def _is_over_one_patch(node: Node) -> bool:
    """Return True if the kernel of a conv3d call has one position."""
    arguments: tuple[Any, ...] = (*node.args, *(None, 1, 0, 1, 1)[len(node.args) - 2 :])
    source, kernel, _, _, padding, _, groups = arguments
    patches, weight = source.meta["val"], kernel.meta["val"]
    return patches.shape[2:] == weight.shape[2:] and groups == 1 and padding in (0, [0], [0, 0, 0])
