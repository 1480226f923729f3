"""Attention of few query tokens by a kernel that is compiled for the processor: its numbers, and who calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from exportable_cache import ExportableCache, Session
from exportable_cache.backends.live import background
from exportable_cache.backends.live.ops import attention as few_queries
from exportable_cache.common.process.tuning import torch_threads

from ..support.models import tiny_model, tokens
from ..support.oracle import difference, reference_logits

pytestmark = pytest.mark.skipif(not few_queries.OPERATORS.is_wanted(), reason="there is no C++ compiler")

#: [batch, heads, kv_heads, q_length, kv_length, head_dim, value_head_dim].
SHAPES = [
    (1, 1, 1, 1, 1, 16, 16),
    (2, 6, 2, 1, 37, 48, 80),
    (3, 4, 4, 1, 64, 64, 64),
    (1, 12, 4, 1, 700, 64, 64),
    (2, 5, 1, 1, 130, 128, 128),
    (1, 8, 2, 3, 193, 32, 96),
    (1, 2, 2, 7, 65, 64, 16),
]
LAYERS = 2
OF_TORCH = {"aten::scaled_dot_product_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"}


def oracle(query, key, value, mask=None, scale=None, softcap=None, sinks=None) -> torch.Tensor:
    """In float64, of any mask; what is shown nothing by minus infinity is 0."""
    groups = query.shape[1] // key.shape[1]
    key, value = (one.double().repeat_interleave(groups, dim=1) for one in (key, value))
    scores = query.double() @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    if sinks is not None:
        return torch.softmax(torch.cat([scores, sinks.double().expand(*scores.shape[:3], 1)], -1), -1)[..., :-1] @ value
    weights = torch.softmax(scores, dim=-1)
    return torch.where((scores == -torch.inf).all(-1, keepdim=True), 0.0, weights) @ value


def compare(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype and got.shape == expected.shape and got.is_contiguous()
    assert (got.double() - expected).abs().max() <= (2e-6 if dtype == torch.float32 else 4e-3) * expected.abs().max()


def seen_in(shape: tuple[int, ...], kind: str) -> torch.Tensor | None:
    """Which keys each query sees, bool."""
    batch, heads, _, q_length, kv_length, _, _ = shape
    slot = torch.arange(kv_length)
    if kind == "none":
        return None
    if kind == "lengths":  # of each row, and causal
        filled = torch.tensor([max(q_length, kv_length * (row + 1) // batch - 3) for row in range(batch)])
        last = (filled[:, None] - q_length + torch.arange(q_length)).clamp(min=0)[:, None, :, None]
        return slot <= last
    if kind == "ring":  # of one row for all, with a hole
        return ((slot % 90 < 20) | (slot == kv_length - 1)).expand(1, 1, 1, kv_length)
    return torch.rand(batch, heads, q_length, kv_length) < 0.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["none", "lengths", "ring", "any"])
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers(loaded, shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    batch, heads, kv_heads, q_length, kv_length, dim, value_dim = shape
    query = torch.randn(batch, q_length, heads, dim).to(dtype).transpose(1, 2)
    # A slice of what is allocated.
    key, value = (torch.randn(batch, kv_heads, kv_length + 9, size).to(dtype)[:, :, :-9] for size in (dim, value_dim))
    seen = seen_in(shape, kind)
    masks = [seen]
    if seen is not None:
        masks += [
            torch.where(seen, bias, low).to(dtype) for bias, low in ((0.0, torch.finfo(dtype).min), (1.5, -torch.inf))
        ]
    scale = 0.3 if kind == "any" else None
    for mask in masks:
        expected = oracle(query, key, value, mask, scale)
        for threads in (1, 2, 3):
            with torch_threads(threads):
                compare(few_queries.attention(query, key, value, mask, scale), expected, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 2.0, 50.0])
@pytest.mark.parametrize("sizes", [None, (4, 1), (1, 3), (4, 3)])
def test_soft_caps_and_sinks(loaded, sizes: tuple[int, int] | None, softcap: float | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 3, 32), torch.randn(2, 2, 333, 32), torch.randn(2, 2, 333, 48)
    query, key, value = (3 * query).to(dtype), key.to(dtype), value.to(dtype)
    sinks = None if sizes is None else (4 * torch.randn(2, *sizes, 1)).to(dtype)
    seen = torch.arange(333) < torch.tensor([300, 50])[:, None, None, None]
    seen[0, ..., 64:200] = False
    mask = torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)
    expected = oracle(query, key, value, mask, None, softcap, sinks)
    for threads in (1, 2, 5):
        with torch_threads(threads):
            got = few_queries.attention(query, key, value, mask, None, softcap, sinks)
        assert (got.double() - expected).abs().max() <= (
            1e-5 if dtype == torch.float32 else 4e-3
        ) * expected.abs().max()
    if sinks is not None:
        nothing = torch.full_like(mask, torch.finfo(dtype).min)
        assert not few_queries.attention(query, key, value, nothing, None, softcap, sinks).any()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_slots_that_nobody_sees_are_not_read(loaded, threads: int) -> None:
    torch.manual_seed(0)
    query, mask = torch.randn(2, 4, 1, 32), torch.full((2, 1, 1, 512), torch.finfo(torch.float32).min)
    mask[0, ..., 200:263], mask[1, ..., :5], mask[1, ..., 500:] = 0.0, 0.0, 0.0
    key, value = torch.randn(2, 2, 512, 32), torch.randn(2, 2, 512, 32)
    expected = oracle(query, key, value, mask)
    hidden = (mask < 0.0)[:, 0, 0, :, None].unsqueeze(1)
    with torch_threads(threads):
        got = few_queries.attention(query, *(one.masked_fill(hidden, torch.nan) for one in (key, value)), mask)
    compare(got, expected, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("low", ["lowest", "infinity", "false"])
def test_rows_that_see_nothing_are_as_torchs(loaded, low: str, dtype: torch.dtype) -> None:
    """One of two query tokens that share a key head, and one row of two."""
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 2, 2, 16), torch.randn(2, 1, 150, 16), torch.randn(2, 1, 150, 16)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    seen = torch.zeros(2, 1, 2, 150, dtype=torch.bool)
    seen[0, :, 1, 70:80] = True
    number = torch.finfo(dtype).min if low == "lowest" else -torch.inf
    mask = seen if low == "false" else torch.where(seen, 0.0, number).to(dtype)
    expected = functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    compare(few_queries.attention(query, key, value, mask), expected.double(), dtype)


def test_what_is_no_number_stays_so(loaded) -> None:
    query, key, value = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 200, 16), torch.randn(1, 2, 200, 16)
    for place in (3, 130, 199):
        # One key is seen, so that others are not read unless the mask tells of them.
        mask = torch.full((1, 1, 1, 200), torch.finfo(torch.float32).min)
        mask[..., 70] = 0
        mask[..., place] = torch.nan
        assert few_queries.attention(query, key, value, mask).isnan().all(), place
    key[0, 1, 40, 3] = torch.nan
    got = few_queries.attention(query, key, value)
    assert got[0, 0].isfinite().all() and got[0, 1].isnan().all()


def test_scores_of_any_size(loaded) -> None:
    torch.manual_seed(0)
    query, key, value = 40 * torch.randn(1, 3, 1, 64), torch.randn(1, 1, 300, 64), torch.randn(1, 1, 300, 64)
    compare(few_queries.attention(query, key, value, scale=1.0), oracle(query, key, value, scale=1.0), torch.float32)


def test_any_form_of_tensor(loaded) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 2, 1, 32), torch.randn(2, 2, 64, 30), torch.randn(2, 2, 96, 30)
    query, key, value = query[..., ::2], key[:, :, ::4].transpose(2, 3), value[:, :, ::6].transpose(2, 3)
    mask = torch.zeros(2, 1, 1, 60)[..., ::2]
    compare(few_queries.attention(query, key, value, mask), oracle(query, key, value), torch.float32)
    assert few_queries.attention(query[:0], key[:0], value[:0]).shape == (0, 2, 1, 16)


@pytest.mark.parametrize(
    ("query", "key", "mask", "message"),
    [
        ((2, 1, 16), (1, 2, 9, 16), None, "are \\[batch"),
        ((1, 3, 1, 16), (1, 2, 9, 16), None, "of each query's"),
        ((1, 2, 1, 24), (1, 2, 9, 24), None, "multiples of 16"),
        ((1, 2, 1, 16), (1, 2, 0, 16), None, "at least one key"),
        ((1, 2, 1, 16), (1, 2, 9, 16), (1, 1, 1, 8), "a mask is"),
    ],
)
def test_what_the_kernel_refuses(loaded, query, key, mask, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        few_queries.attention(
            torch.ones(query), torch.ones(key), torch.ones(key), None if mask is None else torch.ones(mask)
        )
    with pytest.raises(RuntimeError, match="in bfloat16"):
        few_queries.attention(*(torch.ones(1, 1, 1, 16, dtype=torch.float64) for _ in range(3)))


#: [1, 2, 1, 16] queries over keys of [1, 2, 9, 16].
KEYS = torch.ones(1, 2, 9, 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"key": KEYS.bfloat16()}, "all in bfloat16"),
        ({"value": KEYS.bfloat16()}, "all in bfloat16"),
        ({"value": torch.ones(1, 2, 8, 16)}, "of each query's"),
        ({"value": torch.ones(1, 1, 9, 16)}, "of each query's"),
        ({"value": torch.ones(2, 2, 9, 16)}, "of each query's"),
        ({"key": torch.ones(2, 2, 9, 16)}, "of each query's"),
        ({"key": torch.ones(1, 2, 9, 32)}, "of each query's"),
        ({"value": torch.ones(1, 2, 9, 24)}, "multiples of 16"),
        ({"mask": torch.zeros(3, 1, 1, 9)}, "a mask is"),
        ({"mask": torch.zeros(1, 3, 1, 9)}, "a mask is"),
        ({"mask": torch.zeros(1, 1, 2, 9)}, "a mask is"),
        ({"mask": torch.zeros(1, 1, 1, 9).double()}, "a mask of bool, float32 or bfloat16"),
        ({"sinks": torch.zeros(1, 2, 1, 1).bfloat16()}, "sinks are"),
        ({"sinks": torch.zeros(1, 3, 1, 1)}, "sinks are"),
        ({"sinks": torch.zeros(1, 2, 1, 2)}, "sinks are"),
        ({"sinks": torch.zeros(2)}, "sinks are"),
    ],
)
def test_arguments_that_the_kernel_would_read_as_something_else(loaded, arguments, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        few_queries.attention(**{"query": torch.ones(1, 2, 1, 16), "key": KEYS, "value": KEYS, **arguments})


class Attentions(torch.nn.Module):
    """Two that the kernel computes, and others: causal, of many rows, of heads of another size, of another dtype."""

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> list[torch.Tensor]:
        attention = functional.scaled_dot_product_attention
        assert query.shape[2] == 2
        mask = torch.ones(2, key.shape[2], dtype=torch.bool)[None, None]
        return [
            attention(query, key, key, mask, scale=0.5, enable_gqa=True),
            attention(query=query[:, :2], key=key, value=key[..., :16]),
            attention(query, key, key, is_causal=True, enable_gqa=True),
            attention(query.repeat(1, 1, 9, 1), key, key, enable_gqa=True),
            attention(query[..., :24], key[..., :24], key, enable_gqa=True),
            attention(query.double(), key.double(), key.double(), enable_gqa=True),
            attention(query, key, key, mask[..., :1], enable_gqa=True),
            attention(query[0], key[0].repeat(2, 1, 1), key[0].repeat(2, 1, 1)),
        ]


def test_attention_that_is_replaced(loaded) -> None:
    """Sizes of a graph that are traced as symbols and turn out to be one number count as that; lengths stay symbols."""
    module, found = Attentions(), []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        found.append(few_queries.attention_of_few_queries(graph))
        return graph

    torch.manual_seed(0)
    query, key = torch.randn(1, 4, 2, 32), torch.randn(1, 2, 40, 32)
    expected = module(query, key)
    with torch.no_grad():
        for sizes in ((), (2,)):
            torch._dynamo.reset()
            for size in sizes:
                torch._dynamo.mark_dynamic(key, size)
            got = torch.compile(module, backend=backend, fullgraph=True, dynamic=None if sizes else False)(query, key)
            torch.testing.assert_close(got, expected)
    assert found == [2, 2]


def calls_of(session: Session, rows: int) -> dict[str, int]:
    """Operators of a decode step."""
    with torch.profiler.profile() as profile:
        session.decode(tokens(1, rows)[:, 0])
    return {event.key: event.count for event in profile.key_averages()}


@pytest.mark.full
def test_rows_of_different_length(loaded, inductor) -> None:
    """Rows of different length, in a ring past its window and in a full layer."""
    model = tiny_model("gemma3_text", head_dim=16)
    ids, lengths, steps = [tokens(40, seed=row) for row in range(2)], (3, 13), 6
    session = Session.from_model(model, ExportableCache.from_model(model, 64, 2), compile="wait", prefill_chunk=16)
    prompts = torch.full((2, max(lengths)), 7)
    mask = torch.zeros_like(prompts)
    for row, length in enumerate(lengths):
        prompts[row, :length], mask[row, :length] = ids[row][0, :length], 1
    got = [session.prefill(prompts, attention_mask=mask)]
    for step in range(steps):
        got.append(session.decode(torch.stack([ids[row][0, length + step] for row, length in enumerate(lengths)])))
    for row, length in enumerate(lengths):
        expected = reference_logits(model, ids[row][:, : length + steps], length)[0]
        assert (torch.stack([logits[row] for logits in got]) - expected).abs().max() <= 1e-4
    calls = calls_of(session, 2)
    assert calls["exportable_cache::few_queries_attention"] == LAYERS and not calls.keys() & OF_TORCH


@pytest.mark.full
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_soft_caps_and_sinks_of_models(loaded, inductor, family: str) -> None:
    model, ids = tiny_model(family, head_dim=16), tokens(20)
    session = Session.from_model(model, ExportableCache.from_model(model, 64), compile="wait", prefill_chunk=16)

    def step(piece: torch.Tensor) -> torch.Tensor:
        return session.decode(piece[:, 0]) if piece.shape[1] == 1 else session.prefill(piece)

    assert difference(step, reference_logits(model, ids, 12), ids, 12) <= 1e-4
    calls = calls_of(session, 1)
    assert calls["exportable_cache::few_queries_attention"] == LAYERS


@pytest.mark.full
def test_a_second_process_loads_graphs_that_call_our_kernels(loaded, inductor, tmp_path: Path) -> None:
    """Two processes: the first compiles and keeps, the second has nothing but what is kept."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    found = []
    for code in ("first", "second"):
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / code),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        command = [sys.executable, str(script), str(tmp_path / "graphs")]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2])
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    first, second = found
    assert (first["compiled"], first["loaded"]) == (2, 0) and (second["compiled"], second["loaded"]) == (0, 2)
    assert first["calls"] == second["calls"] == [LAYERS, 2 * LAYERS + 1, 2 * LAYERS]
    assert first["tokens"] == second["tokens"]


