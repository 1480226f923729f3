"""The delegate OpenVINO, for Intel's processors."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from executorch.backends.transforms.utils import get_param_tensor
from executorch.exir.backend.compile_spec_schema import CompileSpec
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

from ....common.compat.executorch import exact_openvino, openvino_partitioner
from ....errors import UnsupportedModelError
from ....models.experts import EXPERT_LINEAR
from ..graph_edits import add_weight, insert_call, replace_call
from .passes import (
    INT4_MOST,
    bits_of,
    combine_choices,
    infinite_bounds_to_none,
    keep_state_outside,
    logic_to_bits,
    numbers_to_tensors,
    remainders_to_divisions,
    short_means_to_sums,
)

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Graph
    from transformers import PreTrainedModel

    from ....program.program import Program

aten = torch.ops.aten
#: Number of single tokens in the trial, which lead past a short window.
_STEPS = 40
_CHILD = """
import json, sys
from pathlib import Path
import torch
from exportable_cache.common.compat.executorch import exact_openvino, load_program

path, calls = json.load(sys.stdin)
program = load_program(Path(path))
with exact_openvino():
    methods = {name: program.load_method(name) for name, _ in calls}
for name, inputs in calls:
    print(name, flush=True)
    methods[name]([torch.full(shape, value, dtype=getattr(torch, dtype)) for shape, value, dtype in inputs])
