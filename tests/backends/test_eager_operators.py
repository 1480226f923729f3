"""Operators of this package that graphs and steps may call."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.nn import functional

from exportable_cache import ExportableCache
from exportable_cache.backends.live import ops as module
from exportable_cache.backends.live.graph_cache import GraphCache
from exportable_cache.backends.live.ops import NATIVE_OPERATORS, eager_operators
from exportable_cache.common.native.machine_code import NativeOperators

from ..support.compiling import compiling_with
from ..support.models import tiny_model

X, WEIGHT = torch.randn(2, 16), torch.randn(24, 16)


@pytest.mark.parametrize("operators", NATIVE_OPERATORS, ids=lambda one: one.code.source.stem)
def test_graphs_with_and_without_them_are_told_apart(tmp_path, monkeypatch, operators: NativeOperators) -> None:
    if not operators.is_wanted():
        pytest.skip("there is no C++ compiler")
    model = tiny_model("llama", num_hidden_layers=1)

    def structure() -> str:
        return GraphCache(tmp_path, model, ExportableCache.from_model(model, 64))._structure

    before = structure()
    assert before == structure()
    monkeypatch.setenv(operators.variable, "torch")
    assert before != structure()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads that ask an operator in the place of oneDNN's, which computes nothing."""
    found: list[int] = []

    def operator(*arguments: Any, **named: Any) -> None:
        found.append(threading.get_ident())

    monkeypatch.setattr(module, "linear_of_float32", operator)
    return found


def test_functions_of_torch_are_replaced_for_the_time_of_a_block(asked: list[int]) -> None:
    before = functional.linear, functional.scaled_dot_product_attention
    with pytest.raises(ValueError, match="ended"), eager_operators(onednn=True):
        # Of a module, called by its name, and with names: what the operator cannot compute, torch does.
        layer = torch.nn.Linear(16, 24)
        torch.testing.assert_close(layer(X), X @ layer.weight.T + layer.bias)
        torch.testing.assert_close(functional.linear(input=X, weight=WEIGHT), X @ WEIGHT.T)
        assert len(asked) == 2
        raise ValueError("ended")
    assert (functional.linear, functional.scaled_dot_product_attention) == before
    functional.linear(X, WEIGHT)
    assert len(asked) == 2


def test_other_threads_have_those_of_torch(asked: list[int]) -> None:
    with eager_operators(onednn=True):
        thread = threading.Thread(target=functional.linear, args=(X, WEIGHT))
        thread.start()
        thread.join()
        assert not asked
        functional.linear(X, WEIGHT)
    assert asked == [threading.get_ident()]


def test_what_is_compiled_meanwhile_has_those_of_torch(asked: list[int]) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, WEIGHT)

    with compiling_with("eager"), torch.no_grad():
        compiled = torch.compile(step, fullgraph=True)
        with eager_operators(onednn=True):
            torch.testing.assert_close(compiled(X), X @ WEIGHT.T)
        assert not asked
