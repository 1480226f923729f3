"""Attention sinks in every target, against the model with the same tokens masked."""

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from exportable_cache import ExportableCache, Session, load
from exportable_cache.cache.attention.implementation import attention_of
from exportable_cache.cache.policies import SinkPolicy
from exportable_cache.cache.spec import Sinks
from exportable_cache.errors import InputError, UnsupportedModelError
from exportable_cache.verification.references import evicting_cache
from exportable_cache.verification.verify import verify_session

from .support.layers import sink_layer
from .support.memory import resident_kib
from .support.models import WINDOW, tiny_model, tokens
from .support.oracle import difference
from .support.sessions import lowered_session, sinks_bundle

SINKS, NEWEST = 3, 8
KEPT = SINKS + NEWEST


@torch.no_grad()
def masked_logits(model: PreTrainedModel, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """The oracle: everything is kept in a `DynamicCache`, and a 4-D mask of our own shows sinks and window only."""
    length = ids.shape[1]
    query, key = torch.arange(length)[:, None], torch.arange(length)[None]
    shown = (key <= query) & ((key < SINKS) | (key > query - NEWEST))
    full = torch.where(shown, 0.0, torch.finfo(torch.float32).min)[None, None]
    sliding = torch.where((key <= query) & (key > query - WINDOW), 0.0, torch.finfo(torch.float32).min)[None, None]
    types = getattr(model.config, "layer_types", None)
    mask = {"full_attention": full, "sliding_attention": sliding} if types and "sliding_attention" in types else full
    with attention_of(model, "eager"):
        logits = model(ids, attention_mask=mask, past_key_values=None, use_cache=False).logits
    return logits[:, prompt - 1 :]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3"])
def test_dropping_tokens_is_masking_them(family: str) -> None:
    model, ids = tiny_model(family), tokens(40)
    cache = evicting_cache(model.config, Sinks(SINKS, NEWEST))
    with torch.no_grad(), attention_of(model, "eager"):
        steps = [model(ids[:, i : i + 1], past_key_values=cache).logits[:, -1] for i in range(40)]
    oracle = masked_logits(model, ids, 1)
    assert (torch.stack(steps, dim=1) - oracle).abs().max() <= 1e-5
    # The mask matters: the model with everything in sight says something else.
    with torch.no_grad(), attention_of(model, "eager"):
        everything = model(ids, past_key_values=DynamicCache(config=model.config)).logits
    assert (everything[:, :KEPT] - oracle[:, :KEPT]).abs().max() <= 1e-5
    assert (everything[:, -1] - oracle[:, -1]).abs().max() > 0.05


def sink_session(model: PreTrainedModel, target: str) -> Session:
    if target in ("eager", "compiled"):
        cache = ExportableCache.from_model(model, KEPT, attention_sinks=SINKS)
        return Session.from_model(model, cache, compile=target == "compiled", prefill_chunk=16, buckets=False)
    return lowered_session(model, target, KEPT, attention_sinks=SINKS)


# In the fast lane both families, eager and exported. Layers of plain operators on ExecuTorch: test_executorch.py.
@pytest.mark.parametrize(
    ("family", "target"),
    [
        ("llama", "eager"),
        ("gemma3_text", "eager"),
        ("llama", "pt2"),
        pytest.param("gemma3_text", "executorch", marks=pytest.mark.full),
        pytest.param("gemma3_text", "compiled", marks=pytest.mark.full),
        pytest.param("llama", "compiled", marks=pytest.mark.full),
        pytest.param("gemma3_text", "pt2", marks=pytest.mark.full),
        pytest.param("llama", "executorch", marks=pytest.mark.full),
    ],
)
def test_every_target_equals_the_masked_model(family: str, target: str) -> None:
    if target == "executorch":
        pytest.importorskip("executorch")
        model, folder = sinks_bundle() if family == "gemma3_text" else (tiny_model(family), None)
        session = load(folder) if folder else sink_session(model, target)
    else:
        model = tiny_model(family)
        session = sink_session(model, target)
    assert session.max_length is None
    for prompt in (2, 10, 11, 12, 30):
        ids = tokens(prompt + 25, seed=prompt)
        oracle = masked_logits(model, ids, prompt)
        session.reset()

        def step(piece: torch.Tensor, session: Session = session) -> torch.Tensor:
            return session.prefill(piece) if piece.shape[1] > 1 else session.decode(piece[:, 0])

        assert difference(step, oracle, ids, prompt) <= 1e-4


def test_verification_feeds_the_reference_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    report = verify_session(sink_session(model, "eager"), model)
    assert report.passed and report.windows == (KEPT,) and max(prompt.length for prompt in report.prompts) == 5 * KEPT
    # A reference that keeps one sink fewer and one token more disagrees.
    session = sink_session(model, "eager")
    layers = tuple(sink_layer(1, 2, 8, SINKS - 1, NEWEST + 1) for _ in session.layers)
    monkeypatch.setattr(Session, "layers", layers)
    assert not verify_session(session, model).passed


@pytest.mark.full
@torch.no_grad()
def test_ten_thousand_tokens_on_the_executorch_runtime_in_constant_memory() -> None:
    pytest.importorskip("executorch")
    model, folder = sinks_bundle()
    session = load(folder)
    count, tail = 10_000, 40
    ids = tokens(count)
    session.prefill(ids[:, :30])
    resident = []
    for position in range(30, count):
        logits = session.decode(ids[:, position])
        if position in (1_000, 5_500, count - 1):
            resident.append(resident_kib())
    # What other tests left behind may be allocated at any time, once; a leak grows in both halves.
    assert min(resident[1] - resident[0], resident[2] - resident[1]) < 1024
    assert session.length.tolist() == [count]
    # What a ring and a layer of window 8 reach back to, and the sinks, whose own states depend on nothing after them.
    positions = torch.cat([torch.arange(SINKS), torch.arange(count - tail, count)])
    query, key = positions[:, None], positions[None]
    sliding = (key <= query) & (key > query - WINDOW)
    shown = {"sliding_attention": sliding, "full_attention": (key <= query) & ((key < SINKS) | (key > query - NEWEST))}
    mask = {kind: torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None] for kind, seen in shown.items()}
    with attention_of(model, "eager"):
        kept = model(ids[:, positions], attention_mask=mask, position_ids=positions[None], use_cache=False).logits[
            :, -1
        ]
    assert (logits - kept).abs().max() <= 1e-4


