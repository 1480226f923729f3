"""Native operators for linear layers and embedding tables, and how their weights are packed.

`exportable_cache::linear_float` takes float32 weights, `linear_bfloat16` and `linear_float16` take weights that these
types hold without loss. `linear_bfloat16_rounded` also rounds its inputs to bfloat16. `linear_4bit` takes 4-bit weights
and quantizes activations to 8 bits per token, as torchao's `8da4w` does. `linear_4bit_float` and `linear_4bit_float16`
take 4-bit weights with zero points and scales of these dtypes, and activations in float. `linear_8bit_float` and
`linear_8bit_float16` take 8 bits, and `linear_4bit_shifted` and `linear_8bit_shifted` take zero points in float32,
which minimums of groups give, such as those of GGUF. `embedding_bfloat16`,
`embedding_float16` and `embedding_8bit_float`, with the other forms of groups, look up rows of a table that is tied to
such a layer. Other tables in float are stored in 16 bits if that loses nothing. Sums are in float32.

XNNPACK (ExecuTorch 1.4.1) packs a second copy of the weights when a program is loaded, and multiplies 4-bit weights in
16 bits on processors with AVX2 but without AVX-512, at half the speed. Here weights are packed at export, in blocks of
outputs in the order in which a step reads them, and read from the mapped file. `kernels/src/linear.h` and
`float_linear.h` define the same layout.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from executorch.backends.transforms.utils import get_param_tensor, is_param
from torch.fx import Node

from ....common.tensors import exact_dtype
from ..graph_edits import insert_call, packed_weight, replace_call
from ..quantized import IntegerLayer, dequantized_lookups, fold_linears, integer_layer

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Graph, Node

    from ....common.compat.torch import OpOverload
    from ....common.fs.tensor_files import Scratch


#: Number of outputs in a block.
BLOCK = 16
#: Divisors of the length of a group of 4-bit weights, if activations are rounded and if they are not.
_ROUNDED_MULTIPLE, _FLOAT_MULTIPLE = 32, 16
#: Bytes of a group's bfloat16 scale and of an output's float32 sum in `linear_4bit`.
_SCALE, _SUM = 2, 4
_QUADS = 8
#: Inputs of an output whose 8-bit integers are adjacent.
_WORD = 4


#: Suffix of operator names by dtype of the weights.
NAMES = {torch.float32: "float", torch.bfloat16: "bfloat16", torch.float16: "float16"}
#: Suffix for bfloat16 weights whose inputs are rounded to bfloat16.
ROUNDED = "bfloat16_rounded"


class GroupedForm(NamedTuple):
    """A form of stored weights in groups, for activations in float.

    Attributes:
        bits: Bits of an integer, 4 or 8.
        scales: Dtype of scales.
        zeros: Dtype of zero points; uint8 are integers of as many bits as the weights.
    """

    bits: int
    scales: torch.dtype
    zeros: torch.dtype

    @property
    def header(self) -> int:
        """Bytes of a group's scale and zero point."""
        return self.scales.itemsize + self.zeros.itemsize


#: Forms by suffix of operator names.
GROUPED_FORMS = {
    "4bit_float": GroupedForm(4, torch.float32, torch.uint8),
    "4bit_float16": GroupedForm(4, torch.float16, torch.uint8),
    "4bit_shifted": GroupedForm(4, torch.float32, torch.float32),
    "8bit_float": GroupedForm(8, torch.float32, torch.uint8),
    "8bit_float16": GroupedForm(8, torch.float16, torch.uint8),
    "8bit_shifted": GroupedForm(8, torch.float32, torch.float32),
}


