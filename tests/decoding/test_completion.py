"""Completions one after another: what they give, and what of a prompt is not fed again."""

from __future__ import annotations

import pytest
import torch

from exportable_cache import ExportableCache, Session
from exportable_cache.decoding import Completer, CompletionOptions, Sampling
from exportable_cache.errors import CacheFullError, InputError

from ..support.kinds import kind_model
from ..support.letters import letter_tokenizer
from ..support.models import VOCAB, WINDOW, tiny_model, tokens

CAPACITY = 48


def completer_of(model, **options) -> Completer:
    cache = ExportableCache.from_model(model, CAPACITY, **options)
    return Completer(Session.from_model(model, cache, tokenizer=letter_tokenizer()))


def answer(completer: Completer, ids: list[int], count: int) -> tuple[list[int], int]:
    completion = completer.complete(ids, CompletionOptions(max_new_tokens=count))
    return [piece.token for piece in completion], completion.reused_tokens


def fresh(model, ids: list[int], count: int) -> list[int]:
    return answer(completer_of(model), ids, count)[0]


# Full layers take back anything, a ring what it has room for, a state nothing.
@pytest.mark.parametrize(("family", "reuses"), [("llama", True), ("gemma3_text", False), ("mamba2", False)])
def test_what_is_held_is_not_fed_again_and_the_answer_is_that_of_a_fresh_session(family: str, reuses: bool) -> None:
    model = kind_model(family) if family == "mamba2" else tiny_model(family)
    model.generation_config.eos_token_id = None
    completer = completer_of(model)
    first = tokens(WINDOW + 4)[0].tolist()
    found, reused = answer(completer, first, 6)
    assert reused == 0 and found == fresh(model, first, 6)
    # It goes on: the newest token was given out and not fed.
    longer = [*first, *found, 5, 6]
    found, reused = answer(completer, longer, 4)
    assert reused == len(first) + 5 and found == fresh(model, longer, 4)
    # Another ending, past what a ring has room for.
    other = [*first, 9, 10, 11]
    found, reused = answer(completer, other, 4)
    assert reused == (len(first) if reuses else 0) and found == fresh(model, other, 4)
    # The same again: its last token is fed, as its logits are wanted.
    found, reused = answer(completer, other, 4)
    assert reused == (len(other) - 1 if reuses else 0) and found == fresh(model, other, 4)
    # Nothing in common.
    assert answer(completer, [7, 7], 3) == (fresh(model, [7, 7], 3), 0)


def test_an_answer_that_is_given_up_and_a_step_that_fails_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    completer = completer_of(model)
    ids = tokens(10)[0].tolist()
    begun = completer.complete(ids)
    next(begun), next(begun)
    begun.close()
    assert next(begun, None) is None
    assert answer(completer, ids, 5)[0] == fresh(model, ids, 5)

    def fails(step: torch.Tensor) -> torch.Tensor:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(completer.session, "decode", fails)
        with pytest.raises(MemoryError):
            list(completer.complete(ids))
    found, reused = answer(completer, ids, 5)
    assert found == fresh(model, ids, 5) and reused == 0
    # Somebody else used the session: what it holds is not what was noted.
    completer.session.reset()
    completer.session.prefill(tokens(3))
    assert answer(completer, ids, 5) == (fresh(model, ids, 5), 0)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mamba2"])
