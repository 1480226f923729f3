"""Linear layers as our operators: how weights are packed, which layers they take, programs with them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

pytest.importorskip("executorch", reason="the executorch extra is not installed")

from torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor import IntxUnpackedToInt8Tensor
from torchao.utils import unwrap_tensor_subclass

from exportable_cache.backends.executorch.native.linears import (
    BLOCK,
    GROUPED_FORMS,
    ROUNDED,
    linears_to_native,
    pack,
    pack_groups,
    tables_to_native,
    tied_tables_to_native,
    unpack,
    unpack_groups,
)
from exportable_cache.backends.executorch.quantized import FoldedLinears, fuse_quantized_embeddings, integer_layer
from exportable_cache.common.tensors import exact_dtype
from exportable_cache.models.quantization.quantize import quantize
from exportable_cache.models.quantization.spec import Quantization

from ..support.models import tiny_model
from .native_linear_programs import DTYPES, KINDS, packed_of


@pytest.mark.parametrize(("outputs", "inputs", "group"), [(16, 32, 32), (40, 96, 32), (1, 128, 64), (33, 64, 64)])
def test_weights_are_packed_without_loss(outputs: int, inputs: int, group: int) -> None:
    integers = torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8)
    scales = torch.randn(outputs, inputs // group).to(torch.bfloat16)
    packed = pack(integers, scales)
    assert packed.shape == (-(-outputs // BLOCK), BLOCK * (4 + 2 * inputs // group + inputs // 2))
    found = unpack(packed, inputs, outputs)
    assert torch.equal(found[0], integers) and torch.equal(found[1], scales)
    # Each block begins with the sums of what its outputs are multiplied by.
    sums = packed[:, : 4 * BLOCK].contiguous().view(torch.float32).flatten()[:outputs]
    plain = integers.view(outputs, -1, group) * scales.float()[..., None]
    torch.testing.assert_close(sums, plain.sum((1, 2)))


@pytest.mark.parametrize("kind", GROUPED_FORMS)
@pytest.mark.parametrize(("outputs", "inputs", "group"), [(16, 32, 16), (33, 128, 64), (1, 128, 128)])
def test_groups_with_zero_points_are_packed_without_loss(kind: str, outputs: int, inputs: int, group: int) -> None:
    """Check the packed bytes, and that the operator is a layer over the dequantized weight."""
    form, shape = GROUPED_FORMS[kind], (outputs, inputs // group)
    end = 2 ** (form.bits - 1)
    integers = torch.randint(-end, end, (outputs, inputs), dtype=torch.int8)
    scales, zeros = torch.randn(shape).to(form.scales), torch.randint(-end, end, shape, dtype=torch.int8)
    zeros = zeros + 0.25 if form.zeros == torch.float32 else zeros
    packed = pack_groups(integers, scales, zeros, form)
    assert packed.shape == (-(-outputs // BLOCK), BLOCK * (form.header * shape[1] + inputs * form.bits // 8))
    for found, expected in zip(unpack_groups(packed, inputs, outputs, form), (integers, scales, zeros), strict=True):
        assert torch.equal(found, expected)
    spread = (part.float().repeat_interleave(group, 1) for part in (zeros, scales))
    weight, source = (integers - next(spread)) * next(spread), torch.randn(2, inputs)
    found = getattr(torch.ops.exportable_cache, f"linear_{kind}")(source, packed, None, outputs)
    torch.testing.assert_close(found, nn.functional.linear(source, weight))


def exported(linear: str, scales: str | None = None) -> tuple[nn.Module, torch.export.ExportedProgram]:
    """A quantised layer with a bias behind one without, and its program as an export traces it."""

    class Layers(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.mlp = model.model.layers[0].mlp

        def forward(self, source: torch.Tensor) -> torch.Tensor:
            return self.mlp(source)

    model = tiny_model("llama", hidden_size=64, intermediate_size=96, mlp_bias=True)
    layers = Layers(quantize(model, Quantization(linear, scales=scales)).model)
    with torch.no_grad(), FoldedLinears(layers):
        return layers, torch.export.export(layers, (torch.randn(1, 5, 64),))


@pytest.mark.parametrize("scales", ["mse", "signed_mse"])
def test_the_operator_is_the_layer_that_torchao_has(scales: str) -> None:
    layers, program = exported("8da4w", scales)
    stored = [tensor for tensor in program.state_dict.values() if tensor.dtype == torch.bfloat16]
    assert len(stored) == 3 and any((tensor < 0).any() for tensor in stored) == (scales == "signed_mse")
    rewritten = linears_to_native(program)
    # The two that take the same rows are one call.
    targets = [str(node.target) for node in rewritten.graph.nodes]
    assert [targets.count(f"exportable_cache.{name}.default") for name in ("linears_4bit", "linear_4bit")] == [1, 1]
    assert not any(integer_layer(node) for node in rewritten.graph.nodes)
    source = torch.randn(1, 5, 64) * torch.tensor([1e-3, 1.0, 30.0, 0.0, 2.0])[:, None]
    with torch.no_grad():
        torch.testing.assert_close(rewritten.module()(source), layers(source), atol=1e-5, rtol=1e-5)


def test_weights_alone_are_multiplied_by_floats() -> None:
    """Check that `4w` has scales in 16 bits, and the operators that do not round activations."""
    layers, program = exported("4w", "signed_mse")
    rewritten = linears_to_native(program)
    targets = [str(node.target) for node in rewritten.graph.nodes]
    names = ("linears_4bit_float16", "linear_4bit_float16")
    assert [targets.count(f"exportable_cache.{name}.default") for name in names] == [1, 1]
    source = torch.randn(1, 5, 64)
    with torch.no_grad():
        torch.testing.assert_close(rewritten.module()(source), layers(source), atol=1e-5, rtol=1e-5)


def test_layers_of_other_kinds_are_left_to_the_delegate() -> None:
    _, program = exported("8da8w")
    before = [node.target for node in program.graph.nodes]
    assert [node.target for node in linears_to_native(program).graph.nodes] == before


@pytest.mark.parametrize("kind", KINDS)
def test_the_operators_give_what_out_is_filled_with(kind: str) -> None:
    operator = getattr(torch.ops.exportable_cache, f"linear_{kind}")
    given = (torch.randn(2, 3, 32), packed_of(kind, torch.randint(-8, 8, (20, 32))), torch.randn(20), 20)
    found, out = operator(*given), torch.empty(2, 3, 20)
    assert torch.equal(operator.out(*given, out=out), found)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_several_layers_are_each_by_itself(kind: str, has_bias: bool) -> None:
    one, several = (getattr(torch.ops.exportable_cache, f"{each}_{kind}") for each in ("linear", "linears"))
    source, outputs = torch.randn(2, 3, 32), [20, 1, 48]
    weights = [packed_of(kind, torch.randint(-8, 8, (each, 32))) for each in outputs]
    biases = [torch.randn(each) for each in outputs if has_bias]
    found, out = several(source, weights, biases, outputs), [torch.empty(2, 3, each) for each in outputs]
    assert several.out(source, weights, biases, outputs, out=out) is None
    for index, each in enumerate(outputs):
        expected = one(source, weights[index], biases[index] if has_bias else None, each)
        assert torch.equal(found[index], expected) and torch.equal(out[index], expected)


@pytest.mark.parametrize("inputs", [32, 33])
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_weights_in_16_bits_are_those_in_float32(kind: str, inputs: int) -> None:
    """Packed and looked up, of an odd number of inputs as of an even one."""
    weight, source = torch.randn(20, inputs).to(DTYPES[kind]).float(), torch.randn(2, 3, inputs)
    assert exact_dtype(weight) == DTYPES[kind]
    packed = packed_of(kind, weight)
    linear, look_up = (getattr(torch.ops.exportable_cache, f"{name}_{kind}") for name in ("linear", "embedding"))
    shape = (2, inputs, BLOCK) if kind == "float16" else (2, 17 if inputs == 33 else 16, BLOCK, 2)
    assert packed.dtype == DTYPES[kind] and packed.shape == shape
    assert torch.equal(linear(source, packed, None, 20), nn.functional.linear(source, weight))
    tokens, out = torch.tensor([[0, 19, 7]]), torch.empty(1, 3, inputs)
    assert torch.equal(look_up(packed, tokens, 20, inputs), weight[tokens])
    assert torch.equal(look_up.out(packed, tokens, 20, inputs, out=out), weight[tokens])


class Alike(nn.Module):
    """Layers of the same rows, more than go together, some of them without a bias, and one of other rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 16 + index, bias=index not in (1, 6)) for index in range(7))
        self.behind = nn.Linear(16, 16)

    def forward(self, source: torch.Tensor) -> list[torch.Tensor]:
        first, *others = (layer(source) for layer in self.layers)
        return [self.behind(first), *others]