"""


def partitioner() -> Any:
    """Return the partitioner of the delegate."""
    with exact_openvino():
        # It loads OpenVINO's part for processors, which asks once what they have.
        import_module("openvino").Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")

    class Partitioner(openvino_partitioner()):  # type: ignore[misc]
        """A partitioner without a line on stdout for each operator left out, and with no state among its constants."""

        def partition(self, exported_program: Any) -> Any:
            with contextlib.redirect_stdout(io.StringIO()):
                result = super().partition(exported_program)
            keep_state_outside(exported_program)
            return result

    return Partitioner([CompileSpec("device", b"CPU")])


def rewrites() -> tuple[Callable[[ExportedProgram], ExportedProgram], ...]:
    """Return passes over exported programs."""
    return (weights_to_unsigned, logic_to_bits)


def passes() -> list[Callable[[GraphModule], PassResult]]:
    """Return passes over edge programs, before they are partitioned."""
    return [infinite_bounds_to_none, numbers_to_tensors, remainders_to_divisions, short_means_to_sums]


def weights_to_unsigned(program: ExportedProgram) -> ExportedProgram:
    """Spell out quantized weights so that OpenVINO's compiler keeps 4 or 8 bits, in place.

    A weight is `(integers - 2^(bits - 1)) * scale` of integers without a sign. Two of 4 bits are a byte, in the form
    that the compiler recognizes. Rows of tables and experts are chosen before they are converted.
    """
    graph, kept = program.graph, _Kept(program)
    dequantized = torch.ops.torchao.dequantize_affine.default
    for node in [node for node in graph.nodes if node.target in (dequantized, EXPERT_LINEAR)]:
        arguments: tuple[Any, ...] = node.args
        if node.target is EXPERT_LINEAR:
            with graph.inserting_before(node):
                replace_call(node, _experts(graph, kept(arguments[1], arguments[2]), arguments))
            continue
        integers, block, scale, zero, _, _, most = arguments[:7]
        if most not in (INT4_MOST, 127) or block[0] != 1 or len(block) != 2:
            continue
        if zero is not None and bool(get_param_tensor(program, zero).any()):
            raise UnsupportedModelError(
                f"the zero points of {integers.name} must be zero for delegate 'openvino'; quantise the model with "
                "this package (--quantize)"
            )
        weight = kept(integers, scale, bits=4 if most == INT4_MOST else 8)
        for user in list(node.users):
            if user.target is aten.embedding.default:
                with graph.inserting_before(user):
                    replace_call(user, weight.rows(graph, aten.embedding.default, user.args[1]))
        if node.users:
            with graph.inserting_before(node):
                replace_call(node, weight.whole(graph))
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program


class _Weight(NamedTuple):
    """A quantized weight [..., inputs].

    Attributes:
        integers: uint8 [..., inputs], or [..., inputs / 2] with the first of two in the lower 4 bits.
        scale: [..., groups].
        zero: Float that is subtracted from integers, without dimensions.
        bits: 4 or 8.
    """

    integers: Node
    scale: Node
    zero: Node
    bits: int

    def whole(self, graph: Graph) -> Node:
        """Insert the weight [outputs, inputs] in float."""
        value, (rows, groups) = self.integers, self.scale.meta["val"].shape
        if self.bits == 4:
            low = insert_call(graph, aten.bitwise_and.Scalar, value, 15)
            high = insert_call(graph, aten.bitwise_right_shift.Tensor_Scalar, value, 4)
            value = insert_call(graph, aten.stack.default, [low, high], -1)
            value = insert_call(graph, aten.reshape.default, value, [rows, groups, -1] if groups > 1 else [rows, -1])
        value = insert_call(graph, aten.to.dtype, value, torch.float32)
        return self._scaled(graph, value, self.scale)

    def rows(self, graph: Graph, choose: Any, indices: Node) -> Node:
        """Insert rows in float, which an operator chooses by their indices."""
        choice = (indices,) if choose is aten.embedding.default else (0, indices)
        value, scale = (insert_call(graph, choose, one, *choice) for one in (self.integers, self.scale))
        value = insert_call(graph, aten.to.dtype, value, torch.float32)
        if self.bits == 4:
            # Not by bits, because the partitioner takes these operators for constants only.
            high = insert_call(graph, aten.floor.default, insert_call(graph, aten.mul.Scalar, value, 1 / 16))
            low = insert_call(graph, aten.sub.Tensor, value, insert_call(graph, aten.mul.Scalar, high, 16.0))
            value = insert_call(graph, aten.stack.default, [low, high], -1)
        *shape, groups = scale.meta["val"].shape
        if self.bits == 4 or groups > 1:
            value = insert_call(
                graph, aten.reshape.default, value, [*shape, groups, -1] if groups > 1 else [*shape, -1]
            )
        return self._scaled(graph, value, scale)

    def _scaled(self, graph: Graph, value: Node, scale: Node) -> Node:
        """Insert the product of integers [..., inputs], or [..., groups, size], and scales [..., groups]."""
        # In float, because OpenVINO rounds activations to 8 bits for integers without a zero point, or with an integer.
        value = insert_call(graph, aten.sub.Tensor, value, self.zero)
        *shape, groups = scale.meta["val"].shape
        if groups == 1:
            return insert_call(graph, aten.mul.Tensor, value, scale)
        value = insert_call(graph, aten.mul.Tensor, value, insert_call(graph, aten.unsqueeze.default, scale, -1))
        return insert_call(graph, aten.reshape.default, value, [*shape, -1])


class _Kept:
    """The weights that are already in a program; tied ones are stored once."""

    def __init__(self, program: ExportedProgram) -> None:
        self._program = program
        self._found: dict[int, _Weight] = {}
        self._zeros: dict[int, Node] = {}

    def __call__(self, integers: Node, scale: Node, bits: int | None = None) -> _Weight:
        """Return a weight, given its signed integers and its scales; bits by the integers if they are not given."""
        values, scales = (get_param_tensor(self._program, one).detach() for one in (integers, scale))
        known = self._found.get(values.data_ptr())
        if known is not None:
            return known
        bits = bits_of(values) if bits is None else bits
        packed = (values.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)
        if bits == 4:
            packed = packed[..., 0::2] | packed[..., 1::2] << 4
        weights = (add_weight(self._program, f"{integers.name}_unsigned", packed), scale)
        if scales.dim() != values.dim():
            scales = scales.reshape(*values.shape[:-1], -1)
            weights = (weights[0], add_weight(self._program, f"{scale.name}_grouped", scales))
        if bits not in self._zeros:
            self._zeros[bits] = add_weight(self._program, f"zero_of_{bits}_bits", torch.tensor(2.0 ** (bits - 1)))
        return self._found.setdefault(values.data_ptr(), _Weight(*weights, self._zeros[bits], bits))


def _experts(graph: Graph, weight: _Weight, arguments: tuple[Any, ...]) -> Node:
    """Insert a linear layer of experts, see `expert_linear`."""
    source, _, _, bias, indices, factors = arguments[:6]
    tokens, choices = indices.meta["val"].shape
    chosen = insert_call(graph, aten.reshape.default, indices, [-1])
    matrices = weight.rows(graph, aten.index_select.default, chosen)
    outputs, inputs = matrices.meta["val"].shape[1:]
    if source.meta["val"].dim() == 2:
        source = insert_call(graph, aten.unsqueeze.default, source, 1)
        source = insert_call(graph, aten.expand.default, source, [tokens, choices, inputs])
    rows = insert_call(graph, aten.reshape.default, source, [tokens * choices, inputs, 1])
    results = insert_call(graph, aten.bmm.default, matrices, rows)
    results = insert_call(graph, aten.reshape.default, results, [tokens, choices, outputs])
    return combine_choices(graph, results, bias, indices, factors)


#: Shape, value of every element, and name of the dtype of an input.
Filled = tuple[list[int], int, str]


def trial_of(program: Program) -> list[tuple[str, list[Filled]]]:
    """Return calls that feed a prompt and single tokens to a program, by method."""
    most, position = program.cache.max_length or _STEPS, 0
    calls: list[tuple[str, list[Filled]]] = []
    for name in ("prefill", "prefill", *["decode"] * _STEPS):
        method = program.methods.get(name)
        if method is not None and position + method.max_length <= most:
            longest = {size: most for size, (_, most) in method.ranges.items()}
            sizes = {"batch": 1, "length": method.max_length, **longest}
            calls.append(
                (
                    name,
                    [
                        (list(spec.sizes(sizes)), position if spec.name == "input_pos" else 0, spec.dtype)
                        for spec in method.inputs
                    ],
                )
            )
            position += method.max_length
    return calls


def check_calls(path: Path, model: PreTrainedModel, calls: Sequence[tuple[str, list[Filled]]]) -> None:
    """Make calls in another process, because OpenVINO crashes on some programs (2025.4.1).

    Args:
        path: The `.pte`.
        model: The model that it was made from.
        calls: Methods and their inputs.

    Raises:
        UnsupportedModelError: If the process ends, or a call fails.
    """
    done = subprocess.run(
        [sys.executable, "-c", _CHILD],
        input=json.dumps([str(path), list(calls)]),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        named = {name for name, _ in calls}
        name = next((line for line in reversed(done.stdout.splitlines()) if line in named), "")
        code = -done.returncode
        crash = f"ends with {signal.Signals(code).name}" if code > 0 else (done.stderr.strip() or "no reason")[-200:]
        raise UnsupportedModelError(
            f"OpenVINO cannot run method {name!r} of {type(model).__name__}: {crash}; export for delegate 'xnnpack'"
        )