def test_a_prompt_is_given_up_between_chunks_and_the_next_is_answered_as_by_a_fresh_session(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exportable_cache.decoding.session_completion.MOST_A_CHUNK", 8)
    model = kind_model(family) if family == "mamba2" else tiny_model(family)
    model.generation_config.eos_token_id = None
    completer, ids = completer_of(model), tokens(36)[0].tolist()
    given_up = completer.complete(ids)
    run, chunks = completer.session.runner.run, []

    def notes(method: str, *inputs: torch.Tensor) -> torch.Tensor:
        chunks.append(inputs[0].shape[1])
        if len(chunks) == 2:
            given_up.give_up()
        return run(method, *inputs)

    monkeypatch.setattr(completer.session.runner, "run", notes)
    assert next(given_up, None) is None and chunks == [8, 8]
    # The chunks that were fed are held.
    assert answer(completer, ids, 4) == (fresh(model, ids, 4), 16)
    # During an answer: no further piece.
    begun = completer.complete(ids)
    next(begun)
    begun.give_up()
    assert next(begun, None) is None
    assert answer(completer, [7, 7], 3) == (fresh(model, [7, 7], 3), 0)


def test_log_probabilities_are_the_models() -> None:
    model = tiny_model("llama")
    completer, ids = completer_of(model), tokens(6)
    options = CompletionOptions(Sampling(0.7, seed=1), 4, alternatives=3)
    pieces = list(completer.complete(ids[0].tolist(), options))
    given = torch.cat([ids, torch.tensor([[piece.token for piece in pieces]])], dim=1)
    with torch.no_grad():
        expected = model(given).logits[0, 5:-1].log_softmax(dim=-1)
    for piece, row in zip(pieces, expected, strict=True):
        assert piece.logprob == pytest.approx(float(row[piece.token]), abs=1e-4)
        values, best = row.topk(3)
        assert [token for token, _ in piece.alternatives] == best.tolist()
        assert [value for _, value in piece.alternatives] == pytest.approx(values.tolist(), abs=1e-4)
    greedy = completer.complete(ids[0].tolist(), CompletionOptions(max_new_tokens=1))
    assert next(greedy).logprob is None


def test_texts_end_an_answer_and_are_not_part_of_it() -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    completer, ids = completer_of(model), tokens(6)[0].tolist()
    whole = completer.complete(ids, CompletionOptions(max_new_tokens=12))
    text = "".join(piece.text for piece in whole)
    assert whole.finish_reason == "length" and whole.new_tokens == 12
    stop = text[5:7]
    stopped = completer.complete(ids, CompletionOptions(max_new_tokens=12, stop=(stop,)))
    assert "".join(piece.text for piece in stopped) == text[: text.index(stop)]
    assert stopped.finish_reason == "stop"


def test_the_cache_is_filled_and_not_more() -> None:
    completer = completer_of(tiny_model("llama"))
    completer.session.generation_config.eos_token_id = None
    ids = tokens(CAPACITY - 3)[0].tolist()
    completion = completer.complete(ids)
    # The newest token takes no slot.
    assert len(list(completion)) == 4 and completion.finish_reason == "length"
    with pytest.raises(CacheFullError, match=f"prompt has {CAPACITY + 1} tokens, but the cache holds {CAPACITY}"):
        completer.complete([5] * (CAPACITY + 1))
    with pytest.raises(CacheFullError, match="5 new ones were requested.*request at most 4"):
        completer.complete(ids, CompletionOptions(max_new_tokens=5))


@pytest.mark.parametrize(
    ("ids", "message"),
    [([], "the prompt is empty"), ([VOCAB], f"token ids must be from 0 to {VOCAB - 1}, got {VOCAB}"), ([-1], "got -1")],
)
def test_wrong_prompts_are_refused(ids: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        completer_of(tiny_model("llama")).complete(ids)


def test_sessions_that_cannot_serve_are_refused() -> None:
    model = tiny_model("llama")
    with pytest.raises(InputError, match="batch_size must be 1 for Completer, got 2"):
        completer_of(model, batch_size=2)
    with pytest.raises(InputError, match="need a tokenizer"):
        Completer(Session.from_model(model, ExportableCache.from_model(model, 16)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be .* got 0"),
        ({"alternatives": -1}, "alternatives must be .* got -1"),
        ({"stop": ("",)}, "at least one character"),
    ],
)
def test_wrong_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        CompletionOptions(**options)
