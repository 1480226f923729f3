"""Linear layers with the same input are one product, over weights that were moved and not copied."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn

from exportable_cache import ExportableCache, Session
from exportable_cache.backends.live import runner as runner_file
from exportable_cache.common.devices import weights_bytes
from exportable_cache.errors import DeviceMemoryError
from exportable_cache.models.joined_linears import (
    JoinedLinear,
    _step,
    end_outdated_groups,
    join_linears,
    joined_products,
)
from exportable_cache.models.weights import fingerprint
from exportable_cache.program.program import Program, ResidentModule, program_methods
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


def assigned_data(model: nn.Module) -> None:
    """Assign new data to the parameters, as merging an adapter does."""
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.5


def assigned_in_dicts(model: nn.Module) -> None:
    """Assign parameters in the dicts of the modules, as libraries for offloading do."""
    for module in model.modules():
        for name, one in module.named_parameters(recurse=False):
            module._parameters[name] = nn.Parameter(one * 1.5)


@pytest.mark.parametrize("change", [assigned_data, assigned_in_dicts])
@torch.no_grad()
def test_a_session_finds_weights_that_no_layer_was_notified_of(change) -> None:
    """A session, compiled or not, ends groups whose parameters are elsewhere, and the next one joins them again."""
    model, other = (tiny_model("llama", num_hidden_layers=1) for _ in range(2))
    join_linears(model)
    change(model), change(other)
    Session.from_model(model, ExportableCache.from_model(model, 16))
    with joined_products():
        torch.testing.assert_close(model(IDS).logits, other(IDS).logits, atol=1e-4, rtol=1e-4)
    assert bytes_of(model) == bytes_of(other)
    assert join_linears(model) == 2


@torch.no_grad()
def test_a_copy_computes_with_its_own_weights() -> None:
    """A copied model has groups of its own, which end at its session; the original's stay."""
    model = tiny_model("llama", num_hidden_layers=1)
    join_linears(model)
    copied = copy.deepcopy(model)
    changed_in_place(copied)
    expected = copied(IDS).logits
    end_outdated_groups(copied), end_outdated_groups(model)
    with joined_products():
        torch.testing.assert_close(copied(IDS).logits, expected, atol=1e-5, rtol=1e-5)
    assert join_linears(model) == 0 and join_linears(copied) == 2
    assert bytes_of(copied) == bytes_of(model)


@torch.no_grad()
def test_groups_hold_no_memory_after_they_end() -> None:
    """A move to where a model is changes nothing; a replaced weight frees the joined tensor at once."""
    model = tiny_model("llama", num_hidden_layers=1)
    join_linears(model)
    attention = model.model.layers[0].self_attn
    joined = attention.q_proj.joined_weight
    model.to("cpu").float()
    assert attention.q_proj.joined_weight is joined and join_linears(model) == 0
    attention.k_proj.weight = nn.Parameter(attention.k_proj.weight * 1.5)
    assert attention.q_proj.joined_weight is None
    first = weakref.ref(attention.q_proj)
    del model, attention
    assert first() is None


def test_weights_are_joined_as_ordinary_tensors() -> None:
    """A session that is made in inference mode leaves parameters that can be trained."""
    layers = Layers()
    with torch.inference_mode():
        assert join_linears(layers) == 1
    assert not layers.q_proj.weight.is_inference() and not layers.q_proj.joined_weight.is_inference()
    layers.q_proj(torch.ones(1, 8)).sum().backward()
    with torch.inference_mode():
        assert join_linears(Layers()) == 0


def test_joined_memory_is_counted_once() -> None:
    """Sizes in messages are those of the model without joined layers."""
    model = tiny_model("llama", num_hidden_layers=1)
    size = weights_bytes(model)
    assert join_linears(model) == 2 and weights_bytes(model) == size


@torch.no_grad()
def test_a_program_holds_no_joined_weights() -> None:
    """Exporting a model that a session has joined separates its layers."""
    model = tiny_model("llama", num_hidden_layers=1)
    expected, size = model(IDS).logits, bytes_of(model)
    join_linears(model)
    program = Program(model, ExportableCache.from_model(model, 16), ProgramSpec())
    assert not [name for name, _ in program.modules["decode"].named_buffers() if "joined" in name]
    storages = [one.untyped_storage().data_ptr() for one in model.parameters()]
    assert len(set(storages)) == len(storages) and bytes_of(model) == size
    torch.testing.assert_close(model(IDS).logits, expected, atol=1e-5, rtol=1e-5)


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


def test_a_lack_of_memory_while_joining_has_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joining needs memory for one group more, and says so as steps do."""

    def lacking(model: nn.Module) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(runner_file, "reads_filled", lambda device: True)
    monkeypatch.setattr(runner_file, "join_linears", lacking)
    model = tiny_model("llama", num_hidden_layers=1)
    with pytest.raises(DeviceMemoryError, match="cpu must have memory for the weights"):
        Session.from_model(model, ExportableCache.from_model(model, 16), compile="wait")
