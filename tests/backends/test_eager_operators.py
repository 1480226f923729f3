"""Operators of this package that graphs and steps may call."""

from __future__ import annotations

import pytest

from exportable_cache import ExportableCache
from exportable_cache.backends.eager_operators import OWN_OPERATORS
from exportable_cache.backends.graph_cache import GraphCache
from exportable_cache.backends.own_operators import OwnOperators

from ..support.models import tiny_model


@pytest.mark.parametrize("operators", OWN_OPERATORS, ids=lambda one: one.code.source.stem)
def test_graphs_with_and_without_them_are_told_apart(tmp_path, monkeypatch, operators: OwnOperators) -> None:
    if not operators.is_wanted():
        pytest.skip("there is no C++ compiler")
    model = tiny_model("llama", num_hidden_layers=1)

    def structure() -> str:
        return GraphCache(tmp_path, model, ExportableCache.from_model(model, 64))._structure

    before = structure()
    assert before == structure()
    monkeypatch.setenv(operators.variable, "torch")
    assert before != structure()
