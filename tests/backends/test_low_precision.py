"""Compiled sessions of half precision, and of weights that torchao has quantised, beside eager ones of the weights."""

from __future__ import annotations

import warnings

import pytest
import torch

from exportable_cache import ExportableCache, Session
from exportable_cache.backends.live import background
from exportable_cache.backends.live.graph_cache import GraphCache
from exportable_cache.backends.live.model_snapshot import from_snapshot, snapshot
from exportable_cache.backends.live.regions import described
from exportable_cache.models.weights import fingerprint

from ..support.models import tiny_model, tokens

CAPACITY, LAYERS = 64, 3
SIZES = {"num_hidden_layers": LAYERS, "hidden_size": 64, "intermediate_size": 128}
#: Logits of two right computations: each of them may be four roundings of the largest one from the true ones.
ROUNDINGS = 8
#: What runs before the layers and what after them is compiled beside one layer, for prompts and for steps.
REGIONS, CALLS = 2 * (2 + 1), 2 * (2 + LAYERS)


pytestmark = pytest.mark.usefixtures("inductor")


def quantized_model(bits: int = 8, group: int = 32, dtype: torch.dtype = torch.float32):
    pytest.importorskip("torchao")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
        from torchao.quantization.granularity import PerGroup
    model = tiny_model("llama", dtype, **SIZES)
    four = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(group))
    quantize_(model, Int8WeightOnlyConfig() if bits == 8 else four)
    return model


def session_of(model, compile: bool | str = False, **options) -> Session:
    cache = ExportableCache.from_model(model, CAPACITY)
    return Session.from_model(model, cache, compile=compile, prefill_chunk=16, **options)


def logits(session: Session) -> torch.Tensor:
    ids = tokens(14)
    steps = [session.prefill(ids[:, :9]), *(session.decode(ids[:, index]) for index in range(9, 14))]
    return torch.stack(steps).float()


def counts(session: Session) -> tuple[int, int]:
    return session.runner.compiler.layered.compiled, session.runner.compiler.layered.called


# In the fast lane 8-bit weights; half precision takes the same way.
@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype: str) -> None:
    model = tiny_model("llama", getattr(torch, dtype), **SIZES)
    expected, session = logits(session_of(model)), session_of(model, "wait")
    tolerance = ROUNDINGS * torch.finfo(model.dtype).eps / 2 * expected.abs().max()
    assert (logits(session) - expected).abs().max() <= tolerance
    assert counts(session) == (REGIONS, CALLS)


def test_weights_with_other_groups_are_of_another_region() -> None:
    pytest.importorskip("torchao")
    from torchao.quantization import IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    layers = [torch.nn.Linear(128, 16) for _ in range(3)]
    for layer, group in zip(layers, (32, 64, 32), strict=True):
        quantize_(layer, IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(group)))
    fine, coarse, same = (layer.weight for layer in layers)
    assert fine.shape == coarse.shape and fine.dtype == coarse.dtype
    assert described(fine) != described(coarse) and described(fine) == described(same)


@pytest.mark.full
@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_weights(bits: int) -> None:
    model = quantized_model(bits)
    expected, session = logits(session_of(model)), session_of(model, "wait")
    assert (logits(session) - expected).abs().max() <= 1e-4
    assert counts(session) == (REGIONS, CALLS)


def test_keys_and_values_are_of_the_dtype_that_quantised_weights_compute_in() -> None:
    model = quantized_model(dtype=torch.bfloat16)
    with session_of(model) as session:
        assert session.prefill(tokens(3)).dtype == torch.bfloat16
        assert session.cache.layers[0].keys.dtype == torch.bfloat16


def test_quantised_weights_are_compiled_in_the_background(monkeypatch) -> None:
    monkeypatch.setattr(background, "_CHILD", "import time; time.sleep(600)")
    with session_of(quantized_model(), True) as session:
        session.prefill(tokens(3))
        assert session.runner.background is not None and session.pending_graphs


@pytest.mark.full
def test_quantised_weights_by_the_process_itself(tmp_path) -> None:
    model = quantized_model()
    expected = logits(session_of(model))
    with session_of(model, "background", graph_cache=tmp_path) as session:
        session.warm_up()
        assert (logits(session) - expected).abs().max() <= 1e-4
        assert {key.step.method for key in session.runner._calls} == {"prefill", "decode", "choice"}


def test_a_skeleton_has_the_form_of_quantised_weights() -> None:
    model = quantized_model(4)
    other = from_snapshot(snapshot(model))
    for (name, one), (_, two) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert (type(one), one.shape, one.dtype) == (type(two), two.shape, two.dtype), name
        if type(one) is not torch.nn.Parameter:
            assert isinstance(two, torch.nn.Parameter) and repr(one.__tensor_flatten__()) == repr(
                two.__tensor_flatten__()
            )


def test_graphs_and_states_are_of_one_quantisation(tmp_path) -> None:
    def structure(model) -> str:
        return GraphCache(tmp_path, model, ExportableCache.from_model(model, CAPACITY))._structure

    models = [quantized_model(4, group) for group in (32, 32, 16)]
    assert structure(models[0]) == structure(models[1]) != structure(models[2])
    other = quantized_model()
    before = fingerprint(other)
    assert before == fingerprint(quantized_model()) != fingerprint(tiny_model("llama", **SIZES))
    other.model.layers[1].mlp.up_proj.weight.qdata.add_(1)
    assert fingerprint(other) != before
