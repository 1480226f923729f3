"""Evaluate the graph of an MLX delegate on the CPU, instruction by instruction, as its interpreter does on a Mac.

The instructions are read from the `.pte`, so that a verification covers what was written. Each is a call of the package
`mlx`, whose releases for Linux compute on the CPU.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ....common.compat.executorch import deserialized_file, mlx_graph
from ....errors import BundleError, ExportableCacheError, MissingDependencyError, VerificationError, first_line
from .table import DELEGATES

if TYPE_CHECKING:
    from ...base import ProgramDescription

REMARK = "the MLX graph in the file was evaluated op by op on the CPU; it was not executed by ExecuTorch's runtime"
#: MLX's dtypes by ExecuTorch's numbers, and torch's for the same bits.
_DTYPES = {
    **{0: ("uint8", torch.uint8), 1: ("int8", torch.int8), 2: ("int16", torch.int16), 3: ("int32", torch.int32)},
    **{4: ("int64", torch.int64), 5: ("float16", torch.float16), 6: ("float32", torch.float32)},
    **{11: ("bool_", torch.bool), 15: ("bfloat16", torch.bfloat16), 28: ("uint32", torch.uint32)},
}
#: Limit of the interpreter for an allocation, in bytes.
_MOST_BYTES = 4 * 2**30


class Tensor(NamedTuple):
    """A reference to a tensor of the graph."""

    at: int


class Value(NamedTuple):
    """A reference to a number of the graph."""

    at: int


class Node:
    """An instruction, whose operands are read as attributes.

    Args:
        name: Name of the operator in MLX's schema, without `Node`.
        fields: Operands by name: references, numbers, strings, lists of these.
        graph: The graph that has the tensors and numbers.
    """

    def __init__(self, name: str, fields: Mapping[str, Any], graph: Graph) -> None:
        self.name, self.fields, self.graph = name, fields, graph

    def __getattr__(self, name: str) -> Any:
        return self.graph.resolved(self.fields[name])


class Graph:
    """The graph of one delegate call, with its constants and its state, which is zero at first.

    Args:
        payload: The delegate's bytes.
        data: Constants by name.
    """

    def __init__(self, payload: bytes, data: Mapping[str, bytes]) -> None:
        try:
            self.mx = import_module("mlx.core")
        except ImportError as error:  # on Linux, a package of its own has the library
            raise MissingDependencyError(
                f"mlx cannot be loaded: {first_line(error)}; {DELEGATES['mlx'].install}"
            ) from error
        reader, describe = mlx_graph(payload)
        self.tensors: dict[int, Any] = {}
        self.values: dict[int, int] = {}
        slots = (reader.NamedSlots(index) for index in range(reader.NamedSlotsLength()))
        names = {slot.Slot().Idx(): slot.Name().decode() for slot in slots if slot.Slot().SlotType() == 0}
        for index in range(reader.NumConstantTensors()):
            shape, dtype = _described(reader.TensorMeta(index))
            constant = torch.frombuffer(bytearray(data[names[index]]), dtype=_DTYPES[dtype][1])
            self.tensors[index] = self.array(constant[: math.prod(shape)].reshape(shape))
        for index in range(reader.MutableBufferMapLength()):
            place = reader.MutableBufferMap(index).Idx()
            shape, dtype = _described(reader.TensorMeta(place))
            self.tensors[place] = self.mx.zeros(self.bounded(shape), self.dtype(dtype))
        self.kept = set(self.tensors)
        self.inputs, self.outputs = (
            [_slot(at(index)) for index in range(count)]
            for at, count in (
                (reader.InputMap, reader.InputMapLength()),
                (reader.OutputMap, reader.OutputMapLength()),
            )
        )
        self.chains = [
            [Node(name, fields, self) for name, fields in describe(chain, Tensor, Value)]
            for chain in map(reader.InstructionChains, range(reader.InstructionChainsLength()))
        ]
        self.main = reader.MainChainIdx()
        if reader.InitChainIdx() >= 0:
            self.run_chain(reader.InitChainIdx())
            self.kept = set(self.tensors)

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the graph; returns its output tensors."""
        for slot, tensor in zip(self.inputs, inputs, strict=True):
            if isinstance(slot, Value):
                self.values[slot.at] = int(tensor)
            else:
                self.tensors[slot.at] = self.array(tensor)
        self.run_chain(self.main)
        results = [_torch(self.mx, self.tensors[slot.at]) for slot in self.outputs]
        # The state is computed now, because its history would grow by each step otherwise.
        self.tensors = {index: self.tensors[index] for index in self.kept}
        self.mx.eval(*self.tensors.values())
        return results

    def run_chain(self, index: int) -> None:
        """Run the instructions of a chain.

        Raises:
            VerificationError: If one is not known here, or fails.
        """
        for node in self.chains[index]:
            operator = OPERATORS.get(node.name)
            if operator is None:
                raise VerificationError(
                    f"the evaluator of MLX programs does not know the operator {node.name}, so the program cannot be "
                    "verified here; export without verification (verify=False, --no-verify), or for another delegate"
                )
            try:
                result = operator(self.mx, node)
            except VerificationError:
                raise
            except Exception as error:  # mlx raises several classes, and files of others may hold anything
                raise VerificationError(
                    f"MLX cannot compute {node.name}: {first_line(error)}; export again, or for another delegate"
                ) from error
            for name in ("out", "outs"):
                if result is not None and name in node.fields:
                    self.store(node.fields[name], result)

    def store(self, place: Any, result: Any) -> None:
        """Store a result, or a list of results, where references point."""
        if isinstance(place, list):
            for one, value in zip(place, result, strict=True):
                self.store(one, value)
        elif isinstance(place, Value):
            self.values[place.at] = int(result)
        else:
            self.tensors[place.at] = result

    def resolved(self, field: Any) -> Any:
        """Return the tensors and numbers that references point to; other operands unchanged."""
        if isinstance(field, Tensor):
            return self.tensors[field.at]
        if isinstance(field, Value):
            return self.values[field.at]
        if isinstance(field, list):
            return [self.resolved(one) for one in field]
        # The interpreter has numbers of 32 bits. The end of an open slice is a larger one.
        return max(-(2**31), min(field, 2**31 - 1)) if type(field) is int else field

    def array(self, tensor: torch.Tensor) -> Any:
        """Return an array with a tensor's contents."""
        tensor = tensor.detach().contiguous()
        if tensor.dtype == torch.bfloat16:
            return self.mx.array(tensor.view(torch.int16).numpy()).view(self.mx.bfloat16)
        return self.mx.array(tensor.numpy())

    def dtype(self, number: int) -> Any:
        """Return the dtype with a number of ExecuTorch's."""
        return getattr(self.mx, _DTYPES[number][0])

    def bounded(self, shape: Sequence[int]) -> list[int]:
        """Return a shape that the interpreter allocates."""
        if any(size <= 0 for size in shape) or math.prod(shape) * 8 > 2 * _MOST_BYTES:
            raise ValueError(f"the interpreter does not allocate {list(shape)}")
        return list(shape)


