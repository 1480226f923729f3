"""What a recorded step notices that guards left out do not say, or still do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from exportable_cache import ExportableCache, Session
from exportable_cache.backends.live import layered
from exportable_cache.backends.live.guards import checked_in_each_step
from exportable_cache.backends.live.ops import linear

from ..support.compiling import compiling_with
from ..support.models import tiny_model, tokens
from ..support.oracle import difference, reference_logits

pytestmark = pytest.mark.skipif(not linear.OPERATORS.is_wanted(), reason="there is no C++ compiler")


def transposed(model: PreTrainedModel) -> None:
    """The same object at the same address."""
    weight = model.model.layers[1].self_attn.o_proj.weight
    weight.data = weight.data.T


def other_module(model: PreTrainedModel) -> None:
    old = model.model.layers[1].mlp.up_proj
    model.model.layers[1].mlp.up_proj = nn.Linear(old.in_features, old.out_features)


def other_activation(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.act_fn = nn.ReLU()


def other_number(model: PreTrainedModel) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon = 0.1


def other_scaling(model: PreTrainedModel) -> None:
    model.model.layers[1].self_attn.scaling *= 1.5


@pytest.fixture
def generated_code() -> Iterator[None]:
    with compiling_with("inductor"):
        yield


@pytest.mark.parametrize("change", [transposed, other_module, other_activation, other_number, other_scaling])
def test_a_change_is_noticed(generated_code, change: Callable[[PreTrainedModel], None]) -> None:
    model, ids = tiny_model("llama", num_hidden_layers=4, num_key_value_heads=4), tokens(24)
    session = Session.from_model(model, ExportableCache.from_model(model, 64), compile="wait", prefill_chunk=16)

    def step(piece: torch.Tensor) -> torch.Tensor:
        return session.decode(piece[:, 0]) if piece.shape[1] == 1 else session.prefill(piece)

    before = reference_logits(model, ids, 8)
    assert difference(step, before, ids, 8) <= 1e-4
    change(model)
    after = reference_logits(model, ids, 8)
    assert (after - before).abs().max() > 1e-3
    session.reset()
    assert difference(step, after, ids, 8) <= 1e-4


def test_graphs_have_no_guards_on_what_they_check(generated_code, monkeypatch) -> None:
    checked: list[int] = []
    begin = layered.LayeredGraph.__init__

    def noted(graph: layered.LayeredGraph, *args: Any, **options: Any) -> None:
        begin(graph, *args, **options)
        checked.append(len(graph._checked))

    monkeypatch.setattr(layered.LayeredGraph, "__init__", noted)
    model = tiny_model("llama", num_hidden_layers=4)
    Session.from_model(model, ExportableCache.from_model(model, 64), compile="wait").prefill(tokens(4))
    # Keys and values of four layers besides.
    assert len(checked) == 1 and checked[0] >= len({*model.parameters()}) + 8


def test_which_guards_stay() -> None:
    def guard(name: str, kind: str, value: Any, is_global: bool = False) -> SimpleNamespace:
        return SimpleNamespace(name=name, guard_type=kind, value=value, has_value=True, is_global=is_global)

    tensor = torch.zeros(2)
    guards = [
        guard("module.x", "TENSOR_MATCH", tensor),
        guard("module.y", "TENSOR_MATCH", torch.zeros(2)),
        guard("module.layout.layers[0].policy", "TYPE_MATCH", object()),
        guard("G['library'].function", "CLOSURE_MATCH", print, True),
        guard("G['library'].ALL_ATTENTION_FUNCTIONS['x']", "CLOSURE_MATCH", print, True),
        guard("G['library'].setting", "CONSTANT_MATCH", 1, True),
        guard("module._parameters", "TYPE_MATCH", {}),
        guard("module.training", "CONSTANT_MATCH", False),
    ]
    kept = checked_in_each_step(lambda: {id(tensor)})(guards)
    assert kept == [False, True, False, False, True, True, False, True]
