"""Rows of a batch that are shared by many requests: prompts between steps, prefixes, forks, cancelled requests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from exportable_cache.cli.server.engine import Engine
from exportable_cache.decoding import BatchCompleter, CompletionOptions, ContinuousBatch, Sampling
from exportable_cache.decoding.pacing import Pacing
from exportable_cache.decoding.prefix_tree import PrefixTree, common_length
from exportable_cache.errors import CacheFullError, InputError, NonFiniteLogitsError
from exportable_cache.generation.sampling_options import SamplingOptions
from exportable_cache.session.persistence import put_row, row_of

from ..support.kinds import kind_model
from ..support.letters import letter_tokenizer
from ..support.models import tiny_model, tokens
from ..support.sessions import live_session
from ..test_rope import KINDS as ROPES
from ..test_rope import model_of as rope_model

CAPACITY = 48
FAMILIES = ["llama", "gemma3_text", "mamba2"]


def model_of(family: str) -> Any:
    if family in ROPES:
        return rope_model(family)
    model = kind_model(family) if family == "mamba2" else tiny_model(family)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    """Return a model with full layers only, with a ring, or with states."""
    return model_of(request.param)


@pytest.fixture(scope="module")
def llama() -> Any:
    return model_of("llama")


def batch_of(model: Any, rows: int, has_prefill: bool, capacity: int = CAPACITY, **options: Any) -> ContinuousBatch:
    prefill = live_session(model, False, capacity) if has_prefill else None
    decode = live_session(model, False, capacity, rows, tokenizer=letter_tokenizer())
    return ContinuousBatch(prefill, decode, **options)


def alone(model: Any, prompt: torch.Tensor, count: int, **options: Any) -> list[int]:
    return list(live_session(model, False, CAPACITY).generate(prompt, count, **options))


@pytest.mark.parametrize("has_prefill", [True, False])
def test_requests_get_the_tokens_that_they_get_alone(model: Any, has_prefill: bool) -> None:
    """Prompts share a beginning, are longer than a chunk, and begin while other rows are decoded."""
    batch = batch_of(model, 3, has_prefill)
    shared = tokens(9, seed=50)
    prompts = [torch.cat([shared, tokens(length, seed=length)], dim=1) for length in (3, 20, 8, 1, 5, 28, 12, 20)]
    counts = [10, 3, 20, 1, 12, 11, 7, 9]
    requests = []
    for prompt, count in zip(prompts, counts, strict=True):
        requests.append(batch.submit(prompt, count, Sampling(temperature=1.0, seed=count)))
        batch.step()
        batch.step()
    list(batch.run())
    for request, prompt, count in zip(requests, prompts, counts, strict=True):
        assert request.finished and request.tokens == alone(model, prompt, count, temperature=1.0, seed=count)


def shifted_alone(model: Any, prompt: torch.Tensor, count: int, protected: int, feeds_again: bool) -> list[int]:
    """Return the tokens of a session that drops half of a full cache, or of one that is fed the other half again."""
    session = live_session(model, False, CAPACITY)
    if not feeds_again:
        return list(session.generate(prompt, count, on_full="shift", protected=protected))
    held, found = prompt[0].tolist(), list[int]()
    while len(found) < count:
        session.reset()
        new = list(session.generate(torch.tensor([held]), min(count - len(found), CAPACITY + 1 - len(held))))
        *held, newest = [*held, *new]
        found += new
        held = [*held[:protected], *held[protected + (len(held) - protected) // 2 :], newest]
    return found


# In the fast lane each family, with prompts by either method.
@pytest.mark.parametrize(
    ("family", "has_prefill"),
    [
        ("llama", True),
        ("gemma3_text", False),
        ("longrope phi3", True),
        ("dynamic llama", False),
        pytest.param("llama", False, marks=pytest.mark.full),
        pytest.param("gemma3_text", True, marks=pytest.mark.full),
        pytest.param("longrope phi3", False, marks=pytest.mark.full),
        pytest.param("dynamic llama", True, marks=pytest.mark.full),
    ],
)
def test_full_rows_drop_tokens_as_they_do_alone(family: str, has_prefill: bool) -> None:
    """Rows are full at other times, also while a neighbour's prompt is in the session that a shift needs."""
    model = model_of(family)
    batch = batch_of(model, 2, has_prefill)
    for session in (batch.prefill, batch.decode):
        if session is not None:
            session.stepper.most_a_chunk = 4
    requests = []
    for length, count in ((30, 70), (12, 60), (40, 50), (CAPACITY, 20)):
        request = batch.submit(tokens(length, seed=length), 1)
        request.max_new_tokens, request.protected, request.stop_tokens = count, 5, frozenset()
        requests.append(request)
    list(batch.run())
    for request in requests:
        count = request.max_new_tokens
        assert count is not None and len(request.tokens) == count and request.dropped_tokens > 0
        # The factors of RoPE of a copied row are not known, so its tokens are fed again.
        again = not has_prefill or batch.decode.stepper.rope is not None
        assert request.tokens == shifted_alone(model, request.input_ids, count, 5, again)