class MLXEvaluator:
    """A runner of a program of which MLX takes every method whole.

    Args:
        path: The `.pte`.
        description: What it contains.

    Raises:
        BundleError: If the file cannot be read.
        VerificationError: If a part of it is outside the delegate, which this evaluator does not run.
    """

    def __init__(self, path: Path, description: ProgramDescription) -> None:
        self.methods = description.methods
        self._name = path.name
        with readable(self._name):
            file = deserialized_file(path.read_bytes())
            plans = {plan.name: plan for plan in file.program.execution_plan}
            named = file.named_data
            data = {name: named.buffers[entry.buffer_index] for name, entry in named.pte_data.items()} if named else {}
            self._calls = {name: only_call(plans[name]) for name in self.methods}
            payloads = file.program.backend_delegate_data
            self._graphs = {
                name: Graph(payloads[plans[name].delegates[0].processed.index].data, data) for name in self.methods
            }

    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run a method, see `Runner.run`.

        Raises:
            BundleError: If the graph refers to what it does not have.
            VerificationError: If an instruction is not known here, or fails.
        """
        with readable(self._name):
            outputs = self._graphs[method].run([inputs[index] for index in self._calls[method]])
            return outputs[0] if self.methods[method].is_step else tuple(outputs)


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Convert the arbitrary errors that a damaged file causes in the block."""
    try:
        yield
    except ExportableCacheError:
        raise
    except Exception as error:
        raise BundleError(f"{name} cannot be read: {first_line(error)}; export the model again") from error


