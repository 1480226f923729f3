"""Continuous batching: every request gets the tokens it would get alone, whoever its neighbours are."""

from importlib import metadata
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch._dynamo.utils import counters

from exportable_cache.decoding import ContinuousBatch, Sampling
from exportable_cache.errors import CacheFullError, InputError

from ..support.models import hybrid_model, tiny_model, tokens
from ..support.sessions import live_session

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model() -> Any:
    return hybrid_model()


def alone(model: Any, prompt: torch.Tensor, count: int | None, **options: Any) -> list[int]:
    return list(live_session(model, False, 48).generate(prompt, count, **options))


def test_requests_of_different_lengths_share_rows(model: Any) -> None:
    batch = ContinuousBatch.from_model(model, 48, 3, prefill_chunk=16)
    prompts = [tokens(length, seed=length) for length in (3, 20, 8, 9, 5, 30, 12)]
    counts = [10, 3, 25, 1, 12, None, 7]
    requests = [batch.submit(prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
    assert batch.waiting == 7
    most = 0
    for _, _ in batch.run():
        most = max(most, batch.active)
    assert most == 3 and batch.active == 0
    for request, prompt, count in zip(requests, prompts, counts, strict=True):
        assert request.finished
        assert request.tokens == alone(model, prompt, count)


def test_logits_of_a_row_do_not_depend_on_its_neighbours(model: Any) -> None:
    """Teacher-forced through the decode session: a row admitted late, beside one that is past the window."""
    batch = ContinuousBatch.from_model(model, 48, 2, prefill_chunk=16)
    batch.submit(tokens(20, seed=1), 20)
    for _ in range(5):
        batch.step()
    late = batch.submit(tokens(6, seed=2), 12)
    single = live_session(model, False, 48)
    expected = single.prefill(tokens(6, seed=2))
    seen = []
    step = batch.decode.stepper.step
    batch.decode.stepper.step = lambda *given, **options: seen.append(step(*given, **options)) or seen[-1]
    batch.step()
    seen.clear()
    while not late.finished:
        batch.step()
    for logits, token in zip(seen, late.tokens):
        expected = single.decode(torch.tensor([token]))
        assert (logits[1] - expected[0]).abs().max() <= TOLERANCE
    assert len(seen) == 11


def test_a_row_without_a_request_takes_no_room(model: Any) -> None:
    """It is fed beside the others: for longer than the cache is."""
    batch = ContinuousBatch.from_model(model, 16, 2, prefill_chunk=16)
    for _ in range(3):
        request = batch.submit(tokens(4), 8)
        list(batch.run())
        assert request.finished and batch.decode.length.tolist() == [0, 0]


@pytest.mark.skipif(
    Version(metadata.version("transformers")) < Version("5.23"),
    reason="Mamba 2 of transformers 5.20 asks for one length of all rows, and is refused by name",
)
def test_linear_states_move_with_their_row() -> None:
    model = tiny_model("mamba2", num_heads=4, head_dim=16, state_size=8, n_groups=1, num_hidden_layers=2)
    batch = ContinuousBatch.from_model(model, 48, 2, prefill_chunk=16)
    prompts = [tokens(length, seed=length) for length in (5, 9, 7)]
    requests = [batch.submit(prompt, 8) for prompt in prompts]
    for _ in batch.run():
        pass
    assert [request.tokens for request in requests] == [alone(model, prompt, 8) for prompt in prompts]


def test_compiled_admission_recompiles_nothing(model: Any) -> None:
    torch._dynamo.reset()
    counters.clear()
    batch = ContinuousBatch.from_model(model, 48, 2, compile=True, prefill_chunk=16, buckets=False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        requests = [batch.submit(tokens(length, seed=length), 6) for length in range(2, 12)]
        for _ in batch.run():
            pass
    assert counters["stats"]["unique_graphs"] == 2
    for length, request in enumerate(requests, start=2):
        assert request.tokens == alone(model, tokens(length, seed=length), 6)


def test_each_request_has_its_own_sampling_and_stops(model: Any) -> None:
    batch = ContinuousBatch.from_model(model, 48, 2, prefill_chunk=16)
    prompt = tokens(6, seed=4)
    greedy = alone(model, prompt, 10)
    sampled = batch.submit(prompt, 10, Sampling(temperature=1.0, seed=3))
    stopped = batch.submit(prompt, 10, stop=[greedy[2]])
    for _ in batch.run():
        pass
    assert sampled.tokens == alone(model, prompt, 10, temperature=1.0, seed=3)
    assert stopped.tokens == greedy[: greedy.index(greedy[2]) + 1]


def test_what_does_not_fit_is_refused_when_it_is_submitted(model: Any) -> None:
    batch = ContinuousBatch.from_model(model, 48, 2, prefill_chunk=16)
    with pytest.raises(CacheFullError, match="at most 48 tokens"):
        batch.submit(tokens(49))
    with pytest.raises(CacheFullError, match="max_new_tokens may be at most 9"):
        batch.submit(tokens(40), 10)
    with pytest.raises(InputError, match="must be token ids for rows of a batch"):
        batch.submit(tokens(4), 3, stop=["x"])
    assert batch.waiting == 0
    with pytest.raises(InputError, match="the prefill session must have 1 row, got 2"):
        ContinuousBatch(batch.decode, batch.decode)
    with pytest.raises(InputError, match="allocate both caches for the same model"):
        ContinuousBatch(live_session(model, False, 32), batch.decode)


def test_sessions_of_models_with_other_weights_are_refused() -> None:
    """Of equal shapes: a prompt's keys of one model would be continued with the other."""
    model, other = tiny_model("llama"), tiny_model("llama")
    with torch.no_grad():
        other.lm_head.weight.add_(1.0)
    with pytest.raises(InputError, match="must have the same weights"):
        ContinuousBatch(live_session(model, False, 32), live_session(other, False, 32, batch_size=2))


def test_sessions_that_hold_tokens_are_refused(model: Any) -> None:
    prefill, decode = live_session(model, False, 32), live_session(model, False, 32, batch_size=2)
    decode.prefill(tokens(3, 2))
    with pytest.raises(InputError, match=r"the decode session must be empty, got \[3, 3\] tokens, .*; reset\(\) it"):
        ContinuousBatch(prefill, decode)
    decode.reset()
    prefill.prefill(tokens(4))
    with pytest.raises(InputError, match=r"the prefill session must be empty, got \[4\] tokens"):
        ContinuousBatch(prefill, decode)
