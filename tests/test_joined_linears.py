"""Linear layers with the same input are one product, over weights that were moved and not copied."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from exportable_cache import ExportableCache
from exportable_cache.backends.live.compile import ONE_ROW, CompileOptions, StepCompiler
from exportable_cache.models.joined_linears import JoinedLinear, _step, join_linears, joined_products
from exportable_cache.models.weights import fingerprint
from exportable_cache.program.methods import ProgramMethod
from exportable_cache.program.program import ResidentModule, program_methods
from exportable_cache.program.spec import ProgramSpec

from .support.models import tiny_model

IDS = torch.tensor([[5, 9, 3, 7]])


def bytes_of(model: nn.Module) -> int:
    """Return the bytes of all storages of a model's parameters and buffers, each counted once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


def products(model: nn.Module) -> list[tuple[int, ...]]:
    """Return the shapes of the weights of all linear layers in a traced decode step."""
    cache = ExportableCache.from_model(model, 32)
    module = ResidentModule(model, cache, program_methods(model, cache, ProgramSpec())["decode"], on_gpu=True)
    given = (torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    program = torch.export.export(module, given, strict=False)
    linears = [node for node in program.graph.nodes if node.target is torch.ops.aten.linear.default]
    return [tuple(node.args[1].meta["val"].shape) for node in linears]


@pytest.mark.parametrize(("family", "bias"), [("llama", False), ("qwen2", True)])
@torch.no_grad()
def test_a_layer_has_four_products(family: str, bias: bool) -> None:
    """A decode step has four products a layer and the head, and computes the model's logits."""
    model = tiny_model(family, num_hidden_layers=1)
    assert (model.model.layers[0].self_attn.q_proj.bias is not None) is bias
    expected, size = model(IDS).logits, bytes_of(model)
    state, identity = copy.deepcopy(model.state_dict()), fingerprint(model)
    assert join_linears(model) == 2 and join_linears(model) == 0
    assert products(model)[:-1] == [(64, 32), (32, 32), (128, 32), (32, 64)]
    with joined_products():
        torch.testing.assert_close(model(IDS).logits, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model(IDS).logits, expected, atol=1e-5, rtol=1e-5)
    # Nothing is stored twice, and nobody sees that weights are elsewhere.
    assert bytes_of(model) == size and fingerprint(model) == identity
    assert {name: tuple(one.shape) for name, one in model.state_dict().items()} == {
        name: tuple(one.shape) for name, one in state.items()
    }
    assert _step.source is None and not _step.parts


def changed_in_place(model: nn.Module) -> None:
    """Change weights in place, which the group sees."""
    model.load_state_dict({name: one * 1.5 for name, one in model.state_dict().items()})


def replaced(model: nn.Module) -> None:
    """Replace the parameters."""
    model.load_state_dict({name: one * 1.5 for name, one in model.state_dict().items()}, assign=True)


def moved(model: nn.Module) -> None:
    """Convert the model to another dtype."""
    model.to(torch.float64)


@pytest.mark.parametrize("change", [changed_in_place, replaced, moved])
@torch.no_grad()
def test_changed_weights_are_used(change) -> None:
    """A joined model computes with weights that were changed, replaced or converted, and can be joined again."""
    model, other = (tiny_model("llama", num_hidden_layers=1) for _ in range(2))
    join_linears(model)
    change(model), change(other)
    with joined_products():
        torch.testing.assert_close(model(IDS).logits, other(IDS).logits, atol=1e-4, rtol=1e-4)
    assert join_linears(model) == (0 if change is changed_in_place else 2)
    assert bytes_of(model) == bytes_of(other)
    with joined_products():
        torch.testing.assert_close(model(IDS).logits, other(IDS).logits, atol=1e-4, rtol=1e-4)


class Layers(nn.Module):
    """Layers named as those of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, size) for size in (8, 4, 4))


@torch.no_grad()
def test_layers_with_other_inputs_are_right() -> None:
    """Layers that get another input than the first of their group, or are called first, compute their own product."""
    layers, x, y = Layers(), torch.randn(2, 8), torch.randn(2, 8)
    calls = [(layers.k_proj, x), (layers.q_proj, x), (layers.k_proj, y), (layers.v_proj, x)]
    plain = [(layer.weight.clone(), layer.bias.clone(), given) for layer, given in calls]
    assert join_linears(layers) == 1
    names = {id(layer): name for layer, name in zip((calls[0][0], calls[1][0], calls[3][0]), "kqv", strict=True)}
    with joined_products():
        found = [getattr(layers, f"{names[id(layer)]}_proj")(given) for layer, given in calls]
    for output, (weight, bias, given) in zip(found, plain, strict=True):
        torch.testing.assert_close(output, nn.functional.linear(given, weight, bias), atol=1e-6, rtol=1e-6)


def test_odd_layers_are_left_alone() -> None:
    """Shared weights, hooks, other classes and dtypes, and layers of cross-attention are not joined."""
    shared, hooked, mixed, other = Layers(), Layers(), Layers(), Layers()
    shared.k_proj.weight = shared.v_proj.weight
    hooked.v_proj.register_forward_hook(lambda *arguments: None)
    mixed.k_proj.to(torch.float64)
    other.q_proj = nn.Sequential(other.q_proj)
    model = nn.ModuleDict({"shared": shared, "hooked": hooked, "mixed": mixed, "other": other, "cross_attn": Layers()})
    assert join_linears(model) == 0
    assert not any(isinstance(module, JoinedLinear) for module in model.modules())


def test_gradients_flow_outside_of_steps() -> None:
    """Outside of a step, a joined layer is a linear layer of its own."""
    layers = Layers()
    join_linears(layers)
    layers.k_proj(torch.ones(1, 8)).sum().backward()
    assert layers.k_proj.weight.grad is not None and layers.q_proj.weight.grad is None


@pytest.mark.parametrize(("rows", "tokens", "tuned"), [(1, 1, True), (2, 1, False), (1, 16, False)])
def test_steps_of_one_row_are_tuned(rows: int, tokens: int, tuned: bool, monkeypatch) -> None:
    """Inductor's options for one row apply to decode steps of one row that become CUDA graphs."""
    model = tiny_model("llama")
    compiler = StepCompiler(model, ExportableCache.from_model(model, 32, rows), CompileOptions(compile=True))
    method = ProgramMethod("decode", 1, tokens)
    assert compiler._tuning(method) == {}
    monkeypatch.setattr(compiler, "_captures_cuda_graphs", True)
    assert compiler._tuning(method) == (ONE_ROW if tuned else {})
    # The names are Inductor's.
    assert all(hasattr(torch._inductor.config, name) for name in ONE_ROW)