def only_call(plan: Any) -> list[int]:
    """Return the index of the method's input for each input of its only delegate call."""
    instructions = [instruction for chain in plan.chains for instruction in chain.instructions]
    if len(instructions) != 1 or len(plan.delegates) != 1:
        raise VerificationError(
            f"method {plan.name!r} has {len(instructions)} instructions and {len(plan.delegates)} calls of the "
            "delegate, and only a program that is one call can be verified here; export it with --no-verify"
        )
    arguments = instructions[0].instr_args.args
    return [plan.inputs.index(one) for one in arguments if one in plan.inputs]


def _slot(slot: Any) -> Tensor | Value:
    return Tensor(slot.Idx()) if slot.SlotType() == 0 else Value(slot.Idx())


def _described(meta: Any) -> tuple[list[int], int]:
    """Return the shape and the dtype's number of a tensor whose sizes are fixed."""
    return [meta.Shape(index).Value() for index in range(meta.ShapeLength())], meta.ScalarType()


def _torch(mx: Any, array: Any) -> torch.Tensor:
    import numpy

    array = mx.contiguous(array)
    if array.dtype == mx.bfloat16:
        return torch.from_numpy(numpy.array(array.view(mx.int16))).view(torch.bfloat16)
    return torch.from_numpy(numpy.array(array))


# -- operators ---------------------------------------------------------------------------------------------------------


def _checked(mx: Any, indices: Any, size: int) -> Any:
    """Return indices, after a check that they are in range: MLX reads other memory otherwise."""
    if isinstance(indices, int):
        low = high = indices
    elif indices.size == 0:
        return indices
    else:
        low, high = int(mx.min(indices)), int(mx.max(indices))
    if low < -size or high >= size:
        raise ValueError(f"indices must be from {-size} to {size - 1}, got {low} to {high}")
    return indices


def _take(mx: Any, node: Node) -> Any:
    axis = node.axis % node.x.ndim
    size = node.x.shape[axis]
    index = _checked(mx, node.index, size)
    return mx.take(node.x, index % size if isinstance(index, int) else index, axis=axis)


def _gather(mx: Any, node: Node) -> Any:
    x, axes, sizes = node.x, node.axes, node.slice_sizes
    rest = [axis for axis in range(x.ndim) if axis not in axes]
    if any(sizes[axis] != (1 if axis in axes else x.shape[axis]) for axis in range(x.ndim)):
        raise ValueError(f"slices {sizes} of {x.shape} are not known here")
    indices = [_checked(mx, one, x.shape[axis]) for one, axis in zip(node.indices, axes, strict=True)]
    found = mx.transpose(x, [*axes, *rest])[tuple(indices)]
    return found.reshape(*found.shape[: found.ndim - len(rest)], *sizes)


def _written(mx: Any, target: Any, axis: int, where: Any, source: Any) -> Any:
    written = mx.array(target)
    written[tuple([slice(None)] * axis) + (where,)] = source
    return written


def _index_copy(mx: Any, node: Node) -> Any:
    axis = node.axis % node.dst.ndim
    if node.indices.ndim != 1 or node.indices.dtype != mx.int64:
        raise ValueError(f"indices must be int64 with one dimension, got {node.indices.dtype} {node.indices.shape}")
    return _written(mx, node.dst, axis, _checked(mx, node.indices, node.dst.shape[axis]), node.update)


def _positive(node: Node, *names: str) -> None:
    """Check operands that MLX divides by: it ends the process if they are 0."""
    for name in names:
        if getattr(node, name) <= 0:
            raise ValueError(f"{name} must be at least 1, got {getattr(node, name)}")


def _slice_update(mx: Any, node: Node) -> Any:
    axis = node.axis % node.dst.ndim
    _positive(node, "step")
    return _written(mx, node.dst, axis, slice(node.start, node.stop, node.step), node.update)


def _slice(mx: Any, node: Node) -> Any:
    # The delegate's `topk`, which chooses experts, reverses its sorted values by a step of -1.
    if node.step != -1:
        _positive(node, "step")
    axis = node.axis % node.x.ndim
    return node.x[tuple([slice(None)] * axis) + (slice(node.start, node.stop, node.step),)]


