"""Which method serves a step, and that its cost follows the filled part of the cache."""

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from exportable_cache import ExportableCache
from exportable_cache.backends import backend_for
from exportable_cache.errors import InputError
from exportable_cache.program.decoders import length_buckets, methods_for
from exportable_cache.program.methods import ProgramMethod, chunk_sizes, method_for
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec

from .support.models import hybrid_model, tiny_model, tokens
from .support.oracle import difference, reference_logits
from .support.sessions import live_session, lowered_session

TOLERANCE = 1e-4
BUCKETS = (8, 16, 32)


@pytest.fixture(scope="module")
def model() -> Any:
    return hybrid_model(sliding_window=16)


def test_buckets_get_methods_of_their_own(model: Any) -> None:
    methods = methods_for(ExportableCache.from_model(model, 64), ProgramSpec(24, buckets=(8, 32)))
    assert methods == {
        "decode": ProgramMethod("decode", 1, 1),
        "prefill": ProgramMethod("prefill", 2, 24),
        "decode_8": ProgramMethod("decode_8", 1, 1, 8),
        "prefill_8": ProgramMethod("prefill_8", 2, 8, 8),
        "decode_32": ProgramMethod("decode_32", 1, 1, 32),
        "prefill_32": ProgramMethod("prefill_32", 2, 24, 32),
    }


@pytest.mark.parametrize("bucket", [0, -8, True, "8", 8.0])
def test_a_bucket_is_a_positive_int(model: Any, bucket: Any) -> None:
    with pytest.raises(InputError, match="a length bucket must be"):
        methods_for(ExportableCache.from_model(model, 64), ProgramSpec(buckets=(bucket,)))


def test_what_the_cache_has_no_room_for_is_refused(model: Any) -> None:
    cache = ExportableCache.from_model(model, 64)
    assert (
        "decode_64" in methods_for(cache, ProgramSpec(buckets=(64,)))
        and methods_for(cache, ProgramSpec(score_length=64))["score"].max_length == 64
    )
    with pytest.raises(InputError, match="buckets must be at most 64, .*got 65"):
        methods_for(cache, ProgramSpec(buckets=(8, 65)))
    with pytest.raises(InputError, match="score_length must be at most 64, the tokens a row holds, got 65"):
        methods_for(cache, ProgramSpec(score_length=65))


@pytest.mark.parametrize("buckets", [128, True, "auto", {"128": 1}, None])
def test_buckets_are_a_list(model: Any, buckets: Any) -> None:
    with pytest.raises(InputError, match="buckets must be a list of ints.*got"):
        methods_for(ExportableCache.from_model(model, 64), ProgramSpec(buckets=buckets))


@pytest.mark.parametrize("delegate", [[], {}, 3, "other"])
def test_a_delegate_is_one_of_those_there_are(delegate: Any) -> None:
    with pytest.raises(InputError, match="delegate must be one of xnnpack.*, got "):
        backend_for("executorch").options.parse({"delegate": delegate})


@pytest.mark.parametrize(("target", "option"), [("pt2", "strict"), ("executorch", "llm_runner")])
def test_a_word_is_no_flag(target: str, option: str) -> None:
    with pytest.raises(InputError, match=f"{option} must be True or False, got 'False'"):
        backend_for(target).options.parse({option: "False"})


@pytest.mark.parametrize(
    ("max_cache_len", "expected"),
    [(64, []), (128, []), (129, [128]), (1024, [128, 256, 512]), (4096, [128, 256, 512, 1024, 2048])],
)
def test_default_buckets_are_the_powers_of_two_below_the_capacity(
    model: Any, max_cache_len: int, expected: list[int]
) -> None:
    assert length_buckets(ExportableCache.from_model(model, max_cache_len)) == expected


def test_rings_alone_have_buckets_below_their_capacity() -> None:
    cache = ExportableCache.from_model(tiny_model("mistral", sliding_window=300), 4096)
    assert length_buckets(cache) == [128, 256]


@pytest.mark.parametrize(
    ("size", "end", "expected"),
    [
        (1, 1, "decode_8"),
        (1, 8, "decode_8"),
        (1, 9, "decode_32"),
        (1, 32, "decode_32"),
        (1, 33, "decode"),
        (8, 8, "prefill_8"),
        (8, 9, "prefill_32"),
        (24, 64, "prefill"),
    ],
)
def test_a_step_goes_to_the_method_that_reads_least(model: Any, size: int, end: int, expected: str) -> None:
    methods = methods_for(ExportableCache.from_model(model, 64), ProgramSpec(24, buckets=(8, 32)))
    assert method_for(methods, size, end) == expected