@pytest.mark.parametrize("has_prefill", [True, False])
def test_long_prompts_are_cut_to_the_same_tokens(llama: Any, has_prefill: bool) -> None:
    """Check a prompt that does not fit, and one that continues it."""
    completer = BatchCompleter(batch_of(llama, 2, has_prefill))
    completer.use("shift")
    ids = tokens(CAPACITY + 9)[0].tolist()
    options = CompletionOptions(max_new_tokens=3, protected=6)
    first = completer.complete(ids, options)
    new = [piece.token for piece in first]
    half = (CAPACITY - 6) // 2
    kept = ids[:6] + ids[6 + half :]
    assert first.dropped_tokens == half and new == alone(llama, torch.tensor([kept]), 3)
    second = completer.complete([*ids, *new, 5], options)
    assert len(list(second)) == 3 and second.reused_tokens == len(kept) + 2
    # Where the protected tokens take more than half of the cache, nothing can be dropped.
    with pytest.raises(
        CacheFullError, match=f"the prompt has {CAPACITY + 9} tokens, but the cache holds {CAPACITY}"
    ) as full:
        completer.complete(ids, CompletionOptions(protected=CAPACITY // 2 + 1))
    assert f"the system prompt of {CAPACITY // 2 + 1} to at most {CAPACITY // 2}" in str(full.value)
    completer.close()


@pytest.mark.parametrize("has_prefill", [True, False])
def test_a_continued_prompt_is_not_fed_again(model: Any, has_prefill: bool) -> None:
    batch = batch_of(model, 2, has_prefill)
    first = batch.submit(tokens(12), 6)
    list(batch.run())
    held = torch.cat([first.input_ids, torch.tensor([first.tokens[:-1]])], dim=1)
    longer = torch.cat([held, tokens(2, seed=7)], dim=1)
    second = batch.submit(longer, 3)
    list(batch.run())
    assert second.tokens == alone(model, longer, 3)
    assert second.reused_tokens == held.shape[1]
    # Another ending: only full layers can use a part of what is kept.
    other = torch.cat([first.input_ids, tokens(3, seed=8)], dim=1)
    third = batch.submit(other, 5)
    list(batch.run())
    assert third.tokens == alone(model, other, 5)
    is_full = all(layer.max_length is not None for layer in batch.decode.layers)
    assert third.reused_tokens == (12 if is_full else 0)


def test_a_free_row_keeps_only_what_the_steps_of_others_leave(model: Any) -> None:
    """Full layers keep their slots, but states, and rings that are full, have taken up tokens of no request."""
    batch = batch_of(model, 2, False)
    first = batch.submit(tokens(12), 3)
    list(batch.run())
    batch.submit(torch.flip(tokens(9, seed=5), dims=[1]), 4)
    list(batch.run())
    longer = torch.cat([first.input_ids, torch.tensor([[*first.tokens[:-1], 5]])], dim=1)
    second = batch.submit(longer, 5)
    list(batch.run())
    assert second.tokens == alone(model, longer, 5)
    is_full = all(layer.max_length is not None for layer in batch.decode.layers)
    assert second.reused_tokens == (14 if is_full else 0)


def test_a_fork_copies_the_row_that_it_continues(model: Any) -> None:
    batch = batch_of(model, 3, True)
    first = batch.submit(tokens(12), 20)
    for _ in range(5):
        batch.step()
    count = len(first.tokens)
    fork = batch.fork(first, 4, Sampling(temperature=1.0, seed=2))
    same = batch.fork(first, 6)
    list(batch.run())
    longer = torch.cat([first.input_ids, torch.tensor([first.tokens[:count]])], dim=1)
    assert first.tokens == alone(model, tokens(12), 20)
    assert fork.tokens == alone(model, longer, 4, temperature=1.0, seed=2)
    assert same.tokens == first.tokens[count : count + 6]
    assert fork.reused_tokens == longer.shape[1] - 1


@pytest.mark.parametrize("has_prefill", [True, False])
def test_a_freed_request_leaves_its_row_in_any_state(llama: Any, has_prefill: bool) -> None:
    """In the queue, after a chunk of its prompt, and between two of its tokens."""
    batch = batch_of(llama, 1, has_prefill)
    batch.decode.stepper.most_a_chunk = 4
    if batch.prefill is not None:
        batch.prefill.stepper.most_a_chunk = 4
    running, queued = batch.submit(tokens(20), 5), batch.submit(tokens(6), 3)
    batch._admit_all()
    feed = batch._feed_rows if batch.prefill is None else lambda: batch._feed_prefill(batch.prefill)
    feed()
    assert len(batch._rows[0].held) == 4
    batch.free(running)
    batch.free(queued)
    batch.free(queued)
    assert (batch.active, batch.waiting, running.tokens, queued.tokens) == (0, 0, [], [])
    again = batch.submit(tokens(20), 8)
    batch.step()
    while len(again.tokens) < 2:
        batch.step()
    batch.free(again)
    last = batch.submit(tokens(20), 8)
    list(batch.run())
    assert last.tokens == alone(llama, tokens(20), 8) and last.tokens[: len(again.tokens)] == again.tokens


def test_streams_go_on_while_a_long_prompt_is_fed(llama: Any) -> None:
    """A step feeds one chunk at most if it takes the time that prompts get."""
    for has_prefill in (True, False):
        batch = batch_of(llama, 2, has_prefill)
        batch.pacing.gap = 0
        (batch.prefill or batch.decode).stepper.most_a_chunk = 8
        first = batch.submit(tokens(4), 20)
        batch.step()
        batch.submit(tokens(40, seed=3), 3)
        before = len(first.tokens)
        for steps in range(1, 6):
            served = [request for request, _ in batch.step()]
            assert served.count(first) == 1 and len(first.tokens) == before + steps
        assert len(served) == 2  # the fifth chunk was the last one
        list(batch.run())


class Timed:
    """A clock that only the steps of a batch advance, by the tokens that they compute and the slots that they read.

    Attributes:
        now: The time in seconds.
        sizes: Number of tokens per row in each step.
    """

    def __init__(self, batch: ContinuousBatch, token: float, slot: float) -> None:
        self.now, self.sizes = 0.0, list[int]()
        for session in (batch.decode, batch.prefill):
            if session is not None:
                session.stepper.step = self._counted(session.stepper, token, slot)  # type: ignore[method-assign]
        batch.pacing = Pacing(lambda: self.now)

    def _counted(self, stepper: Any, token: float, slot: float) -> Any:
        step = stepper.step

        def counted(ids: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
            self.now += ids.numel() * (token + slot * stepper.state.longest)
            self.sizes.append(ids.shape[1])
            return step(ids, *given, **options)

        return counted


@pytest.mark.parametrize("has_prefill", [True, False])
def test_no_stream_waits_longer_than_the_gap_for_a_prompt(llama: Any, has_prefill: bool) -> None:
    """A token takes 1.9 ms, as Qwen3-0.6B's on two cores, and twice that after 64 others."""
    rows, batch = 1, ContinuousBatch.from_model(llama, 400, 4, prefill_chunk=64)
    if not has_prefill:
        rows, batch = 4, ContinuousBatch(None, batch.decode)
    timed = Timed(batch, token=1 / 527, slot=1 / 527 / 64)
    # Without a prefill session, a chunk computes all four rows.
    longest = batch.pace()
    assert longest == (32 if has_prefill else 8) and longest * rows / 527 <= 0.1
    for count in range(2):
        stream = batch.submit(tokens(5, seed=count), 380)
        batch.step()
        ends, prompt = [timed.now], batch.submit(tokens(200, seed=3 + count), 4)
        timed.sizes.clear()
        while not prompt.finished:
            assert stream in [request for request, _ in batch.step()]
            ends.append(timed.now)
        assert max(after - before for before, after in zip(ends, ends[1:])) < 0.2
        # Chunks get shorter as the cache gets longer. The next prompt begins in an empty session, or next to long rows.
        chunks = [size for size in timed.sizes if size > 1]
        assert min(chunks) < longest and (longest in chunks[:4]) == (has_prefill or count == 0)
        assert prompt.tokens == list(live_session(llama, False, 400).generate(prompt.input_ids, 4))
        batch.free(stream)


def test_prompts_are_not_cut_where_steps_alone_fill_the_gap() -> None:
    """Check a model that reads its weights for 0.8 s in each call, and one whose steps leave some time."""
    now = [0.0]
    pacing = Pacing(lambda: now[0])

    def chunk(size: int) -> None:
        now[0] += 0.8 + 0.03 * size

    assert pacing.measure(chunk, 256, 0.2) == 16
    pacing.note_step(0.9)
    pacing.note_chunk(1.28, 16)
    assert pacing.limit == 16
    # A chunk gets a quarter of the gap while that and a step fit.
    pacing.note_step(0.14)
    pacing.note_chunk(0.049, 16)
    assert pacing.limit == 16
    pacing.note_chunk(0.09, 16)
    assert pacing.limit == 8


def test_a_row_near_its_end_is_not_overwritten_by_prompts_of_others(llama: Any) -> None:
    """A chunk does not fit after its tokens, so the prompt is fed by the steps that decode it."""
    batch = batch_of(llama, 2, False)
    full = batch.submit(tokens(30), 19)
    for _ in range(10):
        batch.step()
    late = batch.submit(tokens(20, seed=4), 8)
    list(batch.run())
    assert full.tokens == alone(llama, tokens(30), 19)
    assert late.tokens == alone(llama, tokens(20, seed=4), 8)


def test_a_request_whose_logits_are_not_finite_takes_no_other_with_it(llama: Any) -> None:
    batch = batch_of(llama, 2, True)
    good, bad = batch.submit(tokens(5), 6), batch.submit(tokens(6), 6)
    batch.step()
    choose = bad.sampler.choose
    bad.sampler.choose = lambda logits: choose(logits * float("nan"))  # type: ignore[method-assign]
    with pytest.raises(NonFiniteLogitsError):
        list(batch.run())
    assert bad.finished and not good.finished and batch.active == 1
    list(batch.run())
    assert good.tokens == alone(llama, tokens(5), 6)


# -- the prefix tree -------------------------------------------------------------------------------------------------


def sequences(count: int) -> Iterator[list[int]]:
    """Yield sequences of tokens that branch, from a seed."""
    chooses = random.Random(0)
    known: list[list[int]] = [[]]
    for _ in range(count):
        base = chooses.choice(known)
        known.append(
            base[: chooses.randint(0, len(base))] + [chooses.randint(1, 3) for _ in range(chooses.randint(1, 9))]
        )
        yield known[-1][:CAPACITY]


@pytest.mark.parametrize("most_bytes", [10**9, 40_000])
def test_the_tree_gives_what_a_fresh_session_holds(llama: Any, most_bytes: int) -> None:
    """Branches share slots; with a small limit, they are evicted all the time."""
    session, other = live_session(llama, False, CAPACITY), live_session(llama, False, CAPACITY)
    tree = PrefixTree(session.layers, most_bytes)
    for ids in sequences(60):
        session.reset()
        session.prefill(torch.tensor([ids]))
        found = tree.read(ids)
        assert (found.length if found else 0) == tree.common(ids)
        if found is not None:
            put_row(other, 0, found)
            for name, tensor in row_of(other, 0).tensors.items():
                expected = row_of(session, 0, found.length).tensors[name]
                torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-6)
        tree.add(ids, row_of(session, 0))
        nodes = list(tree._nodes())
        assert tree.nbytes == sum(node.nbytes for node in nodes) <= most_bytes
        # Storage is not shared, because it would be kept by what remains of an evicted part.
        storages = [one.untyped_storage() for node in nodes for one in node.slots.values()]
        assert sum(one.nbytes() for one in storages) == tree.nbytes
        assert tree.common(ids) == len(ids) or most_bytes < 10**9
    if most_bytes == 10**9:
        seen = {tuple(ids[:end]) for ids in sequences(60) for end in range(1, len(ids) + 1)}
        a_token = sum(one.nbytes for one in row_of(session, 0).tensors.values()) // len(ids)
        assert tree.nbytes == len(seen) * a_token


def test_an_eviction_during_a_generation_changes_no_row(llama: Any) -> None:
    """The limit holds one sequence, so the prompt's own beginning is evicted while its response is generated."""
    batch = batch_of(llama, 2, True)
    first = batch.submit(tokens(8), 3)
    list(batch.run())
    batch.prefixes.most_bytes = batch.prefixes.nbytes
    longer = torch.cat([first.input_ids, tokens(10, seed=3)], dim=1)
    request = batch.submit(longer, 20)
    batch.step()
    assert request.reused_tokens == 8
    for seed in range(4, 8):
        batch.submit(tokens(9, seed=seed), 2)
    while batch.active > 1 or batch.waiting:
        batch.step()
    assert not request.finished and batch.prefixes.common(longer[0].tolist()) == 0
    list(batch.run())
    assert request.tokens == alone(llama, longer, 20)


@pytest.mark.parametrize("is_read", [True, False])
def test_the_sequence_that_was_not_used_for_longest_is_evicted(llama: Any, is_read: bool) -> None:
    """To read a sequence, or to add it again, is a use."""
    session = live_session(llama, False, CAPACITY)
    tree = PrefixTree(session.layers, 10**9)
    first, second, third = ([token] * 8 for token in (1, 2, 3))

    def add(ids: list[int]) -> None:
        session.reset()
        session.prefill(torch.tensor([ids]))
        tree.add(ids, row_of(session, 0))

    add(first)
    tree.most_bytes = 2 * tree.nbytes
    add(second)
    tree.read(first) if is_read else add(first)
    add(third)
    assert [tree.common(ids) for ids in (first, second, third)] == [8, 0, 8]


def test_a_limit_of_no_bytes_keeps_nothing(llama: Any) -> None:
    batch = batch_of(llama, 1, True, prefix_bytes=0)
    for _ in range(2):
        request = batch.submit(tokens(8), 3)
        list(batch.run())
        assert request.reused_tokens == 0
    with pytest.raises(InputError, match="most_bytes must be at least 0, got -1"):
        batch_of(llama, 1, True, prefix_bytes=-1)


@pytest.mark.parametrize(
    ("first", "second", "common"), [([], [1], 0), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 2, 4, 5], 2), ([2], [1], 0)]
)
def test_the_common_length_of_two_lists(first: list[int], second: list[int], common: int) -> None:
    assert common_length(first, second) == common_length(second, first) == common