def test_layers_of_the_same_rows_are_one_call() -> None:
    module, source = Alike().eval(), torch.randn(1, 3, 32)
    with torch.no_grad():
        program = linears_to_native(torch.export.export(module, (source,)))
        calls = [
            node for node in program.graph.nodes if "linear" in str(node.target) and "getitem" not in str(node.target)
        ]
        found = [
            (str(node.target).split(".")[1], len(node.args[1]) if isinstance(node.args[1], list) else 1)
            for node in calls
        ]
        assert found == [("linears_float", 4), ("linears_float", 2), ("linear_float", 1), ("linear_float", 1)]
        for given, expected in zip(program.module()(source), module(source), strict=True):
            torch.testing.assert_close(given, expected, atol=1e-6, rtol=1e-6)


class Head(nn.Module):
    """A table, and a head over it that may be tied to it, behind a layer that is called twice."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.table, self.layer, self.few = nn.Embedding(50, 32), nn.Linear(32, 32), nn.Linear(32, 3)
        self.head = nn.Linear(32, 50, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states = self.layer(self.layer(self.table(tokens)))
        return self.head(states), self.few(states)


def own_program(module: nn.Module, tokens: torch.Tensor, rounded: bool = False) -> torch.export.ExportedProgram:
    with torch.no_grad():
        return linears_to_native(tables_to_native(torch.export.export(module, (tokens,))), rounded)


@pytest.mark.parametrize("tied", [False, True])
def test_float_layers_become_the_operator_but_for_tied_heads_and_few_outputs(tied: bool) -> None:
    module, tokens = Head(tied).eval(), torch.tensor([[1, 4, 7]])
    program = own_program(module, tokens)
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("exportable_cache.linear_float.default") == (2 if tied else 3)
    assert targets.count("aten.embedding.default") == 1
    # What is called twice is packed once.
    assert sum("packed" in name for name in program.state_dict) == (1 if tied else 2)
    with torch.no_grad():
        for found, expected in zip(program.module()(tokens), module(tokens), strict=True):
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_what_16_bits_have_without_loss_is_kept_so(kind: str, tied: bool) -> None:
    """A tied table once, in the form of its head."""
    module, tokens = Head(tied).to(DTYPES[kind]).float().eval(), torch.tensor([[1, 4, 7]])
    program = own_program(module, tokens)
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count(f"exportable_cache.linear_{kind}.default") == 3
    assert targets.count(f"exportable_cache.embedding_{kind}.default") == tied
    read = [node.meta["val"] for node in program.graph.find_nodes(op="placeholder") if node.users]
    packed = [one for one in read if one.dtype == DTYPES[kind]]
    assert len(packed) == (2 if tied else 3)
    # Of float32 are biases, and the layer of three outputs, which is no operator of ours.
    assert sorted(one.numel() for one in read if one.dtype == torch.float32) == [3, 32, 3 * 32]
    with torch.no_grad():
        for found, expected in zip(program.module()(tokens), module(tokens), strict=True):
            assert torch.equal(found, expected)


class TiedRows(nn.Module):
    """A quantized table, and the head that is tied to it."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.table, self.head = model.get_input_embeddings(), model.get_output_embeddings()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens))