_SCRIPT = """
import json, sys
import torch
from exportable_cache import ExportableCache, Session
from tests.support.models import tiny_model, tokens

model = tiny_model("llama", head_dim=16)
session = Session.from_model(
    model, ExportableCache.from_model(model, 64), compile="wait", prefill_chunk=16, graph_cache=sys.argv[1]
)
session.prefill(tokens(9))
logits = [session.decode(torch.tensor([token])) for token in (5, 7, 9)]
with torch.profiler.profile() as profile:
    logits.append(session.decode(torch.tensor([11])))
calls = {event.key: event.count for event in profile.key_averages()}
names = ("few_queries_attention", "few_rows_linear", "few_rows_linears")
cache = session.runner.graph_cache
print(json.dumps({
    "compiled": cache.compiled,
    "loaded": cache.loaded,
    "calls": [calls.get(f"exportable_cache::{name}", 0) for name in names],
    "tokens": [int(one.argmax()) for one in logits],
}))
"""


def test_steps_that_wait_for_their_graph_call_it(loaded, inductor, monkeypatch) -> None:
    monkeypatch.setattr(background, "_CHILD", "import time; time.sleep(600)")
    model = tiny_model("llama", head_dim=16)
    with Session.from_model(model, ExportableCache.from_model(model, 64), compile="background") as session:
        session.prefill(tokens(3))
        assert calls_of(session, 1)["exportable_cache::few_queries_attention"] == LAYERS
