"""Caches in 16, 8 and 4 bits in every target, against a `DynamicCache` with the same rounding."""

import pytest
import torch
from transformers import DynamicCache

from exportable_cache import ExportableCache, Session, export, load
from exportable_cache.cache.attention.implementation import attention_of
from exportable_cache.cache.storage import KV_DTYPES, storage_of
from exportable_cache.errors import InputError
from exportable_cache.verification.references import RoundingCache
from exportable_cache.verification.verify import verify_session

from .support.compiling import compiling_with
from .support.kinds import KINDS, kind_model
from .support.models import WINDOW, among, hybrid_model, tiny_model, tokens
from .support.sessions import lowered_session, rounded_aoti_bundle

CAPACITY = 64


def test_the_layers_are_those_of_the_model() -> None:
    model = tiny_model("gemma3_text")
    cache = ExportableCache.from_model(model, CAPACITY, kv_dtype="int8")
    assert [layer.label for layer in cache.layers] == ["ring int8", "full int8"]
    assert cache.layers[0].policy.window == WINDOW
    sinks = ExportableCache.from_model(tiny_model("llama"), CAPACITY, kv_dtype="int8", attention_sinks=2)
    assert {layer.label for layer in sinks.layers} == {"sinks int8"}
    by_config = ExportableCache.from_config(model.config, CAPACITY, kv_dtype="int8")
    assert [layer.config() for layer in by_config.layers] == [layer.config() for layer in cache.layers]
    with pytest.raises(InputError, match="kv_dtype must be one of float16, bfloat16, int8, int4, or None, got 'int2'"):
        ExportableCache.from_model(model, CAPACITY, kv_dtype="int2")


@pytest.mark.parametrize(
    ("kv_dtype", "least", "most"),
    [("float16", 1e-4, 0.02), ("bfloat16", 1e-3, 0.1), ("int8", 1e-3, 0.2), ("int4", 2e-2, 4.0)],
)
@torch.no_grad()
def test_the_reference_rounds(kv_dtype: str, least: float, most: float) -> None:
    model, ids, storage = tiny_model("gemma3_text"), tokens(30), storage_of(torch.float32, kv_dtype)
    with attention_of(model, "eager"):
        exact, rounds = (
            model(ids, past_key_values=cache).logits
            for cache in (DynamicCache(config=model.config), RoundingCache(storage, config=model.config))
        )
    assert least < (exact - rounds).abs().max() < most


def check(session: Session, model) -> None:
    # The logits are those of the reference that rounds, except for values in the middle of two steps.
    # Shorter than the window, as long, and past the longest chunk.
    prompts = [3, WINDOW, 40]
    report = verify_session(session, model, prompts=prompts, decode_steps=10)
    assert report.passed and report.rounding is not None
    exact = verify_session(session, model, exact_cache=True, tolerance=99.0, prompts=prompts, decode_steps=10)
    assert report.max_difference < exact.max_difference / 4


@pytest.mark.parametrize(
    ("family", "compiled"),
    [
        ("gemma3_text", False),
        pytest.param("gpt_oss", True, marks=pytest.mark.full),
        pytest.param("gemma3_text", True, marks=pytest.mark.full),
        pytest.param("gpt_oss", False, marks=pytest.mark.full),
    ],
)
def test_live_sessions(family: str, compiled: bool) -> None:
    model = tiny_model(family)
    cache = ExportableCache.from_model(model, CAPACITY, kv_dtype="int8")
    check(Session.from_model(model, cache, compile=compiled, prefill_chunk=16), model)


# Full and sliding layers, attention chunks, latent keys with an indexer, states beside keys, states and keys in turn.
FOUR_BITS = ["gemma3_text", "llama4_text", "deepseek_v32", "falcon_h1", "jamba"]


def four_bits(family: str, compiled: bool) -> None:
    model = kind_model(family) if family in KINDS else tiny_model(family)
    cache = ExportableCache.from_model(model, CAPACITY, kv_dtype="int4")
    assert all("int4" in layer.label for layer in cache.layers if layer.policy.keeps_keys)
    session = Session.from_model(model, cache, compile=compiled, prefill_chunk=16)
    check(session, model)


@pytest.mark.parametrize("family", FOUR_BITS)
def test_four_bits_eager(family: str) -> None:
    four_bits(family, compiled=False)


@pytest.mark.parametrize("family", among(["gemma3_text", "falcon_h1"], fast=[]))
def test_four_bits_compiled(family: str) -> None:
    four_bits(family, compiled=True)


@pytest.mark.parametrize("kv_dtype", among(["float16", "bfloat16"], fast=["bfloat16"]))
def test_half_precision(kv_dtype: str) -> None:
    model = tiny_model("gemma3_text")
    cache = ExportableCache.from_model(model, CAPACITY, kv_dtype=kv_dtype)
    assert [layer.label for layer in cache.layers] == [f"ring {kv_dtype}", f"full {kv_dtype}"]
    check(Session.from_model(model, cache, prefill_chunk=16), model)


