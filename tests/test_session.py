"""Sessions over the live model: the numbers of the oracle, and refusals that change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from exportable_cache import ExportableCache, Session
from exportable_cache.errors import CacheFullError, InputError

from .support.models import VOCAB, WINDOW, hybrid_model, tiny_model, tokens
from .support.oracle import reference_logits

CAPACITY = 64
CHUNK = 13


@pytest.fixture(scope="module")
def model() -> Any:
    """Hybrid: one ring, one full layer."""
    return hybrid_model()


@pytest.fixture(scope="module")
def sliding_model() -> Any:
    return tiny_model("mistral")


def session_of(model: Any, capacity: int = CAPACITY, batch_size: int = 1, slack: int = 0, **options: Any) -> Session:
    cache = ExportableCache.from_model(model, capacity, batch_size, rollback_slots=slack)
    return Session.from_model(model, cache, **{"prefill_chunk": min(CHUNK, capacity), **options})


def feed(session: Session, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """Logits [batch, steps, vocab] after the prompt and after each later token."""
    rows = [session.prefill(ids[:, :prompt])]
    rows += [session.decode(ids[:, position]) for position in range(prompt, ids.shape[1])]
    return torch.stack(rows, dim=1)


# -- numbers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [1, 2, 3, 7, 8, 9, 13, 14, 27, 40])
def test_prompts_of_any_length_match_the_model(model: Any, prompt: int) -> None:
    ids = tokens(60)
    session = session_of(model)
    torch.testing.assert_close(feed(session, ids, prompt), reference_logits(model, ids, prompt), atol=1e-5, rtol=0)
    assert session.length.tolist() == [60]


@pytest.fixture(scope="module")
def compiled_session(model: Any) -> Session:
    """Shared, because compiling takes long: reset it."""
    return session_of(model, compile=True)


def test_compiled_matches_the_model(model: Any, compiled_session: Session) -> None:
    ids = tokens(60)
    session = compiled_session
    for prompt in (27, 3):
        session.reset()
        torch.testing.assert_close(feed(session, ids, prompt), reference_logits(model, ids, prompt), atol=1e-5, rtol=0)
    assert session.target == "compiled"


def test_rows_are_independent(model: Any) -> None:
    ids = tokens(40, batch_size=3)
    torch.testing.assert_close(
        feed(session_of(model, batch_size=3), ids, 20), reference_logits(model, ids, 20), atol=1e-5, rtol=0
    )


def test_without_prefill_method_prompts_go_token_by_token(model: Any) -> None:
    ids = tokens(30)
    session = session_of(model, prefill_chunk=1)
    assert session.stepper.chunk_sizes(5) == [1] * 5
    torch.testing.assert_close(feed(session, ids, 20), reference_logits(model, ids, 20), atol=1e-5, rtol=0)


def test_chunk_sizes_cover_the_prompt(model: Any) -> None:
    session = session_of(model)
    assert session.stepper.chunk_sizes(12) == [12]
    assert session.stepper.chunk_sizes(13) == [13]
    assert session.stepper.chunk_sizes(14) == [13, 1]
    assert session.stepper.chunk_sizes(28) == [13, 13, 2]


def test_prefill_continues_and_reset_starts_anew(model: Any) -> None:
    ids = tokens(40)
    session = session_of(model)
    session.prefill(ids[:, :11])
    session.decode(ids[:, 11])
    continued = session.prefill(ids[:, 12:])
    session.reset()
    assert session.length.tolist() == [0]
    assert torch.equal(session.length, torch.zeros(1, dtype=torch.int64))
    torch.testing.assert_close(continued, session.prefill(ids), atol=1e-5, rtol=0)


def test_every_slot_of_a_full_layer_is_used(model: Any) -> None:
    ids = tokens(CAPACITY)
    session = session_of(model)
    torch.testing.assert_close(feed(session, ids, 40), reference_logits(model, ids, 40), atol=1e-5, rtol=0)
    assert session.room == 0


def test_pure_sliding_model_has_no_limit(sliding_model: Any) -> None:
    session = session_of(sliding_model, capacity=16)
    ids = tokens(200)
    assert session.max_length is None
    assert session.room is None
    torch.testing.assert_close(feed(session, ids, 50), reference_logits(sliding_model, ids, 50), atol=1e-5, rtol=0)


# -- the user's cache ---------------------------------------------------------------------------------------------------


def test_a_cache_that_holds_tokens_is_continued(model: Any) -> None:
    ids = tokens(30)
    cache = ExportableCache.from_model(model, CAPACITY)
    with torch.no_grad():
        model(ids[:, :17], past_key_values=cache)
    session = Session.from_model(model, cache)
    assert session.length.tolist() == [17]
    logits = session.prefill(ids[:, 17:])
    torch.testing.assert_close(logits, reference_logits(model, ids, 30)[:, 0], atol=1e-5, rtol=0)


def test_the_cache_goes_on_outside_the_session(model: Any) -> None:
    ids = tokens(30)
    session = session_of(model)
    session.prefill(ids[:, :20])
    cache = session.cache
    assert [layer.cumulative_length.tolist() for layer in cache.layers] == [[20], [20]]
    with torch.no_grad():
        logits = model(ids[:, 20:], past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(logits, reference_logits(model, ids, 30)[:, 0], atol=1e-5, rtol=0)


def test_the_cache_knows_what_the_session_overwrote(model: Any) -> None:
    session = session_of(model, slack=2)
    session.prefill(tokens(20))
    session.rewind(2)
    cache = session.cache
    cache.crop(-1)
    with pytest.raises(InputError, match="at most 0 tokens"):
        cache.crop(-1)


def test_rewind_of_a_cache_with_unknown_history_is_refused(sliding_model: Any) -> None:
    cache = ExportableCache.from_model(sliding_model, CAPACITY)
    with torch.no_grad():
        sliding_model(tokens(5), past_key_values=cache)
    rebuilt = cache.with_state(dict(cache.named_state()))
    session = Session.from_model(sliding_model, rebuilt)
    with pytest.raises(InputError, match="at most 0 can be taken back"):
        session.rewind(1)
    session.reset()
    session.prefill(tokens(5))
    session.rewind(5)


# -- rewind -------------------------------------------------------------------------------------------------------------


def test_rewind_then_other_tokens_equals_never_having_fed_them(model: Any) -> None:
    session = session_of(model, slack=3)
    kept, other = tokens(30), tokens(6, seed=1)
    session.prefill(kept)
    session.prefill(tokens(4, seed=2))
    session.rewind(4)
    assert session.length.tolist() == [30]
    rows = feed(session, other, 2)
    whole = torch.cat([kept, other], dim=1)
    torch.testing.assert_close(rows, reference_logits(model, whole, 32), atol=1e-5, rtol=0)


def test_rewind_of_a_full_layer_alone_goes_all_the_way(model: Any) -> None:
    session = session_of(tiny_model("llama"))
    session.prefill(tokens(50))
    session.rewind(50)
    assert session.length.tolist() == [0]


def test_rewind_past_the_ring_is_refused_and_changes_nothing(model: Any) -> None:
    ids = tokens(31)
    session = session_of(model, slack=2)
    session.prefill(ids[:, :30])
    with pytest.raises(InputError, match=r"cannot rewind 4 tokens.*\[30\].*at most 3 can be taken back"):
        session.rewind(4)
    torch.testing.assert_close(session.decode(ids[:, 30]), reference_logits(model, ids, 31)[:, 0], atol=1e-5, rtol=0)


def test_rewind_counts_from_the_most_tokens_ever_held(model: Any) -> None:
    session = session_of(model, slack=2)
    session.prefill(tokens(30))
    session.rewind(2)
    # Three slots were overwritten beyond the window, two of them are used up; growing back to 30 frees none.
    with pytest.raises(InputError, match="at most 1 can be taken back"):
        session.rewind(2)
    session.prefill(tokens(2, seed=3))
    session.rewind(3)
    with pytest.raises(InputError, match="at most 0 can be taken back"):
        session.rewind(1)
    session.reset()
    session.prefill(tokens(WINDOW + 2))
    session.rewind(WINDOW + 2)


@pytest.mark.parametrize("count", [-1, 1.0, True, "2"])
def test_rewind_of_no_count_is_refused(model: Any, count: Any) -> None:
    session = session_of(model)
    session.prefill(tokens(5))
    with pytest.raises(InputError, match="tokens must be an int of at least 0"):
        session.rewind(count)
    assert session.length.tolist() == [5]


def test_rewind_of_more_than_held_is_refused(model: Any) -> None:
    session = session_of(model)
    session.prefill(tokens(5))
    with pytest.raises(InputError, match=r"cannot rewind 6 tokens, rows hold \[5\]; rewind at most 5"):
        session.rewind(6)


# -- refusals -----------------------------------------------------------------------------------------------------------

Call = Callable[[Session], Any]

REFUSED: dict[str, tuple[Call, type[Exception], str]] = {
    "empty prompt": (lambda s: s.prefill(torch.empty(1, 0, dtype=torch.int64)), InputError, r"one token per row, got shape \[1, 0\].*empty"),
    "batch": (lambda s: s.prefill(tokens(4, batch_size=2)), InputError, "must have 1 rows, got 2.*batch_size=2"),
    "decode batch": (lambda s: s.decode(torch.tensor([3, 4])), InputError, "must have 1 rows, got 2"),
    "prompt rank": (lambda s: s.prefill(torch.tensor([3, 4])), InputError, r"shape \[batch, length\] with batch 1, got \[2\]"),
    "decode rank": (lambda s: s.decode(torch.tensor([[3]])), InputError, r"shape \[batch\] with batch 1, got \[1, 1\]"),
    "int32": (lambda s: s.prefill(tokens(4).int()), InputError, r"must be torch.int64, got torch.int32.*\.to\(torch.int64\)"),
    "float": (lambda s: s.decode(torch.tensor([3.0])), InputError, "must be torch.int64, got torch.float32"),
    "list": (lambda s: s.prefill([[3, 4]]), InputError, "must be an int64 tensor .* got a list"),
    "device": (lambda s: s.prefill(tokens(4).to("meta")), InputError, r"must be on cpu, got meta; pass .*\('cpu'\)"),
    "token too large": (
        lambda s: s.prefill(torch.tensor([[3, 4, VOCAB]])), InputError, rf"ids\[0, 2\] must be .*0 to {VOCAB - 1}, got {VOCAB}"
    ),
    "negative token": (lambda s: s.decode(torch.tensor([-1])), InputError, r"tokens\[0\] must be a token id .* got -1"),
    "too long": (lambda s: s.prefill(tokens(55)), CacheFullError, "holds 10 of at most 64 tokens, 55 more do not fit.*reset"),
    "longer than the cache": (lambda s: s.prefill(tokens(65)), CacheFullError, "65 more do not fit; shorten.*at least 75"),
    "generate prompt": (lambda s: s.generate(tokens(55)), CacheFullError, "55 more do not fit"),
    "generate steps": (lambda s: s.generate(tokens(50), 6), CacheFullError, "max_new_tokens may be at most 5, got 6"),
    "no new tokens": (lambda s: s.generate(tokens(5), 0), InputError, "max_new_tokens must be an int of at least 1.* got 0"),
    "temperature": (lambda s: s.generate(tokens(5), temperature=-1.0), InputError, "temperature must be .*got -1.0"),
    "stop token": (lambda s: s.generate(tokens(5), stop=VOCAB), InputError, f"stop must be .*0 to {VOCAB - 1}.* got {VOCAB}"),
    "empty stop": (lambda s: s.generate(tokens(5), stop=[""]), InputError, "stop must be .*at least one character, got ''"),
    "stop without tokenizer": (lambda s: s.generate(tokens(5), stop="x"), InputError, "stop string needs a tokenizer"),
    "text without tokenizer": (lambda s: s.stream_text("hi"), InputError, "text needs a tokenizer.*use generate"),
}  # fmt: skip


@pytest.fixture(scope="module", params=["eager", "compiled"])
def session(request: pytest.FixtureRequest, model: Any) -> Session:
    """An uncompiled session, and the compiled one: reset them."""
    return session_of(model) if request.param == "eager" else request.getfixturevalue("compiled_session")


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_changes(
    model: Any, session: Session, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, error, message = REFUSED[case]
    ids = tokens(11)
    session.reset()
    session.prefill(ids[:, :10])
    state = {name: tensor.clone() for name, tensor in session.cache.named_state()}
    with monkeypatch.context() as patch:
        patch.setattr(session.runner, "run", lambda *arguments: pytest.fail("a refused call ran a step"))
        with pytest.raises(error, match=message):
            call(session)
    assert session.length.tolist() == [10]
    assert all(torch.equal(tensor, state[name]) for name, tensor in session.cache.named_state())
    torch.testing.assert_close(session.decode(ids[:, 10]), reference_logits(model, ids, 11)[:, 0], atol=1e-5, rtol=0)


def test_decode_on_a_full_cache_is_refused(model: Any) -> None:
    session = session_of(model)
    session.prefill(tokens(CAPACITY))
    with pytest.raises(CacheFullError, match="holds 64 of at most 64 tokens, 1 more do not fit"):
        session.decode(torch.tensor([3]))
    assert session.length.tolist() == [CAPACITY]


def test_a_step_that_fails_leaves_the_length(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tokens(11)
    session = session_of(model)
    session.prefill(ids[:, :10])

    def fail(*arguments: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(session.runner, "run", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            session.decode(ids[:, 10])
    assert session.length.tolist() == [10]
    torch.testing.assert_close(session.decode(ids[:, 10]), reference_logits(model, ids, 11)[:, 0], atol=1e-5, rtol=0)


def test_wrong_model_or_cache_is_refused(model: Any) -> None:
    cache = ExportableCache.from_model(model, CAPACITY)
    with pytest.raises(InputError, match="cache must be an ExportableCache, got a dict; allocate one with"):
        Session.from_model(model, {})
    with pytest.raises(InputError, match="the cache must have 3 layers like the model, got 2"):
        Session.from_model(tiny_model("llama", num_hidden_layers=3), cache)
    training = tiny_model("llama").train()
    with pytest.raises(InputError, match="training mode; call model.eval"):
        Session.from_model(training, ExportableCache.from_model(training, CAPACITY))
    with pytest.raises(InputError, match="prefill_chunk must be 1 to 64.*got 65"):
        Session.from_model(model, cache, prefill_chunk=65)


def test_lengths_given_out_are_copies(model: Any) -> None:
    session = session_of(model)
    session.prefill(tokens(5))
    session.length.zero_()
    assert session.length.tolist() == [5]


@pytest.mark.parametrize("family", ["mistral", "llama"])
def test_a_cache_of_other_windows_is_refused(family: str) -> None:
    from .support.layers import ring_layer

    model = tiny_model(family)
    with pytest.raises(InputError, match="layer 0 of the cache must fit .*, got CacheLayer.RingPolicy.window=4"):
        Session.from_model(model, ExportableCache([ring_layer(1, 2, 8, 4), ring_layer(1, 2, 8, 4)]))


def test_reset_cures_a_live_session_of_not_a_number() -> None:
    model = tiny_model("gemma3_text")
    cache = ExportableCache.from_model(model, 32)
    session = Session.from_model(model, cache)
    ids = torch.arange(3, 15)[None]
    expected = session.prefill(ids)
    for layer in cache.layers:
        layer.values.fill_(float("nan"))
    session.reset()
    assert torch.equal(session.prefill(ids), expected)


@pytest.mark.parametrize("family", ["gptj", "ctrl", "gpt2"])
def test_position_tables_limit_the_cache_wherever_they_are_kept(family: str) -> None:
    options = {"gptj": {"rotary_dim": 8}, "ctrl": {"dff": 64}, "gpt2": {}}[family]
    model = tiny_model(family, max_position_embeddings=32, **options)
    Session.from_model(model, ExportableCache.from_model(model, 32))
    with pytest.raises(InputError, match="the cache must hold at most 32 tokens, .*, got 64"):
        Session.from_model(model, ExportableCache.from_model(model, 64))


def test_a_model_that_gives_fewer_ids_than_it_looks_up() -> None:
    """As Llama 3.2 Vision and Molmo 2 do, for their images."""
    model = tiny_model("llama")
    expected = list(Session.from_model(model, ExportableCache.from_model(model, 32)).generate(tokens(5), 4))
    model.resize_token_embeddings(136)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[:128])
    session = Session.from_model(model, ExportableCache.from_model(model, 32))
    assert session.prefill(tokens(5)).shape == (1, 128)
    session.reset()
    assert list(session.generate(tokens(5), 4)) == expected
    session.reset()
    assert list(session.generate(tokens(5), 4, temperature=1.0, seed=0))
    assert session.prefill(torch.tensor([[130, 3]])).shape == (1, 128)