# -- completions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_prefill", [True, False])
def test_completions_run_side_by_side(llama: Any, has_prefill: bool) -> None:
    completer = BatchCompleter(batch_of(llama, 2, has_prefill))
    prompts = [tokens(length, seed=length)[0].tolist() for length in (6, 9, 4)]
    options = CompletionOptions(SamplingOptions(temperature=1.0, seed=5), max_new_tokens=7, alternatives=1)
    completions = [completer.complete(ids, options) for ids in prompts]
    pieces: list[list[Any]] = [[], [], []]
    assert [one.reused_tokens for one in completions] == [0, 0, 0]
    open_ones = dict(enumerate(completions))
    while open_ones:
        for index, completion in list(open_ones.items()):
            piece = next(completion, None)
            if piece is None:
                del open_ones[index]
            else:
                pieces[index].append(piece)
    for ids, found in zip(prompts, pieces, strict=True):
        assert [piece.token for piece in found] == alone(llama, torch.tensor([ids]), 7, temperature=1.0, seed=5)
        assert all(piece.logprob is not None and len(piece.alternatives) == 1 for piece in found)
    assert [one.finish_reason for one in completions] == ["length"] * 3 and completer.batch.active == 0


@pytest.mark.parametrize("has_prefill", [True, False])
def test_a_step_that_fails_ends_the_requests_in_it_and_no_later_one(llama: Any, has_prefill: bool) -> None:
    """An error of a prompt is that of its own request; an error of the rows is that of all in them."""
    completer = BatchCompleter(batch_of(llama, 2, has_prefill))
    batch, options = completer.batch, CompletionOptions(max_new_tokens=5)
    first, second = (completer.complete(tokens(length)[0].tolist(), options) for length in (4, 20))
    next(first)
    stepper = (batch.prefill or batch.decode).stepper
    step, failing = stepper.step, True

    def failing_once(*given: Any, **others: Any) -> torch.Tensor:
        nonlocal failing
        if failing and given[0].shape[1] > 1:
            failing = False
            raise RuntimeError("no memory")
        return step(*given, **others)

    stepper.step = failing_once  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no memory"):
        next(second)
    if has_prefill:
        assert len(list(first)) == 4
    else:
        with pytest.raises(RuntimeError, match="no memory"):
            list(first)
    third = completer.complete(tokens(20)[0].tolist(), options)
    assert [piece.token for piece in third] == alone(llama, tokens(20), 5)
    assert batch.active == batch.waiting == 0


