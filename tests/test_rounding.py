"""Caches in 8 bits in every target, against a `DynamicCache` with the same rounding."""

import pytest
import torch
from transformers import DynamicCache

from exportable_cache import ExportableCache, Session, export, load
from exportable_cache.errors import InputError
from exportable_cache.layers import QuantizedFullLayer, QuantizedRingLayer, QuantizedSinkLayer
from exportable_cache.program import attention_of
from exportable_cache.rounding import RoundingCache
from exportable_cache.verify import rounding_effect, verify_session

from .support.models import WINDOW, tiny_model, tokens
from .support.sessions import lowered_session, rounded_aoti_bundle

CAPACITY = 64


def test_the_layers_are_those_of_the_model() -> None:
    model = tiny_model("gemma3_text")
    cache = ExportableCache.from_model(model, CAPACITY, kv_dtype="int8")
    assert [type(layer) for layer in cache.layers] == [QuantizedRingLayer, QuantizedFullLayer]
    assert cache.layers[0].window == WINDOW
    sinks = ExportableCache.from_model(tiny_model("llama"), CAPACITY, kv_dtype="int8", attention_sinks=2)
    assert {type(layer) for layer in sinks.layers} == {QuantizedSinkLayer}
    assert [type(layer) for layer in ExportableCache.from_config(model.config, CAPACITY, kv_dtype="int8").layers] == [
        QuantizedRingLayer, QuantizedFullLayer
    ]  # fmt: skip
    with pytest.raises(InputError, match="kv_dtype is 'int4'; it must be int8, or None"):
        ExportableCache.from_model(model, CAPACITY, kv_dtype="int4")


@torch.no_grad()
def test_the_reference_rounds() -> None:
    model, ids = tiny_model("gemma3_text"), tokens(30)
    with attention_of(model, "eager"):
        exact, rounds = (
            model(ids, past_key_values=kind(config=model.config)).logits for kind in (DynamicCache, RoundingCache)
        )
    assert 1e-3 < (exact - rounds).abs().max() < 0.2


def check(session: Session, model) -> None:
    # Against the rounding reference, but for values that lie in the middle of two steps; and it does round.
    report = verify_session(session, model)
    assert report.passed and report.tolerance <= rounding_effect(model, 64) / 4 + 1e-4
    assert report.max_difference < verify_session(session, model, exact_cache=True, tolerance=9.0).max_difference / 4


@pytest.mark.parametrize(
    ("family", "compiled"),
    [
        ("gemma3_text", False),
        ("gpt_oss", True),
        pytest.param("gemma3_text", True, marks=pytest.mark.full),
        pytest.param("gpt_oss", False, marks=pytest.mark.full),
    ],
)
def test_live_sessions(family: str, compiled: bool) -> None:
    model = tiny_model(family)
    cache = ExportableCache.from_model(model, CAPACITY, kv_dtype="int8")
    check(Session.from_model(model, cache, compile=compiled, prefill_length=16), model)


def test_sinks() -> None:
    model = tiny_model("llama")
    cache = ExportableCache.from_model(model, CAPACITY, kv_dtype="int8", attention_sinks=3, attention_window=8)
    check(Session.from_model(model, cache, prefill_length=16), model)


# Resident: the bundle below.
@pytest.mark.parametrize("form", [pytest.param("resident", marks=pytest.mark.full), "explicit"])
def test_pt2(form: str) -> None:
    model = tiny_model("gemma3_text")
    check(lowered_session(model, "pt2", CAPACITY, cache_options={"kv_dtype": "int8"}, form=form), model)


def test_aoti() -> None:
    model, folder = rounded_aoti_bundle()
    session = load(folder)
    check(session, model)
    # One cache for both methods, in place.
    session.prefill(tokens(5))
    kept = {name: tensor.clone() for name, tensor in session.runner.state.items()}
    session.decode(tokens(1)[0])
    for name, tensor in session.runner.state.items():
        assert (tensor != kept[name]).any(dim=-1).any(dim=1)[0].nonzero().flatten().tolist() == [5], name


# Layers that the fused operators serve are tested in backends/test_executorch_fused_quantized.py.
def test_one_token_at_a_time_on_executorch() -> None:
    pytest.importorskip("executorch", reason="the executorch extra is not installed")
    model = tiny_model("gemma2", num_hidden_layers=1, layer_types=["sliding_attention"])
    check(lowered_session(model, "executorch", CAPACITY, prefill_length=1, cache_options={"kv_dtype": "int8"}), model)


# Prefill lowers with XNNPACK's own partitions to none that could run: see backends/executorch/partition.py.
@pytest.mark.parametrize(
    "family", [pytest.param("gemma2", marks=pytest.mark.full), pytest.param("llama", marks=pytest.mark.slow)]
)
def test_executorch(family: str) -> None:
    pytest.importorskip("executorch", reason="the executorch extra is not installed")
    model = tiny_model(family)
    sinks = {"attention_sinks": 3} if family == "llama" else {}
    session = lowered_session(model, "executorch", CAPACITY, cache_options={"kv_dtype": "int8"}, **sinks)
    assert list(session.runner.methods) == ["decode", "prefill"]
    check(session, model)


def test_saved_and_loaded(tmp_path) -> None:
    model, ids = tiny_model("gemma3_text"), tokens(21)
    cache = ExportableCache.from_model(model, CAPACITY, kv_dtype="int8")
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
        cache.save(tmp_path / "cache.safetensors")
        loaded = ExportableCache.load(tmp_path / "cache.safetensors")
        assert torch.equal(
            model(ids[:, 20:], past_key_values=loaded).logits, model(ids[:, 20:], past_key_values=cache).logits
        )


def test_a_bundle_records_bytes_and_error(tmp_path) -> None:
    bundle = export(tiny_model("gemma3_text"), "pt2", CAPACITY, tmp_path / "x", prefill_length=16, kv_dtype="int8")
    manifest, kept = bundle.manifest, bundle.manifest.kv_cache
    exact = ExportableCache.from_model(tiny_model("gemma3_text"), CAPACITY)
    assert kept.dtype == "int8" and kept.float_bytes == exact.nbytes > manifest.cache_bytes == sum(
        layer.bytes for layer in manifest.layers
    )
    assert 1e-4 < kept.max_difference < 0.2 and 0 < kept.argmax_agreement <= 1 and kept.positions > 20
    assert manifest.verification["passed"]
    assert {layer.tensors["keys"].dtype for layer in manifest.layers} == {"int8"}