@pytest.mark.full
def test_four_bits_through_inductor() -> None:
    with compiling_with("inductor"):
        four_bits("gemma3_text", compiled=True)


# A cast and integers with scales are two ways to keep rows; within each, what differs is covered by the tests above.
@pytest.mark.parametrize("kv_dtype", among(KV_DTYPES, fast=["float16", "int4"]))
def test_sinks(kv_dtype: str) -> None:
    model = tiny_model("llama")
    cache = ExportableCache.from_model(model, CAPACITY, kv_dtype=kv_dtype, attention_sinks=3, attention_window=8)
    check(Session.from_model(model, cache, prefill_chunk=16), model)


# In the fast lane: 4 bits in eager, and the bundle in 8 bits below.
@pytest.mark.parametrize(
    ("kv_dtype", "form"),
    [
        pytest.param("int8", "resident", marks=pytest.mark.full),
        pytest.param("int8", "explicit", marks=pytest.mark.full),
        pytest.param("int4", "resident", marks=pytest.mark.full),
        pytest.param("float16", "resident", marks=pytest.mark.full),
        pytest.param("bfloat16", "explicit", marks=pytest.mark.full),
        pytest.param("int4", "explicit", marks=pytest.mark.full),
    ],
)
def test_pt2(kv_dtype: str, form: str) -> None:
    model = tiny_model("gemma3_text")
    session = lowered_session(model, "pt2", CAPACITY, cache_options={"kv_dtype": kv_dtype}, form=form)
    check(session, model)


@pytest.mark.full
def test_four_bits_as_machine_code() -> None:
    model = tiny_model("gemma3_text")
    session = lowered_session(model, "aoti", CAPACITY, cache_options={"kv_dtype": "int4"})
    check(session, model)


# In the fast lane: 8 bits in pt2, machine code without them.
@pytest.mark.full
def test_aoti() -> None:
    model, folder = rounded_aoti_bundle()
    session = load(folder, trust=True)
    check(session, model)
    # One cache for both methods, in place.
    session.prefill(tokens(5))
    kept = {name: tensor.clone() for name, tensor in session.runner.state.items()}
    session.decode(tokens(1)[0])
    for name, tensor in session.runner.state.items():
        assert (tensor != kept[name]).any(dim=-1).any(dim=1)[0].nonzero().flatten().tolist() == [5], name


# Layers that the fused operators serve are tested in backends/test_executorch_fused_quantized.py.
@pytest.mark.full
def test_one_token_at_a_time_on_executorch() -> None:
    pytest.importorskip("executorch", reason="the executorch extra is not installed")
    model = tiny_model("gemma2", num_hidden_layers=1, layer_types=["sliding_attention"])
    check(lowered_session(model, "executorch", CAPACITY, prefill_chunk=1, cache_options={"kv_dtype": "int8"}), model)


# Prefill lowers with XNNPACK's own partitions to none that could run: see backends/executorch/delegates/xnnpack.py.
@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    [
        pytest.param("gemma2", "int8", marks=pytest.mark.full),
        pytest.param("llama", "int8", marks=pytest.mark.slow),
        pytest.param("gemma3_text", "int4", marks=pytest.mark.full),
        pytest.param("llama", "int4", marks=pytest.mark.slow),
    ],
)
def test_executorch(family: str, kv_dtype: str) -> None:
    pytest.importorskip("executorch", reason="the executorch extra is not installed")
    model = tiny_model(family)
    sinks = {"attention_sinks": 3} if family == "llama" else {}
    session = lowered_session(model, "executorch", CAPACITY, cache_options={"kv_dtype": kv_dtype}, **sinks)
    assert list(session.runner.methods) == ["decode", "prefill"]
    check(session, model)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_saved_and_loaded(kv_dtype: str, tmp_path) -> None:
    model, ids = tiny_model("gemma3_text"), tokens(21)
    cache = ExportableCache.from_model(model, CAPACITY, kv_dtype=kv_dtype)
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
        cache.save(tmp_path / "cache.safetensors")
        loaded = ExportableCache.load(tmp_path / "cache.safetensors")
        assert torch.equal(
            model(ids[:, 20:], past_key_values=loaded).logits, model(ids[:, 20:], past_key_values=cache).logits
        )


def test_a_bundle_records_bytes_and_error(tmp_path) -> None:
    bundle = export(hybrid_model(), "pt2", CAPACITY, tmp_path / "x", prefill_chunk=1, kv_dtype="int8")
    manifest, kept = bundle.manifest, bundle.manifest.kv_cache
    exact = ExportableCache.from_model(hybrid_model(), CAPACITY)
    assert kept.dtype == "int8" and kept.float_bytes == exact.nbytes > manifest.cache_bytes == sum(
        layer.bytes for layer in manifest.layers
    )
    assert 1e-4 < kept.max_difference < 0.2 and 0 < kept.argmax_agreement <= 1 and kept.positions > 20
    assert manifest.verification["passed"]
    assert {layer.tensors["keys"].dtype for layer in manifest.layers} == {"int8"}