def test_one_token_goes_to_decode_where_forward_would_take_it(model: Any) -> None:
    methods = methods_for(ExportableCache.from_model(model, 64), ProgramSpec(24, forward=True))
    assert method_for(methods, 1, 5) == "decode"
    assert method_for({"forward": methods["forward"]}, 1, 5) == "forward"
    assert chunk_sizes({"forward": methods["forward"]}, 49) == [24, 24, 1]


def test_chunks_are_shorter_where_a_caller_asks_and_a_method_can(model: Any) -> None:
    methods = methods_for(ExportableCache.from_model(model, 64), ProgramSpec(24))
    assert chunk_sizes(methods, 49, most=20) == [20, 20, 9]
    assert chunk_sizes(methods, 49, most=256) == chunk_sizes(methods, 49) == [24, 24, 1]
    assert chunk_sizes(methods, 41, keeps_prompt=True, most=20) == [20, 19, 2]
    only = {"decode": methods["decode"], "prefill": ProgramMethod("prefill", 24, 24)}
    assert chunk_sizes(only, 48, most=20) == [24, 24]


def worst(session: Any, model: Any, prompts: tuple[int, ...] = (3, 8, 15, 16, 17, 40)) -> float:
    found = []
    for prompt in prompts:
        ids = tokens(prompt + 20, seed=prompt)
        reference = reference_logits(model, ids, prompt)
        session.reset()
        found.append(
            difference(
                lambda p: session.decode(p[:, 0]) if p.shape[1] == 1 else session.prefill(p), reference, ids, prompt
            )
        )
    return max(found)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "mistral"])
def test_eager_is_the_same_across_buckets(family: str) -> None:
    options = {} if family == "llama" else {"sliding_window": 16}
    model = tiny_model(family, **options)
    session = live_session(model, False, 64, buckets=BUCKETS)
    calls = []
    run = session.runner.run
    session.runner.run = lambda method, *inputs: (calls.append(method), run(method, *inputs))[1]
    assert worst(session, model) <= TOLERANCE
    assert set(calls) == {"decode", "prefill"} | {
        f"{name}_{bucket}" for name in ("decode", "prefill") for bucket in BUCKETS
    }


def test_rows_of_a_batch_share_the_bucket_of_the_longest() -> None:
    model = hybrid_model(sliding_window=16)
    session = live_session(model, False, 64, batch_size=2, buckets=BUCKETS)
    ids = tokens(30, batch_size=2)
    reference = reference_logits(model, ids, 5)
    assert (
        difference(lambda p: session.decode(p[:, 0]) if p.shape[1] == 1 else session.prefill(p), reference, ids, 5)
        <= TOLERANCE
    )


def test_a_rewind_goes_back_to_the_smaller_bucket(model: Any) -> None:
    session = live_session(model, False, 64, buckets=BUCKETS)
    ids = tokens(12)
    session.prefill(ids[:, :7])
    expected = session.decode(ids[0, 7:8])
    session.prefill(ids[:, 8:])
    session.rewind(5)
    assert session.length.tolist() == [7]
    torch.testing.assert_close(session.decode(ids[0, 7:8]), expected)


def test_compiled_crosses_buckets_without_recompiling(model: Any) -> None:
    """Prompts and steps on both sides of every bucket: two graphs for one token and two for several, compiled once,
    before the first turn of the ring and after it.
    """
    torch._dynamo.reset()
    counters.clear()
    session = live_session(model, True, 64, buckets=BUCKETS)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert worst(session, model, (3, 16, 40)) <= TOLERANCE
        for prompt in (9, 21):
            session.reset()
            session.prefill(tokens(prompt))
            for token in tokens(20)[0]:
                session.decode(token[None])
    assert counters["stats"]["unique_graphs"] == 4 and len(session.runner.methods) == 8


def test_a_bucket_reads_its_part_of_the_cache_and_no_more(model: Any) -> None:
    cache = ExportableCache.from_model(model, 64)
    program = Program(model, cache, ProgramSpec(16, buckets=BUCKETS))
    for name, expected in (
        ("decode_8", [8, 8]),
        ("decode_32", [16, 32]),
        ("decode", [16, 64]),
        ("prefill_16", [16, 16]),
    ):
        keys = [
            node.args[1].meta["val"].shape[2]
            for node in program.export(name).graph.nodes
            if node.target is torch.ops.aten.scaled_dot_product_attention.default
        ]
        assert keys == expected, name


@pytest.mark.full
def test_pt2_with_buckets(model: Any) -> None:
    session = lowered_session(model, "pt2", 64, buckets=BUCKETS[1:2])
    assert worst(session, model) <= TOLERANCE