def test_tokens_that_were_reused_are_counted_whoever_runs_the_steps(llama: Any) -> None:
    completer = BatchCompleter(batch_of(llama, 2, True))
    ids, options = tokens(8)[0].tolist(), CompletionOptions(max_new_tokens=3)
    list(completer.complete(ids, options))
    first, second = completer.complete([*ids, 5], options), completer.complete([*ids, 6], options)
    next(first)
    list(second)
    next(first)
    assert (first.reused_tokens, second.reused_tokens) == (8, 8)


def test_a_completion_that_is_given_up_frees_its_row(llama: Any) -> None:
    completer = BatchCompleter(batch_of(llama, 1, True))
    first = completer.complete(tokens(6)[0].tolist(), CompletionOptions(max_new_tokens=9))
    next(first)
    first.give_up()
    first.close()
    assert completer.batch.active == 0
    second = completer.complete(tokens(5)[0].tolist(), CompletionOptions(max_new_tokens=3))
    assert [piece.token for piece in second] == alone(llama, tokens(5), 3)


def while_a_prompt_is_fed(model: Any) -> tuple[BatchCompleter, Any, Any]:
    """Return a completer, a completion that has begun, and one whose prompt of 24 tokens takes six chunks."""
    completer = BatchCompleter(batch_of(model, 2, False))
    completer.batch.pacing.gap, completer.batch.pacing.limit = 0, 4
    begun = completer.complete(tokens(3)[0].tolist(), CompletionOptions(max_new_tokens=20))
    next(begun)
    return completer, begun, completer.complete(tokens(24)[0].tolist(), CompletionOptions(max_new_tokens=2))


def test_a_poll_returns_after_a_step(llama: Any) -> None:
    """A caller gets the pieces of one completion while the prompt of another is fed."""
    _, begun, fed = while_a_prompt_is_fed(llama)
    between = 0
    while fed.poll() is None:
        assert begun.poll() is not None
        between += 1
    assert between == 5 and not fed.is_finished
    assert len(list(fed)) == 1 and fed.is_finished and fed.poll() is None


def test_a_server_sends_tokens_while_a_prompt_is_fed(llama: Any) -> None:
    """Tokens of a stream are given out after the step that chose them, not after the prompt of a neighbour."""
    completer, begun, fed = while_a_prompt_is_fed(llama)
    engine, events = Engine(completer, 4), list[str]()

    async def run(name: str, completion: Any) -> None:
        async for _ in engine.run(lambda _: completion):
            events.append(name)

    async def both() -> None:
        await asyncio.gather(run("begun", begun), run("fed", fed))

    asyncio.run(both())
    engine.close()
    assert events.count("begun") == 19 and events.count("fed") == 2 and events.index("fed") >= 4