def test_a_quantized_table_is_stored_once_with_its_head() -> None:
    """Look up rows in the blocks of the head's operator, where the table would be stored by rows as well."""
    model = tiny_model("llama", num_hidden_layers=1, hidden_size=64, head_dim=16, tie_word_embeddings=True)
    module, tokens = (
        TiedRows(quantize(model, Quantization("8w", embeddings="8w")).model).eval(),
        torch.tensor([[1, 4, 7]]),
    )
    with torch.no_grad(), FoldedLinears(module):
        program = torch.export.export(module, (tokens,))
    with torch.no_grad():
        program = linears_to_native(fuse_quantized_embeddings(tied_tables_to_native(program)))
        targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        assert [name.split(".")[1] for name in targets] == ["embedding_8bit_float", "linear_8bit_float"]
        read = [node for node in program.graph.find_nodes(op="placeholder") if node.users]
        assert [len(node.users) for node in read if node.meta["val"].dtype == torch.uint8] == [2] and len(read) == 2
        torch.testing.assert_close(program.module()(tokens), module(tokens), atol=1e-5, rtol=1e-6)


def test_a_table_with_zero_points_needs_no_head() -> None:
    """Look up rows in blocks in a method whose head is another one, such as that of an EAGLE-3 head."""
    integers, scales, zeros = torch.randint(-8, 8, (40, 64)), torch.rand(40, 2) + 0.5, torch.randn(40, 2)
    weight = IntxUnpackedToInt8Tensor(integers.to(torch.int8), scales, zeros, torch.int4, (1, 32), torch.float32, None)
    table, tokens = nn.Embedding(40, 64), torch.tensor([[1, 4, 39]])
    table.weight = nn.Parameter(weight, requires_grad=False)
    module = unwrap_tensor_subclass(nn.Sequential(table))
    with torch.no_grad():
        program = torch.export.export(module, (tokens,))
        program = fuse_quantized_embeddings(tied_tables_to_native(program))
        (call,) = [node for node in program.graph.nodes if node.op == "call_function"]
        assert str(call.target) == "exportable_cache.embedding_4bit_shifted.default"
        torch.testing.assert_close(program.module()(tokens), module(tokens), atol=1e-5, rtol=0)