def _scatter_add(mx: Any, node: Node) -> Any:
    axis, shape = node.axis % node.x.ndim, node.indices.shape
    grids = [
        mx.arange(size).reshape([size if other == dim else 1 for other in range(len(shape))])
        for dim, size in enumerate(shape)
    ]
    grids[axis] = _checked(mx, node.indices, node.x.shape[axis])
    return node.x.at[tuple(grids)].add(node.updates)


def _floor_divide(mx: Any, node: Node) -> Any:
    if not mx.issubdtype(node.a.dtype, mx.inexact):
        raise ValueError("integers are divided in a way that was not compared with a device")
    return mx.floor_divide(node.a, node.b)


def _as_strided(mx: Any, node: Node) -> Any:
    last = node.offset + sum((size - 1) * step for size, step in zip(node.shape, node.strides, strict=True))
    if min((*node.strides, *node.shape, node.offset), default=0) < 0 or last >= node.x.size:
        raise ValueError(f"a view to element {last} of {node.x.size} is out of range")
    return mx.as_strided(node.x, node.graph.bounded(node.shape), node.strides, node.offset)


def _split(mx: Any, node: Node) -> Any:
    sizes, total = node.sizes, node.x.shape[node.axis]
    if len(sizes) == 1:
        return mx.split(node.x, list(range(sizes[0], total, sizes[0])), axis=node.axis)
    return mx.split(node.x, [sum(sizes[: index + 1]) for index in range(len(sizes) - 1)], axis=node.axis)


def _broadcast(mx: Any, node: Node) -> Any:
    shape, given = node.shape, node.x.shape
    added = len(shape) - len(given)
    shape = [given[at - added] if size == -1 else size for at, size in enumerate(shape)]
    return mx.broadcast_to(node.x, node.graph.bounded(shape))


def _tile(mx: Any, node: Node) -> Any:
    node.graph.bounded([*node.x.shape, *node.reps])
    return mx.tile(node.x, node.reps)


def _repeat(mx: Any, node: Node) -> Any:
    node.graph.bounded([*node.x.shape, node.repeats])
    return mx.repeat(node.x, node.repeats, axis=node.axis)


def _arange(mx: Any, node: Node) -> Any:
    node.graph.bounded([math.ceil((node.stop - node.start) / node.step)])
    return mx.arange(node.start, node.stop, node.step, _dtype(node))


def _conv1d(mx: Any, node: Node) -> Any:
    _positive(node, "stride", "dilation", "groups")
    return mx.conv1d(node.x, node.w, node.stride, node.padding, node.dilation, node.groups)


def _matrices(mx: Any, node: Node, left: Any, right: Any) -> list[Any]:
    """Return the indices of the matrices to multiply, which MLX reads as numbers without a sign."""
    sizes = (math.prod(operand.shape[:-2]) for operand in (left, right))
    found = ((node.lhs_indices, next(sizes)), (node.rhs_indices, next(sizes)))
    return [None if index is None else _checked(mx, index, size) % size for index, size in found]


def _gather_mm(mx: Any, node: Node) -> Any:
    indices = _matrices(mx, node, node.a, node.b)
    return mx.gather_mm(node.a, node.b, *indices, sorted_indices=node.sorted_indices)


def _gather_qmm(mx: Any, node: Node) -> Any:
    indices = _matrices(mx, node, node.x, node.w)
    options = {"transpose": node.transpose, **_packing(node), "sorted_indices": node.sorted_indices}
    return mx.gather_qmm(node.x, node.w, node.scales, node.biases, *indices, **options)


def _dequantize(mx: Any, node: Node) -> Any:
    if node.global_scale is not None:
        raise ValueError("scales of scales are not known here")
    return mx.dequantize(node.w, node.scales, node.biases, **_packing(node)).astype(
        node.scales.dtype if node.dtype is None else node.graph.dtype(node.dtype)
    )


def _packing(node: Node) -> dict[str, Any]:
    return {"group_size": node.group_size, "bits": node.bits, "mode": node.mode}


