"""Layers that live in host memory or in a file, and come to the device two at a time: here the CPU stands for one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from exportable_cache import ExportableCache, Session
from exportable_cache.cache.layers import CacheLayer
from exportable_cache.decoding import PromptLookup
from exportable_cache.errors import InputError, UnsupportedModelError
from exportable_cache.pipeline.spec import ExportSpec
from exportable_cache.program.program import Program

from .parallel.test_families import FAMILIES as MORE
from .support.models import among, tiny_model, tokens
from .support.oracle import difference, reference_logits

CAPACITY, LENGTH, PROMPT = 64, 30, 11
#: Rings and full layers, an odd number of them; states; convolutions and attention in one layer; latents; indexers.
KINDS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3_next": MORE["qwen3_next"],
    "deepseek_v3": MORE["deepseek_v3"],
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 4},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4},
}


def model_of(kind: str) -> Any:
    return tiny_model(kind, **KINDS[kind])


def offloaded(model: Any, home: str | Path = "host", rows: int = 1, **options: Any) -> ExportableCache:
    return ExportableCache.from_model(model, CAPACITY, rows, offload=home, **options)


def places_of(cache: ExportableCache) -> list[range]:
    return [range(one.data_ptr(), one.data_ptr() + one.nbytes) for one in cache.offloader.buffers]


@pytest.mark.parametrize("kind", among(KINDS, ["gemma3_text", "qwen3_next"]))
def test_logits_are_those_of_resident_layers(kind: str) -> None:
    model = model_of(kind)
    ids = tokens(LENGTH)
    expected = reference_logits(model, ids, PROMPT)
    cache = offloaded(model)
    session = Session.from_model(model, cache)
    for _ in range(2):
        step = lambda piece: session.prefill(piece) if piece.shape[1] > 1 else session.decode(piece[:, 0])  # noqa: E731
        assert difference(step, expected, ids, PROMPT) < 1e-5
        session.reset()


@pytest.mark.parametrize("kind", among(KINDS, ["gemma3_text"]))
def test_two_layers_are_resident(kind: str, tmp_path: Path) -> None:
    model = model_of(kind)
    whole = ExportableCache.from_model(model, CAPACITY)
    lengths = 8 * len(whole.layers)
    largest = max(layer.nbytes for layer in whole.layers) - 8
    for home in ("host", tmp_path):
        cache = offloaded(model, home)
        assert cache.resident_nbytes <= 2 * (largest + 64 * 8) + lengths
        assert cache.nbytes == whole.nbytes
    # Its name is gone, so that it is, too, once nothing maps it.
    assert not list(tmp_path.iterdir())


def test_what_attention_reads_is_at_one_of_two_places(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("gemma3_text")
    cache = offloaded(model)
    places, seen = places_of(cache), []
    original = CacheLayer.update

    def update(layer: Any, *states: Any, **kwargs: Any) -> Any:
        keys, values = original(layer, *states, **kwargs)
        # A ring gives several tokens what it held beside them.
        if type(layer) is CacheLayer and states[0].shape[2] == 1:
            seen.append([index for index, place in enumerate(places) if keys.data_ptr() in place][0])
            assert values.data_ptr() in places[seen[-1]]
        return keys, values

    monkeypatch.setattr(CacheLayer, "update", update)
    session = Session.from_model(model, cache)
    session.prefill(tokens(4))
    for token in range(3, 8):
        session.decode(torch.tensor([token]))
    # In turn, and each layer at the same one in every step.
    assert seen == [0, 1, 0] * 5


def test_in_a_file_and_with_fewer_bits(tmp_path: Path) -> None:
    model, ids = model_of("gemma3_text"), tokens(LENGTH)
    plain = Session.from_model(model, ExportableCache.from_model(model, CAPACITY, kv_dtype="int8"))
    expected = list(plain.generate(ids[:, :PROMPT], max_new_tokens=20))
    session = Session.from_model(model, offloaded(model, tmp_path, kv_dtype="int8"))
    assert list(session.generate(ids[:, :PROMPT], max_new_tokens=20)) == expected


def test_rows_drafts_and_saved_states(tmp_path: Path) -> None:
    model = model_of("gemma3_text")
    prompts = [tokens(5)[0], tokens(14, seed=1)[0]]
    caches = [ExportableCache.from_model(model, CAPACITY, 2), offloaded(model, rows=2)]
    sessions = [Session.from_model(model, cache) for cache in caches]
    texts = [[step.tolist() for step in one.generate(prompts, max_new_tokens=12)] for one in sessions]
    assert texts[0] == texts[1]
    sessions[1].save_state(tmp_path / "state.safetensors")
    sessions[0].load_state(tmp_path / "state.safetensors")
    token = torch.tensor([7, 9])
    after = sessions[0].decode(token)
    fork = sessions[1].fork()
    assert (sessions[1].decode(token) - after).abs().max() < 1e-5
    assert (fork.decode(token) - after).abs().max() < 1e-5
    repeated = torch.tensor([[5, 9, 7, 11, 5, 9, 7, 11, 5, 9, 7]])
    drafted = [
        list(
            Session.from_model(model, cache, score_length=5).generate(
                repeated, max_new_tokens=20, draft=PromptLookup(4)
            )
        )
        for cache in (
            ExportableCache.from_model(model, CAPACITY, rollback_slots=8),
            offloaded(model, rollback_slots=8),
        )
    ]
    assert drafted[0] == drafted[1]


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_steps(kind: str) -> None:
    model, ids = model_of(kind), tokens(LENGTH)
    expected = reference_logits(model, ids, PROMPT)
    with torch._dynamo.config.patch(error_on_recompile=True):
        session = Session.from_model(model, offloaded(model), compile="wait")
        step = lambda piece: session.prefill(piece) if piece.shape[1] > 1 else session.decode(piece[:, 0])  # noqa: E731
        assert difference(step, expected, ids, PROMPT) < 1e-5
        session.reset()
        assert difference(step, expected, ids, PROMPT) < 1e-5


def test_plain_use_and_a_copy() -> None:
    model, ids = model_of("qwen3_next"), tokens(LENGTH)
    expected = reference_logits(model, ids, PROMPT)
    cache = offloaded(model)
    step = lambda piece: model(piece, past_key_values=cache).logits[:, -1]  # noqa: E731
    assert difference(step, expected, ids, PROMPT) < 1e-5
    other = copy.deepcopy(cache)
    after = model(ids[:, :1], past_key_values=cache).logits
    assert torch.equal(model(ids[:, :1], past_key_values=other).logits, after)
    assert torch.equal(other.layers[1].keys, cache.layers[1].keys)
    assert other.layers[1].keys.data_ptr() != cache.layers[1].keys.data_ptr()
    assert other.offloader.layers[1] is other.layers[1] and other.offloader is not cache.offloader
    cache.reset()
    assert not any(bool(tensor.any()) for _, tensor in cache.named_state())
    assert difference(step, expected, ids, PROMPT) < 1e-5


def test_a_copy_after_steps_has_buffers_of_its_own() -> None:
    """More layers than buffers, so that a buffer does not hold what a layer left there."""
    model, ids = tiny_model("llama", num_hidden_layers=5), tokens(LENGTH)
    cache = offloaded(model)
    model(ids[:, :PROMPT], past_key_values=cache)
    other = copy.deepcopy(cache)
    for index in range(PROMPT, PROMPT + 3):
        first, second = (model(ids[:, index : index + 1], past_key_values=one).logits for one in (cache, other))
        assert torch.equal(first, second)


def test_a_step_that_was_cut_off_leaves_the_next_right(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model("llama"), tokens(LENGTH)
    expected = reference_logits(model, ids, PROMPT)
    session = Session.from_model(model, offloaded(model))
    session.prefill(ids[:, :PROMPT])
    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[1], "forward", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("cut off")))
        with pytest.raises(RuntimeError, match="cut off"):
            session.decode(torch.tensor([3]))
    assert (session.decode(ids[:, PROMPT]) - expected[:, 1]).abs().max() < 1e-5


def test_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    for wrong in ("disk", tmp_path / "missing", 3):
        with pytest.raises(InputError, match="'host' for host memory, or a folder"):
            offloaded(model, wrong)
    cache = offloaded(model)
    with pytest.raises(InputError, match="offloaded layers"):
        Program(model, cache)
    with pytest.raises(InputError, match="graph_cache must be None"):
        Session.from_model(model, cache, compile="wait", graph_cache=tmp_path / "graphs")
    with pytest.raises(InputError, match="not supported for offloaded layers"):
        Session.from_model(model, cache, compile="background")
    from exportable_cache.cache.spec import CacheSpec

    with pytest.raises(InputError, match="live sessions"):
        ExportSpec(model, "pt2", tmp_path / "out", cache=CacheSpec(CAPACITY, offload="host"))
    sharing = tiny_model("gemma3n_text", **_SHARING)
    with pytest.raises(UnsupportedModelError, match="whose layers read keys of other layers"):
        offloaded(sharing)


_SHARING = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 128,
    "altup_num_inputs": 2,
    "laurel_rank": 4,
    "activation_sparsity_pattern": [0.0] * 4,
}