def test_rounded_inputs_are_those_that_bfloat16_has() -> None:
    operator = getattr(torch.ops.exportable_cache, f"linear_{ROUNDED}")
    weight, source = torch.randn(20, 33).bfloat16().float(), torch.randn(2, 3, 33)
    # A tie, whose even neighbour is the smaller one.
    source[0, 0, 0] = 1 + 2**-8
    found = operator(source, packed_of(ROUNDED, weight), None, 20)
    assert torch.equal(found, nn.functional.linear(source.bfloat16().float(), weight))
    assert not torch.equal(found, nn.functional.linear(source, weight))


def test_rounded_layers_are_those_with_weights_in_bfloat16() -> None:
    """A tied table is still looked up as it is, and layers that bfloat16 cannot hold keep their inputs."""
    module, tokens = Head(True).bfloat16().float().eval(), torch.tensor([[1, 4, 7]])
    module.layer.weight.data[0, 0] = 1 + 2**-9
    program = own_program(module, tokens, rounded=True)
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count(f"exportable_cache.linear_{ROUNDED}.default") == 1
    assert (
        targets.count("exportable_cache.linear_float16.default")
        + targets.count("exportable_cache.linear_float.default")
        == 2
    )
    assert targets.count("exportable_cache.embedding_bfloat16.default") == 1
    assert not any("linear_bfloat16.default" in target for target in targets)
    with torch.no_grad():
        (found, _), (exact, _) = program.module()(tokens), module(tokens)
        states = module.layer(module.layer(module.table(tokens)))
        torch.testing.assert_close(found, module.head(states.bfloat16().float()), atol=1e-5, rtol=1e-5)
        assert not torch.equal(found, exact)


@pytest.mark.parametrize(("number", "kind"), [(1 + 2**-9, "float16"), (1 + 2**-12, "float"), (2.0**17, "bfloat16")])
def test_one_number_that_a_type_has_not_is_enough(number: float, kind: str) -> None:
    module = Head(False).bfloat16().half().bfloat16().float().eval()
    for weight in (module.table.weight, module.head.weight):
        weight.data[-1, -1] = number
    program = own_program(module, torch.tensor([[1, 4, 7]]))
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count(f"exportable_cache.linear_{kind}.default") == (3 if kind == "bfloat16" else 1)
    tables = [node for node in program.graph.nodes if str(node.target) == "aten.embedding.default"]
    assert [node.args[0].meta["val"].dtype for node in tables] == [DTYPES[kind]]


class MultipliedTable(nn.Module):
    """A table that is multiplied by, and not as a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens) @ self.table.weight.T


def test_a_table_that_is_read_otherwise_is_kept_once_and_in_float32() -> None:
    program = own_program(MultipliedTable().bfloat16().float().eval(), torch.tensor([[1, 4, 7]]))
    read = [node.meta["val"].dtype for node in program.graph.find_nodes(op="placeholder") if node.users]
    assert read == [torch.float32, torch.int64]