def _attention(mx: Any, node: Node) -> Any:
    mask = node.mask
    if mask is not None and mask.dtype not in (mx.bool_, node.q.dtype):
        mask = mask.astype(node.q.dtype)
    options = {"scale": node.scale, "mask": "causal" if node.causal else mask}
    return mx.fast.scaled_dot_product_attention(node.q, node.k, node.v, **options)


def _gelu(mx: Any, node: Node) -> Any:
    x = node.x
    if node.approximate == "tanh":
        return 0.5 * x * (1 + mx.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1 + mx.erf(x * 0.7071067812))


def _squeeze(mx: Any, node: Node) -> Any:
    dims = [dim for dim in node.dims if node.x.shape[dim] == 1]
    return mx.squeeze(node.x, dims) if dims or not node.dims else node.x


def _rope(mx: Any, node: Node) -> Any:
    base = node.base if node.freqs is None else None
    options = {"traditional": node.traditional, "base": base, "scale": node.scale, "freqs": node.freqs}
    return mx.fast.rope(node.x, node.dims, offset=node.offset, **options)


def _addmm(mx: Any, node: Node) -> Any:
    if node.bias is None:
        return mx.matmul(node.mat1, node.mat2)
    return mx.addmm(node.bias, node.mat1, node.mat2, alpha=node.alpha, beta=node.beta)


def _scan(mx: Any, node: Node) -> None:
    graph, collected = node.graph, [[] for _ in node.fields["outputs"]]  # type: ignore[var-annotated]
    for step in range(node.originals[0].shape[node.scan_axis]):
        graph.store(node.fields["sliced"], [mx.take(one, step, axis=node.scan_axis) for one in node.originals])
        graph.run_chain(node.body_chain_idx)
        for steps, one in zip(collected, node.outputs, strict=True):
            steps.append(one)
    graph.store(node.fields["outputs"], [mx.stack(steps, axis=node.scan_axis) for steps in collected])


def _branch(mx: Any, node: Node) -> None:
    node.graph.run_chain(node.then_chain_idx if node.cond else node.else_chain_idx)


def _dtype(node: Node) -> Any:
    return None if node.scalar_type is None else node.graph.dtype(node.scalar_type)


def _full(mx: Any, shape: Sequence[int], value: float, dtype: Any) -> Any:
    # `mx.full` of a Python float ignores dtypes of integers and bools.
    return mx.full(shape, mx.array(value).astype(dtype))


def _reduced(name: str, *further: str) -> Callable[[Any, Node], Any]:
    def reduce(mx: Any, node: Node) -> Any:
        options = {one: getattr(node, one) for one in further}
        return getattr(mx, name)(node.x, axis=node.axes or None, keepdims=node.keepdims, **options)

    return reduce


def _same(*fields: str) -> Callable[[str], Callable[[Any, Node], Any]]:
    """Return what makes operators that pass their operands to the function of a given name."""

    def operator(name: str) -> Callable[[Any, Node], Any]:
        return lambda mx, node: getattr(mx, name)(*(getattr(node, field) for field in fields))

    return operator


def _names(text: str, made: Callable[[str], Callable[[Any, Node], Any]]) -> dict[str, Callable[[Any, Node], Any]]:
    """Return operators by their names in the schema, whose functions have these names with underscores."""
    return {name: made(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()) for name in text.split()}