def test_the_layers_of_a_cache_and_their_bytes() -> None:
    cache = ExportableCache.from_model(tiny_model("gemma3_text"), 64, attention_sinks=4, attention_window=12)
    assert [layer.label for layer in cache.layers] == ["ring", "sinks"]
    assert cache.layers[1].policy == SinkPolicy(sinks=4, window=12) and cache.layers[1].capacity == 16
    assert cache.max_length is None and cache.layers[1].nbytes == 2 * 2 * 16 * 8 * 4 + 8
    # The window is what the sinks leave, and a sliding layer stays a ring however short the cache is.
    cache = ExportableCache.from_model(tiny_model("gemma3_text"), WINDOW, attention_sinks=2)
    assert [layer.label for layer in cache.layers] == ["ring", "sinks"] and cache.layers[1].policy.window == WINDOW - 2
    from_config = ExportableCache.from_config(tiny_model("gemma3_text").config, WINDOW, attention_sinks=2)
    assert [layer.config() for layer in from_config.layers] == [layer.config() for layer in cache.layers]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_window": 8}, "attention_window is 8, but there are no attention_sinks"),
        ({"attention_sinks": 0}, "attention_sinks must be an int of at least 1, got 0"),
        (
            {"attention_sinks": 4, "attention_window": 29},
            "attention_sinks 4 and attention_window 29 take 33 slots, max_cache_len is 32",
        ),
        ({"attention_sinks": 32}, "attention_sinks 32 and attention_window 1 take 33 slots, max_cache_len is 32"),
        ({"attention_sinks": "4"}, "attention_sinks must be .*, got '4'"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ExportableCache.from_model(tiny_model("llama"), 32, **options)


def test_models_without_use_for_sinks_are_refused() -> None:
    with pytest.raises(InputError, match="no layer of this 'mistral' model attends to all tokens"):
        ExportableCache.from_model(tiny_model("mistral"), 32, attention_sinks=4)
    with pytest.raises(UnsupportedModelError, match="'bloom' derives its position bias from the slots"):
        ExportableCache.from_model(tiny_model("bloom", n_layer=2, n_head=4), 32, attention_sinks=4)
