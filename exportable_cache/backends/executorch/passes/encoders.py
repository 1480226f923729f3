"""What vision encoders, and Gemma 3n, compute with operators that the ExecuTorch runtime has no
kernel for, in others.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.node import Node, map_arg

from ....common.compat.torch import OpOverload, writes_in_place, written_arguments
from ....errors import UnsupportedModelError
from .graph_edits import add_constant, add_weight, constant_of, insert_call, replace_call

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_WITHOUT_KERNEL = (torch.ops.aten.argsort.default, torch.ops.aten.bucketize.Tensor, torch.ops.aten.erfinv.default)

#: Bytes of a value in the file; larger ones, such as masks of thousands of patches, are computed in each run.
_LARGEST_FOLDED = 16 * 2**20


def patches_to_linear(program: ExportedProgram) -> ExportedProgram:
    """Rewrite each 3-D convolution over one patch, as large as its kernel, as a linear layer over its values, in place.

    So Qwen2-VL and its relatives embed patches that the processor has cut out already. ExecuTorch 1.4.1 knows
    convolutions of one and two dimensions.

    Raises:
        UnsupportedModelError: If there is a 3-D convolution over more than that.
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
        # Shares the memory of the other: a product in the graph would be no constant to the delegate.
        flat = add_weight(program, f"{weight.name}_flat", values.detach().flatten(1))
        with graph.inserting_before(node):
            rows = insert_call(graph, torch.ops.aten.flatten.using_ints, patches, 1)
            product = insert_call(graph, torch.ops.aten.linear.default, rows, flat, bias)
            embedded = insert_call(graph, torch.ops.aten.view.default, product, list(node.meta["val"].shape))
        replace_call(node, embedded)
    program.graph_module.recompile()
    return program


def state_of(programs: Iterable[ExportedProgram]) -> frozenset[str]:
    """Names of the buffers that any of the methods of one file writes."""
    names: set[str] = set()
    for program in programs:
        buffers = program.graph_signature.inputs_to_buffers
        names |= {buffers[node.name] for node in _behind_writes(program) if node.name in buffers}
    return frozenset(names)


def fold_constants(program: ExportedProgram, state: Collection[str] = ()) -> ExportedProgram:
    """Replace what depends on neither input nor state by its values, in place; and `argsort`, `bucketize` and
    `erfinv` of such, which ExecuTorch 1.4.1 has no kernels for, whatever they are part of.

    Args:
        state: Buffers that another method of the same file writes, while this one may read them alone, as the steps of
            a decoder read the keys of its encoder: see `state_of`.

    Encoders compute positions, windows and masks from the size of their input, which is one. Gemma 3n finds the
    threshold of a sparse activation by the last of the three.
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
    """Replace every call of constants that something else uses; parameters are none, as they would be stored twice."""
    signature = program.graph_signature
    known = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    stored = {**program.state_dict, **program.constants}
    values: dict[Node, Any] = {}
    written = _behind_writes(program)
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
        # Assertions, too, which held.
        if node.op == "call_function" and not node.users:
            program.graph.erase_node(node)
    program.graph.eliminate_dead_code()
    for node in [node for node in values if node.op == "placeholder" and not node.users]:
        # Passes of ExecuTorch look for the input of every constant that there is.
        program.graph.erase_node(node)
        signature.input_specs[:] = [spec for spec in signature.input_specs if spec.arg.name != node.name]
        program.constants.pop(known[node.name], None)


def _behind_writes(program: ExportedProgram) -> set[Node]:
    """What a call writes to, and all that this was made of, as it may be a view of it."""
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
    """Whether a call gives the same for the same, and changes nothing. Others' operators are none: weights would be
    stored as what they stand for.
    """
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem
    return (
        node.target.namespace == "aten"
        and not writes_in_place(node.target)
        and torch.Tag.nondeterministic_seeded not in node.target.tags
    )


def _is_over_one_patch(node: Node) -> bool:
    """Of a call of conv3d(input, weight, bias, stride, padding, dilation, groups): the kernel has one place."""
    arguments: tuple[Any, ...] = (*node.args, *(None, 1, 0, 1, 1)[len(node.args) - 2 :])
    source, kernel, _, _, padding, _, groups = arguments
    patches, weight = source.meta["val"], kernel.meta["val"]
    return patches.shape[2:] == weight.shape[2:] and groups == 1 and padding in (0, [0], [0, 0, 0])
