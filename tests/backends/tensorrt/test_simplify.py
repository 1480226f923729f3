"""Graph passes before conversion: equal numbers from fewer operators, and patterns that only look alike are kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule

pytest.importorskip("exportable_cache.backends.tensorrt.upstream", reason="no tensorrt extra is installed")

from exportable_cache.backends.tensorrt.options import TensorRTOptions
from exportable_cache.backends.tensorrt.simplify import simplify
from exportable_cache.backends.tensorrt.target import engine_networks
from exportable_cache.backends.tensorrt.upstream import get_decompositions

from .models import engine_model
from .programs import engine_program, program_of

X, COS, SIN = torch.randn(1, 2, 3, 8), torch.randn(1, 3, 8), torch.randn(1, 3, 8)


def simplified(function: Callable, *inputs: torch.Tensor) -> tuple[GraphModule, list[str]]:
    """Trace a function, simplify its graph, and return it with the names of its operators."""

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.function = function

        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            return self.function(*args)

    program = torch.export.export(Module(), inputs).run_decompositions(get_decompositions(False, False, False))
    graph = program.module()
    simplify(graph)
    names = [node.target._schema.name for node in graph.graph.nodes if hasattr(node.target, "_schema")]
    return graph, [name.removeprefix("exportable_cache::").removeprefix("aten::") for name in names]


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate as transformers does, twice, as two layers would."""
    for _ in range(2):
        first, second = x[..., :4], x[..., 4:]
        x = x * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)
    return x


def test_rotations_need_no_slices_and_share_the_sine() -> None:
    graph, names = simplified(rotated, X, COS, SIN)
    assert "cat" not in names and "slice" not in names and "neg" not in names
    assert names.count("swapped_halves") == 2 and names.count("negated_first_half") == 1
    assert names.count("unsqueeze") == 2
    assert torch.equal(graph(X, COS, SIN), rotated(X, COS, SIN))


def rotated_by_angles(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate by tables whose halves are equal, as those of most models are."""
    both = torch.cat((angles, angles), dim=-1)
    return rotated(x, 0.5 * both.cos(), both.sin())


def test_rotations_by_equal_halves_are_one_operator_each() -> None:
    angles = torch.randn(1, 3, 4)
    graph, names = simplified(rotated_by_angles, X, angles)
    assert names.count("rotated") == 2 and names.count("slice") == 2
    assert not {"mul", "add", "neg", "swapped_halves"} & set(names[names.index("rotated") :])
    torch.testing.assert_close(graph(X, angles), rotated_by_angles(X, angles), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "scale", "moved"),
    [(torch.float32, 0.3, True), (torch.bfloat16, 0.25, True), (torch.bfloat16, 0.3, False)],
)
def test_scales_of_attention_go_to_tables_where_nothing_is_rounded(
    dtype: torch.dtype, scale: float, moved: bool
) -> None:
    def attend(x: torch.Tensor, angles: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query = rotated_by_angles(x, angles)
        return torch.nn.functional.scaled_dot_product_attention(query, x, x, attn_mask=mask, scale=scale)

    inputs = X.to(dtype), torch.randn(1, 3, 4).to(dtype), torch.randn(1, 1, 3, 3).to(dtype)
    graph, _ = simplified(attend, *inputs)
    attention = next(node for node in graph.graph.nodes if "scaled_dot_product" in str(node.target))
    assert attention.kwargs["scale"] == (1.0 if moved else scale)
    torch.testing.assert_close(graph(*inputs), attend(*inputs), rtol=0, atol=1e-5 if dtype == torch.float32 else 0.1)


class Projections(torch.nn.Module):
    """Three linear layers over one tensor, split into heads."""

    def __init__(self, sizes: tuple[int, int, int] = (8, 4, 4), dims: tuple[int, int, int] = (4, 4, 4), bias=False):
        super().__init__()
        self.linears = torch.nn.ModuleList(torch.nn.Linear(6, size, bias=bias) for size in sizes)
        self.dims, self.transposed = dims, True

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        split = (layer(x).view(1, 3, -1, dim) for layer, dim in zip(self.linears, self.dims))
        return tuple(one.transpose(1, 2) + 1 if self.transposed else one + 1 for one in split)


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(("dims", "bias", "products"), [((4, 4, 4), True, 1), ((4, 4, 2), False, 2)])
def test_products_of_one_tensor_are_one_product(dims, bias: bool, products: int, transposed: bool) -> None:
    model, x = Projections(dims=dims, bias=bias), torch.randn(1, 3, 6)
    model.transposed = transposed
    graph, names = simplified(model, x)
    assert names.count("linear") == products
    torch.testing.assert_close(graph(x), model(x))


def test_products_that_are_split_across_rows_are_kept() -> None:
    model, x = Projections((8, 8, 8)).linears, torch.randn(1, 3, 6)

    def split(x: torch.Tensor) -> list[torch.Tensor]:
        return [layer(x).view(2, 3, 1, 4) + 1 for layer in model]

    graph, names = simplified(split, x)
    assert names.count("linear") == 3
    torch.testing.assert_close(graph(x), split(x))


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x, sin: torch.cat((-x[..., :4], x[..., 4:]), dim=-1) * sin, id="halves unswapped"),
        pytest.param(lambda x, sin: torch.cat((x[..., 4:], -x[..., :4]), dim=-1) * sin, id="other half negated"),
        pytest.param(lambda x, sin: torch.cat((-x[..., 5:], x[..., :5]), dim=-1) * sin, id="unequal parts"),
        pytest.param(lambda x, sin: torch.cat((-x[..., 4:], (2 * x)[..., :4]), dim=-1) * sin, id="two sources"),
    ],
)
def test_other_joins_are_kept(function: Callable) -> None:
    graph, names = simplified(function, X, SIN)
    assert "cat" in names and "swapped_halves" not in names
    assert torch.equal(graph(X, SIN), function(X, SIN))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.reshape(1, 2, 3, 2, 4).permute(0, 3, 2, 1, 4) + 1,
        lambda x: x.permute(0, 2, 1, 3).reshape(1, 3, 16) + 1,
    ],
)
def test_reshapes_and_transpositions_are_one_operator(function: Callable) -> None:
    graph, names = simplified(function, X)
    assert names == ["shuffled", "add"]
    assert torch.equal(graph(X), function(X))


def test_a_division_by_a_root_is_one_operator() -> None:
    def normalised(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    graph, names = simplified(normalised, X)
    assert names.count("div") == 1 and "mul" not in names
    torch.testing.assert_close(graph(X), normalised(X), rtol=1e-6, atol=1e-6)


def test_outputs_that_are_equal_stay_separate() -> None:
    """A network may not mark one tensor as two outputs."""
    graph, names = simplified(lambda x: (x + 1, x + 1), X)
    assert names == ["add", "add"]
    assert all(torch.equal(one, X + 1) for one in graph(X))


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 40), pytest.param(torch.float16, 55, marks=pytest.mark.full)]
)
def test_a_layer_of_a_llama_takes_few_layers_of_the_network(dtype: torch.dtype, most: int) -> None:
    """It took 94 in a step and 131 in a prompt before."""
    _, _, networks = engine_program("llama", dtype)
    shallow = engine_networks(program_of(engine_model("llama", dtype, num_hidden_layers=1)), TensorRTOptions())
    counts = [sum(one["decode"].layer_counts.values()) for one in (networks, shallow)]
    assert counts[0] - counts[1] <= most
