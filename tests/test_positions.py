"""Caches with more slots than a model has positions: refused where a step would fail, said where it goes on."""

import pytest

from exportable_cache import ExportableCache, Session
from exportable_cache.errors import InputError
from exportable_cache.models.positions import beyond_positions
from exportable_cache.pipeline.plan import plan

from .support.models import tiny_model


def test_a_position_bias_of_fixed_size_is_a_limit() -> None:
    model = tiny_model("mpt", d_model=32, n_heads=4, n_layers=2, max_seq_len=32)
    with pytest.raises(InputError, match=r"at most 32 tokens, the positions of MptForCausalLM .*, got 48"):
        Session.from_model(model, ExportableCache.from_model(model, 48))
    Session.from_model(model, ExportableCache.from_model(model, 32))


def test_computed_positions_beyond_the_models_are_said() -> None:
    model = tiny_model("llama", max_position_embeddings=64)
    assert plan(model.config, 64).positions == ""
    assert "made for 64 positions" in plan(model.config, 65).positions
    assert "made for 64 positions" in beyond_positions(model.config, 65)
    assert beyond_positions(model.config, 4096, is_unbounded=True) == ""


def test_a_plan_refuses_what_an_export_would() -> None:
    model = tiny_model("gpt2", max_position_embeddings=32)
    assert plan(model.config, 32).max_length == 32
    with pytest.raises(InputError, match=r"at most 32 tokens, the positions of GPT2LMHeadModel .*, got 64"):
        plan(model.config, 64)