#: Operator of the schema -> function of mlx and of the node that returns its result.
OPERATORS: dict[str, Callable[[Any, Node], Any]] = {
    **_names(
        "Sigmoid Tanh Rsqrt Log Floor Ceil Square Exp Sin Cos Tan Arcsin Arccos Arctan Sinh Cosh Arcsinh Arccosh "
        "Arctanh Log2 Log10 Log1p Erf Expm1 Reciprocal Sqrt Abs Sign LogicalNot BitwiseInvert Contiguous",
        _same("x"),
    ),
    **_names(
        "Add Multiply Divide Subtract Maximum Minimum Less LessEqual Greater GreaterEqual Equal NotEqual LogicalAnd "
        "LogicalOr BitwiseAnd BitwiseOr BitwiseXor Power Remainder",
        _same("a", "b"),
    ),
    **_names("Sum Mean Prod Max Min Any All Median", _reduced),
    **_names("Var Std", lambda name: _reduced(name, "ddof")),
    **_names("Sort Argsort", lambda name: lambda mx, node: getattr(mx, name)(node.x, axis=node.axis)),
    **_names("Partition", lambda name: lambda mx, node: getattr(mx, name)(node.x, node.kth, axis=node.axis)),
    **_names("Argmax Argmin", lambda name: lambda mx, node: getattr(mx, name)(node.x, node.axis, node.keepdims)),
    **_names("Tril Triu", _same("x", "k")),
    **_names("Transpose", _same("x", "perm")),
    **_names("ExpandDims", _same("x", "axis")),
    **_names("Reshape", _same("x", "shape")),
    **_names("Where", _same("condition", "x", "y")),
    **_names("Stack Concatenate", _same("tensors", "axis")),
    **_names("Roll", _same("x", "shift", "axes")),
    **_names("Round", _same("x", "decimals")),
    **_names("Clip", _same("x", "a_min", "a_max")),
    "Conv1D": _conv1d,
    "Noop": lambda mx, node: None,
    "IdCopy": lambda mx, node: node.x,
    "Neg": lambda mx, node: mx.negative(node.x),
    "Silu": lambda mx, node: node.x * mx.sigmoid(node.x),
    "Atan2": lambda mx, node: mx.arctan2(node.a, node.b),
    "LogAddExp": lambda mx, node: mx.logaddexp(node.a, node.b),
    "LogSumExp": _reduced("logsumexp"),
    "ArgPartition": lambda mx, node: mx.argpartition(node.x, node.kth, axis=node.axis),
    "AddInt": lambda mx, node: node.a + node.b,
    "SubtractInt": lambda mx, node: node.a - node.b,
    "MultiplyInt": lambda mx, node: node.a * node.b,
    "FloorDivideInt": lambda mx, node: node.a // node.b,
    "ModInt": lambda mx, node: node.a % node.b,
    "SymSize": lambda mx, node: node.a.shape[node.dim],
    "ItemInt": lambda mx, node: int(node.x),
    "Addmm": _addmm,
    "FloorDivide": _floor_divide,
    "Take": _take,
    "TakeAlongAxis": lambda mx, node: mx.take_along_axis(
        node.x, _checked(mx, node.indices, node.x.shape[node.axis]), axis=node.axis
    ),
    "Gather": _gather,
    "ScatterAdd": _scatter_add,
    "IndexCopy": _index_copy,
    "Slice": _slice,
    "SliceUpdate": _slice_update,
    "Split": _split,
    "AsStrided": _as_strided,
    "BroadcastTo": _broadcast,
    "Tile": _tile,
    "Repeat": _repeat,
    "ARange": _arange,
    "Squeeze": _squeeze,
    "Pad": lambda mx, node: mx.pad(
        node.x,
        list(zip(node.pad_width[::2], node.pad_width[1::2], strict=True)),
        mode=node.mode,
        constant_values=node.constant_value,
    ),
    "RMSNorm": lambda mx, node: mx.fast.rms_norm(node.x, node.weight, node.eps),
    "LayerNorm": lambda mx, node: mx.fast.layer_norm(node.x, node.weight, node.bias, node.eps),
    "Rope": _rope,
    "Sdpa": _attention,
    "Gelu": _gelu,
    "Softmax": lambda mx, node: mx.softmax(node.x, axis=node.axis, precise=node.precise),
    "Cumsum": lambda mx, node: mx.cumsum(node.x, axis=node.axis, reverse=node.reverse, inclusive=node.inclusive),
    "AsType": lambda mx, node: node.x.astype(_dtype(node)),
    "Full": lambda mx, node: _full(mx, node.graph.bounded(node.shape), node.v, _dtype(node)),
    "FullLike": lambda mx, node: _full(mx, node.x.shape, node.v, _dtype(node) or node.x.dtype),
    "Tri": lambda mx, node: mx.tri(*node.graph.bounded([node.n, node.m]), node.k, _dtype(node)),
    "QuantizedMatmul": lambda mx, node: mx.quantized_matmul(
        node.x, node.w, node.scales, node.biases, transpose=node.transpose, **_packing(node)
    ),
    "GatherMm": _gather_mm,
    "GatherQmm": _gather_qmm,
    "Dequantize": _dequantize,
    "Scan": _scan,
    "If": _branch,
}
