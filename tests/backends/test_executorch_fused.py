"""Which layers go through ExecuTorch's fused operators, and what their programs consist of."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

from exportable_cache import ExportableCache, load
from exportable_cache.backends import backend_for
from exportable_cache.cache.policies import FullPolicy, RingPolicy
from exportable_cache.errors import InputError
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec

from ..support.kinds import KINDS, kind_model
from ..support.models import WINDOW, tiny_model, tokens
from ..support.oracle import difference, reference_logits
from ..support.sessions import exported_bundle, folded_bundle

pytest.importorskip("executorch", reason="the executorch extra is not installed")

from executorch.exir._serialize._program import deserialize_pte_binary

from exportable_cache.backends.executorch.attention.fused import fusable_layers, native_layouts
from exportable_cache.backends.executorch.attention.layouts import (
    FusedFullLayout,
    FusedRingLayout,
    NativeLayout,
    fold_of,
)
from exportable_cache.backends.executorch.delegates.xnnpack import LINEAR_ONLY
from exportable_cache.cache.layers import layer_from

from .test_executorch import instructions

CAPACITY = 96


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", [True, True]),
        ("mistral", [True, True]),  # rings
        ("gemma3_text", [True, True]),
        ("gemma2", [False, False]),  # soft-capping
        ("gpt_oss", [False, False]),  # sinks
        ("bloom", [False, False]),  # attention and position bias of its own
        ("llama4_text", [False, True]),  # attention chunks
    ],
)
def test_only_layers_the_operators_compute_exactly_are_fused(family: str, expected: list[bool]) -> None:
    model = (
        tiny_model(family, n_layer=2, n_head=4)
        if family == "bloom"
        else kind_model(family)
        if family in KINDS
        else tiny_model(family)
    )
    cache = ExportableCache.from_model(model, CAPACITY, attn_implementation=None)
    own = model.config._attn_implementation
    assert fusable_layers(model, cache) == expected
    assert model.config._attn_implementation == own


@pytest.mark.parametrize("change", ["dtype", "batch"])
def test_other_dtypes_and_batches_are_not_fused(change: str) -> None:
    model = tiny_model("llama", dtype=torch.bfloat16 if change == "dtype" else torch.float32)
    cache = ExportableCache.from_model(model, CAPACITY, batch_size=2 if change == "batch" else 1)
    assert fusable_layers(model, cache) == [False, False]


def test_a_mask_that_is_not_causal_is_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators have causality of their own, and no mask."""
    model = tiny_model("llama")
    cache = ExportableCache.from_model(model, CAPACITY)
    make = modeling_llama.create_causal_mask
    assert fusable_layers(model, cache) == [True, True] and native_layouts(model, cache) == [NativeLayout()] * 2

    def seen_by_all(*arguments: Any, **options: Any) -> torch.Tensor:
        mask = make(*arguments, **options)
        # The last token is seen by the first as well.
        return torch.cat([mask[..., :-1], torch.zeros_like(mask[..., -1:])], dim=-1)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", seen_by_all)
    assert fusable_layers(model, cache) == [False, False]
    assert native_layouts(model, cache) == [NativeLayout(masked=True)] * 2


def test_a_window_that_is_never_reached_is_fused() -> None:
    model = tiny_model("mistral", sliding_window=CAPACITY + 1)
    cache = ExportableCache.from_model(model, CAPACITY)
    assert [layer.label for layer in cache.layers] == ["full", "full"]
    assert fusable_layers(model, cache) == [True, True]


def test_a_ring_that_keeps_more_than_its_window_is_not_fused() -> None:
    model = tiny_model("gemma3_text")
    assert fusable_layers(model, ExportableCache.from_model(model, CAPACITY, rollback_slots=2)) == [False, True]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "fold"),
    [(12, 4, 3), (32, 8, 4), (24, 2, 6), (8, 2, 2), (16, 2, 4), (8, 8, 1), (4, 1, 1), (2, 1, 1), (20, 4, 5), (6, 2, 1)],
)
def test_folding_leaves_heads_to_run_in_parallel(heads: int, kv_heads: int, fold: int) -> None:
    assert fold_of(heads, kv_heads, CAPACITY) == fold
    assert heads // kv_heads % fold == 0 and heads // fold >= min(4, heads)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "capacity", "fold"), [(64, 2, 8, 4), (48, 2, 12, 8), (16, 1, 3, 2), (16, 1, 1, 1)]
)
def test_a_short_ring_folds_fewer_heads_than_it_has_slots(heads: int, kv_heads: int, capacity: int, fold: int) -> None:
    assert fold_of(heads, kv_heads, capacity) == fold


# In the fast lane: the number of heads that are folded, above, and the lowered forms of `hybrid`, below.
@pytest.mark.full
def test_a_ring_with_fewer_slots_than_heads_that_share_a_key_is_lowered() -> None:
    """A fold of 8 needs 8 slots, and no form of attention can be traced that reads more slots than there are."""
    model = tiny_model("mistral", num_attention_heads=32, num_hidden_layers=1, sliding_window=7)
    session = load(exported_bundle(model, "executorch", prefill_chunk=5, verify=False))
    ids = tokens(16)
    reference = reference_logits(model, ids, 7)
    assert difference(lambda piece: session.prefill(piece), reference, ids, 7) <= 1e-4


def program_of(family: str, num_attention_heads: int = 4, **options) -> Program:
    model = tiny_model(family, num_attention_heads=num_attention_heads)
    backend = backend_for("executorch")
    spec = backend.program_spec(ProgramSpec(), backend.options.parse(options))
    return Program(model, ExportableCache.from_model(model, CAPACITY), spec)