def pack_float(weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Pack float32 weights [outputs, inputs] as the kernel reads them.

    Returns:
        [blocks, inputs, `BLOCK`], or for bfloat16 [blocks, pairs of inputs, `BLOCK`, 2]. Padding is zeros.
    """
    pairs = _pairs(dtype)
    outputs, inputs = weight.shape
    whole = torch.nn.functional.pad(weight.detach().to(dtype), (0, -inputs % pairs, 0, -outputs % BLOCK))
    packed = whole.view(-1, BLOCK, whole.shape[1] // pairs, pairs).transpose(1, 2)
    return packed.contiguous() if pairs > 1 else packed.squeeze(3).contiguous()


def unpack_float(weights: torch.Tensor, inputs: int, outputs: int) -> torch.Tensor:
    """Return the argument of `pack_float`, float32 [outputs, inputs]."""
    whole = weights.transpose(1, 2).reshape(-1, weights.shape[1] * _pairs(weights.dtype))
    return whole[:outputs, :inputs].float()


def _pairs(dtype: torch.dtype) -> int:
    """Return the number of inputs of an output that are adjacent."""
    return 2 if dtype == torch.bfloat16 else 1


def pack(integers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit weights as the kernel reads them, in blocks of `BLOCK` outputs.

    A block has for each output the float32 sum of its weights, for each group a bfloat16 scale, and the integers plus
    8, two per byte.

    Args:
        integers: int8 [outputs, inputs], from -8 to 7; inputs a multiple of 32.
        scales: float [outputs, groups].

    Returns:
        uint8 [blocks, bytes]; padding represents zeros.
    """
    (outputs, inputs), groups = integers.shape, scales.shape[1]
    scales = scales.to(torch.bfloat16)
    grouped = integers.view(outputs, groups, inputs // groups).sum(-1, dtype=torch.int32)
    sums = (scales.double() * grouped).sum(-1, keepdim=True).float()
    return _in_blocks(sums, scales, integers=integers)


def grouped_form(bits: int, scales: torch.Tensor, zero_points: torch.Tensor | None) -> str:
    """Return the name of the smallest form in `GROUPED_FORMS` that stores scales and zero points exactly."""
    if zero_points is not None and zero_points.is_floating_point():
        return f"{bits}bit_shifted"
    return f"{bits}bit_float16" if torch.equal(scales.half().float(), scales.float()) else f"{bits}bit_float"


def pack_groups(
    integers: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor | None, form: GroupedForm
) -> torch.Tensor:
    """Pack weights for activations in float: `(integers - zero_points) * scales`.

    A block has for each group a scale and a zero point plus 2^(bits - 1), and the integers plus as much, in 4 bits as
    in `pack`, in 8 bits in the order of inputs. Nothing is added to zero points in float32 of 8 bits, because that
    would round them.

    Args:
        integers: int8 [outputs, inputs], at least -2^(bits - 1); inputs a multiple of 16.
        scales: Float [outputs, groups].
        zero_points: int8 or float32 [outputs, groups], or None for zeros.
        form: How they are stored.

    Returns:
        uint8 [blocks, bytes]; padding represents zeros.
    """
    zeros = torch.zeros(scales.shape, dtype=torch.int8) if zero_points is None else zero_points
    bias = 2 ** (form.bits - 1)
    shifted = zeros.to(torch.int16) + bias if not zeros.is_floating_point() else zeros + _bias_of_floats(form)
    return _in_blocks(scales.to(form.scales), shifted.to(form.zeros), integers=integers, bits=form.bits)


def _bias_of_floats(form: GroupedForm) -> int:
    return 8 if form.bits == 4 else 0


def _in_blocks(*headers: torch.Tensor, integers: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Return uint8 [blocks, bytes]: the headers [outputs, ...] of each block's outputs, then the integers."""
    outputs, inputs = integers.shape
    blocks = -(-outputs // BLOCK)
    missing = blocks * BLOCK - outputs
    bias = 2 ** (bits - 1)
    # Padded with the bias, which represents zero.
    whole = torch.nn.functional.pad((integers.to(torch.int16) + bias).to(torch.uint8), (0, 0, 0, missing), value=bias)
    if bits == 4:
        whole = whole.view(blocks, BLOCK, inputs // _QUADS, 2, _QUADS // 2)
        words = whole[..., 0, :] | (whole[..., 1, :] << 4)
    else:
        words = whole.view(blocks, BLOCK, inputs // _WORD, _WORD)
    padded = (torch.nn.functional.pad(header, (0, 0, 0, missing)).view(blocks, BLOCK, -1) for header in headers)
    parts = (*(part.transpose(1, 2) for part in padded), words.transpose(1, 2))
    return torch.cat([part.contiguous().view(torch.uint8).reshape(blocks, -1) for part in parts], dim=1)


def unpack(weights: torch.Tensor, inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the arguments of `pack`: int8 [outputs, inputs] and bfloat16 [outputs, groups]."""
    groups = (weights.shape[1] // BLOCK - _SUM - inputs // 2) // _SCALE
    header, integers = _from_blocks(weights, inputs, outputs)
    return integers, _by_output(header[:, BLOCK * _SUM :], torch.bfloat16, groups)[:outputs]


def unpack_groups(
    weights: torch.Tensor, inputs: int, outputs: int, form: GroupedForm
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the arguments of `pack_groups`."""
    groups = (weights.shape[1] // BLOCK - inputs * form.bits // 8) // form.header
    header, integers = _from_blocks(weights, inputs, outputs, form.bits)
    scales, zeros = header.split([BLOCK * each.itemsize * groups for each in form[1:]], dim=1)
    zeros, bias = _by_output(zeros, form.zeros, groups)[:outputs], 2 ** (form.bits - 1)
    floats = zeros.is_floating_point()
    zeros = zeros - _bias_of_floats(form) if floats else (zeros.to(torch.int16) - bias).to(torch.int8)
    return integers, _by_output(scales, form.scales, groups)[:outputs], zeros


def _unpacked_groups(weights: torch.Tensor, inputs: int, outputs: int, form: GroupedForm) -> torch.Tensor:
    """Return the weights of `pack_groups`, float32 [outputs, inputs]."""
    integers, scales, zeros = unpack_groups(weights, inputs, outputs, form)
    grouped = integers.view(*scales.shape, -1).float() - zeros[..., None]
    return (grouped * scales.float()[..., None]).view(outputs, inputs)


def _from_blocks(weights: torch.Tensor, inputs: int, outputs: int, bits: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of the headers of `_in_blocks`, and the integers [outputs, inputs]."""
    blocks, size = weights.shape
    packed = BLOCK * inputs * bits // 8
    header, words = weights.split([size - packed, packed], dim=1)
    if bits == 4:
        words = words.reshape(blocks, inputs // _QUADS, BLOCK, _QUADS // 2)
        whole = torch.stack([words & 15, words >> 4], dim=3).permute(0, 2, 1, 3, 4)
    else:
        whole = words.reshape(blocks, inputs // _WORD, BLOCK, _WORD).transpose(1, 2)
    return header, (whole.reshape(blocks * BLOCK, inputs)[:outputs].to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)


def _by_output(part: torch.Tensor, dtype: torch.dtype, groups: int) -> torch.Tensor:
    """Return a header's bytes [blocks, ...] as [blocks * `BLOCK`, groups] of a dtype."""
    return part.contiguous().view(dtype).view(-1, groups, BLOCK).transpose(1, 2).reshape(-1, groups)


#: Limit of layers in one call, as in `kernels/src/linear.h`.
MAX_LAYERS = 4
_library = torch.library.Library("exportable_cache", "FRAGMENT")
_LINEAR = "(Tensor source, Tensor weights, Tensor? bias, int outputs"
_LINEARS = "(Tensor source, Tensor[] weights, Tensor[] biases, int[] outputs"
_PLAIN = torch.ops.aten.linear.default


class _Packed(NamedTuple):
    """Arguments of a native operator for one layer."""

    operator: OpOverload
    source: Node
    weight: Node
    bias: Node | None
    outputs: int


def linears_to_native(
    program: ExportedProgram, rounded: bool = False, scratch: Scratch | None = None
) -> ExportedProgram:
    """Rewrite each linear layer that a native operator supports, in place; others are unchanged.

    Layers with the same input, such as query, key and value projections, become one call, because rows are then
    quantized once and threads synchronize once.

    Args:
        program: Program to rewrite.
        rounded: Round the inputs of layers with bfloat16 weights to bfloat16.
        scratch: See `packed_weight`.
    """
    graph = fold_linears(program).graph
    by_input: dict[tuple[OpOverload, Node, bool], list[tuple[Node, _Packed]]] = {}
    for node in list(graph.nodes):
        layer = _packed_integers(program, node, scratch) or _packed_float(program, node, rounded, scratch)
        if layer is None:
            continue
        by_input.setdefault((layer.operator, layer.source, layer.bias is None), []).append((node, layer))
    made = [
        one
        for layers in by_input.values()
        for start in range(0, len(layers), MAX_LAYERS)
        for one in _called(graph, layers[start : start + MAX_LAYERS])
    ]
    # After all calls are inserted, because some read results of others.
    for node, result in made:
        replace_call(node, result)
    if made:
        graph.eliminate_dead_code()
        program.graph_module.recompile()
    return program


def _called(graph: Graph, layers: list[tuple[Node, _Packed]]) -> list[tuple[Node, Node]]:
    """Insert one call, where the first of the layers is, and return each layer with its result."""
    first, layer = layers[0]
    weights = [one.weight for _, one in layers]
    outputs = [one.outputs for _, one in layers]
    with graph.inserting_before(first):
        if len(layers) == 1:
            call = insert_call(graph, layer.operator, layer.source, layer.weight, layer.bias, layer.outputs)
            results = [call]
        else:
            biases = [one.bias for _, one in layers if one.bias is not None]
            call = insert_call(graph, _TOGETHER[layer.operator], layer.source, weights, biases, outputs)
            results = [insert_call(graph, operator.getitem, call, index) for index in range(len(layers))]
    for (node, _), result in zip(layers, results, strict=True):
        result.meta = {**node.meta, "val": result.meta["val"]}
    return [(node, result) for (node, _), result in zip(layers, results, strict=True)]


def _packed_integers(program: ExportedProgram, node: Node, scratch: Scratch | None) -> _Packed | None:
    layer = integer_layer(node)
    if layer is None or layer.group % (_ROUNDED_MULTIPLE if layer.rounds else _FLOAT_MULTIPLE):
        return None
    integers, scales, zeros = _values(program, layer)
    if layer.rounds:
        if layer.bits != 4 or (zeros is not None and bool(zeros.any())):
            return None
        call = torch.ops.exportable_cache.linear_4bit.default
        packed = packed_weight(program, layer.integers, lambda: pack(integers, scales), scratch)
    else:
        name, packed = _packed_groups(program, layer, scratch)
        call = getattr(torch.ops.exportable_cache, f"linear_{name}").default
    return _Packed(call, layer.source, packed, layer.bias, integers.shape[0])


def _values(program: ExportedProgram, layer: IntegerLayer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the integers, scales and zero points of a layer."""
    integers, scales = (get_param_tensor(program, part) for part in (layer.integers, layer.scale))
    zeros = None if layer.zero_point is None else get_param_tensor(program, layer.zero_point)
    return integers, scales, zeros


def _packed_groups(program: ExportedProgram, layer: IntegerLayer, scratch: Scratch | None) -> tuple[str, Node]:
    """Return the form of a layer's weights for activations in float, and the weights in it."""
    integers, scales, zeros = _values(program, layer)
    name = grouped_form(layer.bits, scales, zeros)
    form = GROUPED_FORMS[name]
    return name, packed_weight(program, layer.integers, lambda: pack_groups(integers, scales, zeros, form), scratch)


def is_native_linear(program: ExportedProgram, node: Node) -> bool:
    """Return True if a native operator supports this float32 layer."""
    if node.target is not _PLAIN:
        return False
    found: Any = node.args
    source, weight = found[:2]
    if not is_param(program, weight):
        return False
    form = weight.meta["val"]
    return form.dtype == source.meta["val"].dtype == torch.float32 and form.shape[0] >= BLOCK


def _packed_float(program: ExportedProgram, node: Node, rounded: bool, scratch: Scratch | None) -> _Packed | None:
    """Return the packed layer, or None if it is unsupported or its weight has other readers, such as a tied table."""
    if not is_native_linear(program, node):
        return None
    found: list[Any] = [*node.args, None]
    source, weight, bias = found[:3]
    if any(user.target is not _PLAIN for user in weight.users):
        return None
    numbers = get_param_tensor(program, weight)
    dtype = exact_dtype(numbers)
    name = ROUNDED if rounded and dtype == torch.bfloat16 else NAMES[dtype]
    call = getattr(torch.ops.exportable_cache, f"linear_{name}").default
    packed = packed_weight(program, weight, lambda: pack_float(numbers, dtype), scratch)
    return _Packed(call, source, packed, bias, len(numbers))


def linear_float(source: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, outputs: int) -> torch.Tensor:
    """Compute a linear layer in plain operators, as the kernels of float32, bfloat16 and float16 weights do.

    Args:
        source: float32 [..., inputs].
        weights: Weights packed by `pack_float`.
        bias: float32 [outputs], or None.
        outputs: Number of outputs.

    Returns:
        float32 [..., outputs].
    """
    return torch.nn.functional.linear(source, unpack_float(weights, source.shape[-1], outputs), bias)


def linear_bfloat16_rounded(
    source: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, outputs: int
) -> torch.Tensor:
    """Compute `linear_float` of inputs that are rounded to bfloat16, to nearest and ties to even."""
    return linear_float(source.to(torch.bfloat16).float(), weights, bias, outputs)


def linear_4bit(source: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, outputs: int) -> torch.Tensor:
    """Compute a linear layer over 4-bit weights and an 8-bit input in plain operators, as the kernel does.

    Args:
        source: float32 [..., inputs].
        weights: uint8 [blocks, bytes], packed by `pack`.
        bias: float32 [outputs], or None.
        outputs: Number of outputs.

    Returns:
        float32 [..., outputs].
    """
    integers, scales = unpack(weights, source.shape[-1], outputs)
    groups = scales.shape[1]
    plain = (integers.view(outputs, groups, -1) * scales.float()[..., None]).view(outputs, -1)
    lowest, highest = source.amin(-1, keepdim=True).clamp(max=0), source.amax(-1, keepdim=True).clamp(min=0)
    scale = ((highest - lowest) / 255).clamp(min=torch.finfo(torch.float32).eps)
    zero = (-128 - torch.round(lowest / scale)).clamp(-128, 127)
    rounded = (torch.round(source * (1 / scale)) + zero).clamp(-128, 127)
    return torch.nn.functional.linear((rounded - zero) * scale, plain, bias)


def _linear_groups(form: GroupedForm) -> Callable[..., torch.Tensor]:
    """Return a linear layer over `pack_groups` in plain operators, as the kernel computes it."""

    def linear(source: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, outputs: int) -> torch.Tensor:
        return torch.nn.functional.linear(source, _unpacked_groups(weights, source.shape[-1], outputs, form), bias)

    return linear


def _output(source: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, outputs: int) -> torch.Tensor:
    return source.new_empty(*source.shape[:-1], outputs)


def define_operator(
    name: str, arguments: str, plain: Callable[..., torch.Tensor], output: Callable[..., torch.Tensor]
) -> None:
    """Define an operator that returns a tensor, and its out variant, which ExecuTorch calls.

    Args:
        name: Name in `torch.ops.exportable_cache`.
        arguments: Their schema, from the opening parenthesis to the last argument.
        plain: Implementation in plain operators.
        output: Implementation for fake tensors.
    """

    def into(*given: object, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(plain(*given))

    _implement(f"{name}{arguments}) -> Tensor", plain)
    _implement(f"{name}.out{arguments}, *, Tensor(a!) out) -> Tensor(a!)", into)
    torch.library.register_fake(f"exportable_cache::{name}", output, lib=_library)


def _implement(schema: str, function: Callable[..., Any]) -> None:
    _library.define(schema)
    _library.impl(schema[: schema.index("(")], function, "CompositeExplicitAutograd")


def _define(name: str, plain: Callable[..., torch.Tensor]) -> None:
    """Define operators for one layer (`linear_...`) and several (`linears_...`)."""

    def several(of: Callable[..., torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
        def call(
            source: torch.Tensor,
            weights: Sequence[torch.Tensor],
            biases: Sequence[torch.Tensor],
            outputs: Sequence[int],
        ) -> list[torch.Tensor]:
            each = biases or itertools.repeat(None, len(weights))
            return [of(source, *layer) for layer in zip(weights, each, outputs, strict=True)]

        return call

    def several_into(*arguments: Any, out: Sequence[torch.Tensor]) -> None:
        for target, result in zip(out, several(plain)(*arguments), strict=True):
            target.copy_(result)

    define_operator(name, _LINEAR, plain, _output)
    together = name.replace("linear", "linears")
    _implement(f"{together}{_LINEARS}) -> Tensor[]", several(plain))
    _implement(f"{together}.out{_LINEARS}, *, Tensor(a!)[] out) -> ()", several_into)
    torch.library.register_fake(f"exportable_cache::{together}", several(_output), lib=_library)


for _name in NAMES.values():
    _define(f"linear_{_name}", linear_float)
_define(f"linear_{ROUNDED}", linear_bfloat16_rounded)
_define("linear_4bit", linear_4bit)
for _name, _form in GROUPED_FORMS.items():
    _define(f"linear_{_name}", _linear_groups(_form))
_TOGETHER: dict[OpOverload, OpOverload] = {
    getattr(torch.ops.exportable_cache, f"linear_{name}").default: getattr(
        torch.ops.exportable_cache, f"linears_{name}"
    ).default
    for name in (*NAMES.values(), ROUNDED, "4bit", *GROUPED_FORMS)
}


_LOOKUP = torch.ops.aten.embedding.default
_EMBEDDING = "(Tensor weights, Tensor tokens, int rows, int dim"


def tables_to_native(program: ExportedProgram, scratch: Scratch | None = None) -> ExportedProgram:
    """Rewrite each lookup in a table that 16 bits hold without loss, in place.

    A tied table is stored once, as the head's operator reads it. Call this before linear layers are rewritten.

    Args:
        program: Program to rewrite.
        scratch: See `packed_weight`.
    """
    graph = program.graph
    for node in graph.find_nodes(op="call_function", target=_LOOKUP):
        table, tokens = _arguments(node)
        if not is_param(program, table) or table.meta["val"].dtype != torch.float32:
            continue
        layers = [user for user in table.users if user.target is not _LOOKUP]
        if tokens.meta["val"].dtype != torch.int64 or not all(is_native_linear(program, layer) for layer in layers):
            continue
        numbers = get_param_tensor(program, table)
        dtype = exact_dtype(numbers)
        if dtype != torch.float32:
            replace_call(node, _looked_up(program, node, numbers.to(dtype), bool(layers), scratch))
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program


def tied_tables_to_native(program: ExportedProgram, scratch: Scratch | None = None) -> ExportedProgram:
    """Rewrite each lookup in a quantized table that a native linear layer reads as well, in place.

    The table is stored once, as the layer's operator reads it. A table with zero points is stored so in every method,
    because operators over rows have none. Call this before `fuse_quantized_embeddings`, which would store tables in the
    order of rows.

    Args:
        program: Program to rewrite.
        scratch: See `packed_weight`.
    """
    if not dequantized_lookups(program):
        return program
    graph = fold_linears(program).graph
    # Found again, because folding removes those whose result is not used, as in the encoder of Qwen 2.5 VL.
    for node in dequantized_lookups(program):
        table, tokens = _arguments(node)
        if tokens.meta["val"].dtype != torch.int64 or node.meta["val"].dtype != torch.float32:
            continue
        heads = (integer_layer(one) for one in graph.nodes)
        layer = next((one for one in heads if one is not None and _has_weights(program, one, table)), None)
        if layer is None:
            layer = _table_with_zeros(program, table, tokens)
        if layer is None or layer.rounds or layer.group % _FLOAT_MULTIPLE:
            continue
        name, weight = _packed_groups(program, layer, scratch)
        operator = getattr(torch.ops.exportable_cache, f"embedding_{name}").default
        with graph.inserting_before(node):
            result = insert_call(graph, operator, weight, tokens, *table.meta["val"].shape)
        result.meta = {**node.meta, "val": result.meta["val"]}
        replace_call(node, result)
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program


def _table_with_zeros(program: ExportedProgram, table: Node, tokens: Node) -> IntegerLayer | None:
    """Return a table with zero points as a layer over it, or None if it has none and can be stored by rows.

    It is for methods without the head, such as that of an EAGLE-3 head, which has its own.
    """
    arguments: Any = table.args
    integers, (_, group), scale, zero_point, _, *limits = arguments[:7]
    if zero_point is None or not bool(get_param_tensor(program, zero_point).any()):
        return None
    bits = 4 if tuple(limits) == (-8, 7) else 8
    return IntegerLayer(tokens, integers, scale, zero_point, None, group, False, bits)


def _has_weights(program: ExportedProgram, layer: IntegerLayer, table: Node) -> bool:
    """Return True if a layer reads the integers and the scales that a table is dequantized from."""
    arguments: Any = table.args
    parts = ((layer.integers, arguments[0]), (layer.scale, arguments[2]))
    # By address, because tied layers are traced with parameters of their own over the same memory.
    return all(
        get_param_tensor(program, one).data_ptr() == get_param_tensor(program, other).data_ptr() for one, other in parts
    )


def _arguments(lookup: Node) -> tuple[Node, Node]:
    """Return the table and the tokens of a lookup."""
    found: Any = lookup.args
    return found[0], found[1]


def _looked_up(
    program: ExportedProgram, node: Node, numbers: torch.Tensor, is_tied: bool, scratch: Scratch | None
) -> Node:
    """Insert a lookup in the table, given its values in the dtype that is stored."""
    table, tokens = _arguments(node)
    if is_tied:
        table = packed_weight(program, table, lambda: pack_float(numbers, numbers.dtype), scratch)
        with program.graph.inserting_before(node):
            operator = getattr(torch.ops.exportable_cache, f"embedding_{NAMES[numbers.dtype]}").default
            result = insert_call(program.graph, operator, table, tokens, *numbers.shape)
    else:
        table = packed_weight(program, table, numbers.detach, scratch)
        with program.graph.inserting_before(node):
            rows = insert_call(program.graph, _LOOKUP, table, tokens)
            result = insert_call(program.graph, torch.ops.aten.to.dtype, rows, torch.float32)
    result.meta = {**node.meta, "val": result.meta["val"]}
    return result


def embedding(weights: torch.Tensor, tokens: torch.Tensor, rows: int, dim: int) -> torch.Tensor:
    """Look up rows of a table in plain operators, as the kernels do.

    Args:
        weights: bfloat16 or float16, packed by `pack_float`.
        tokens: int64 [...], from 0 to rows - 1.
        rows: Number of rows.
        dim: Length of a row.

    Returns:
        float32 [..., dim].
    """
    return unpack_float(weights, dim, rows)[tokens]


def _rows_of_groups(form: GroupedForm) -> Callable[..., torch.Tensor]:
    """Return a lookup in a table of `pack_groups` in plain operators, as the kernel computes it."""

    def look_up(weights: torch.Tensor, tokens: torch.Tensor, rows: int, dim: int) -> torch.Tensor:
        return _unpacked_groups(weights, dim, rows, form)[tokens]

    return look_up


def _embedding_output(weights: torch.Tensor, tokens: torch.Tensor, rows: int, dim: int) -> torch.Tensor:
    return weights.new_empty(*tokens.shape, dim, dtype=torch.float32)


for _name in ("embedding_bfloat16", "embedding_float16"):
    define_operator(_name, _EMBEDDING, embedding, _embedding_output)
for _name, _form in GROUPED_FORMS.items():
    define_operator(f"embedding_{_name}", _EMBEDDING, _rows_of_groups(_form), _embedding_output)