def test_the_fused_layout_is_part_of_the_program() -> None:
    program = program_of("gemma3_text")
    ring, full = program.cache.layers
    assert (ring.layout, full.layout) == (FusedRingLayout(), FusedFullLayout())
    assert full.keys.shape == (2, CAPACITY, 1, 8) and ring.keys.shape == (2, WINDOW + 1, 1, 8)
    assert full.max_length == CAPACITY and full.policy == FullPolicy(CAPACITY)
    assert ring.max_length is None and ring.policy == RingPolicy(WINDOW)
    assert layer_from(full.config(), {}).max_rollback(9, 20) == 9
    rebuilt = layer_from(ring.config(), {})
    assert rebuilt.max_rollback(20, 20) == 1 and rebuilt.max_rollback(5, 8) == 5


def test_the_choice_of_a_form_is_one_operator_while_a_program_is_lowered() -> None:
    """Branches would be traced again by every decomposition and pass."""
    graph = program_of("gemma3_text", num_attention_heads=16).export("forward").graph
    targets = Counter(node.target for node in graph.nodes)
    assert targets[torch.ops.exportable_cache.fused_attention.default] == 2
    assert torch.ops.higher_order.cond not in targets and torch.ops.llama.custom_sdpa.default not in targets


def test_one_method_where_it_decodes_as_fast_as_two() -> None:
    assert list(program_of("gemma3_text").methods) == ["forward"]
    assert list(program_of("gemma2").methods) == ["decode", "prefill"]
    assert list(program_of("gemma2", llm_runner=True).methods) == ["decode", "prefill", "forward"]
    assert list(program_of("llama", methods="split").methods) == ["decode", "prefill"]
    assert list(program_of("llama", methods="both").methods) == ["decode", "prefill", "forward"]
    assert list(program_of("gemma2", methods="forward").methods) == ["forward"]


def test_methods_that_do_not_go_together_are_refused() -> None:
    options = backend_for("executorch").options.parse
    with pytest.raises(InputError, match="methods must be one of auto, forward, split, both, got 'two'"):
        options({"methods": "two"})
    with pytest.raises(InputError, match="methods must be 'forward' or 'both' with llm_runner, got 'split'"):
        options({"methods": "split", "llm_runner": True})


@pytest.fixture(scope="module")
def hybrid():
    """A ring and a full layer with 4 query heads folded into one product: the model, its session, and what its file
    calls.
    """
    model, folder = folded_bundle(llm_runner=True)
    assert fold_of(16, 2, WINDOW) == 4
    session = load(folder)
    written = deserialize_pte_binary((folder / "program.pte").read_bytes())
    return model, session, SimpleNamespace(executorch_program=written.program)


# Of one to three tokens: fewer slots than the folded form needs. Past the window, and in chunks that are longer than
# it.
@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 7, 8, 9, 17, 40])
def test_folded_heads_and_rings_give_the_models_logits(hybrid, prompt: int) -> None:
    model, session, _ = hybrid
    ids = tokens(prompt + 40, seed=prompt)
    session.reset()
    reference = reference_logits(model, ids, prompt)
    assert difference(lambda piece: session.prefill(piece), reference, ids, prompt) <= 1e-4


def test_a_prompt_that_goes_on_after_decoding_sees_the_ring(hybrid) -> None:
    model, session, _ = hybrid
    ids = tokens(60, seed=1)
    session.reset()
    session.prefill(ids[:, :21])
    for position in range(21, 26):
        session.decode(ids[:, position])
    logits = session.prefill(ids[:, 26:])
    assert (logits - reference_logits(model, ids, 60)[:, -1]).abs().max() <= 1e-4


def test_the_cache_is_touched_by_the_fused_operators_only(hybrid) -> None:
    calls = list(instructions(hybrid[2], "forward"))
    counts = Counter(name for name, _ in calls)
    assert counts["llama::update_cache"] == 4 and counts["llama::update_cache_with_indices"] == 2
    # Two branches per layer.
    assert counts["llama::custom_sdpa"] == 4
    # RMSNorm stays inside the delegate, and no product is left to the portable kernels.
    assert not {"aten::mean", "aten::rsqrt", "aten::mul", "aten::linear", "aten::mm", "aten::bmm"} & counts.keys()
    assert not {"aten::copy_", "aten::index_put", "aten::index_put_", "aten::expand_copy"} & counts.keys()
    full, ring = [2, CAPACITY, 1, 8], [2, WINDOW + 1, 1, 8]
    # Rotary embeddings stay inside it, too: what is sliced beside the ring is its first new row, twice, and behind the
    # last attention the last token, of what it gives and of what went by it.
    assert sum(name == "aten::slice_copy" and ring not in shapes for name, shapes in calls) == 4
    assert {name for name, shapes in calls if full in shapes} == {"llama::update_cache", "llama::custom_sdpa"}
    # Where several tokens attend, the ring is put before them: the one copy of it.
    assert {name for name, shapes in calls if ring in shapes} == {
        "llama::update_cache", "llama::update_cache_with_indices", "llama::custom_sdpa", "aten::slice_copy"
    }  # fmt: skip
    # The mask of full layers goes unused, so nothing else is of the allocated length.
    assert not [shapes for _, shapes in calls for shape in shapes if CAPACITY in shape and shape != full]


def test_no_delegate_holds_what_all_of_the_compilers_passes_would_look_at(hybrid) -> None:
    """A copy of the queries did, in every layer: the passes took a third of the time to lower."""
    (plan,) = (plan for plan in hybrid[2].executorch_program.execution_plan if plan.name == "forward")
    keys = [{spec.key for spec in delegate.compile_specs} for delegate in plan.delegates]
    assert keys and all(LINEAR_ONLY.key in of_one for of_one in keys)
