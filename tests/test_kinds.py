"""Every kind of layer on the targets that run here: logits of the eager model without a cache, past windows.

Teacher-forced, float32; prompts shorter, equal and longer than the window or chunk of 8, whole and in two parts, which
makes the second part start from what the first left behind.
"""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import cache_utils

from exportable_cache import ExportableCache
from exportable_cache.common.compat.transformers import cache_argument
from exportable_cache.errors import InputError

from .support.compiling import FUNCTIONALIZED, compiling_with
from .support.kinds import KINDS, kind_model
from .support.models import among, tokens
from .support.oracle import reference_logits
from .support.sessions import live_session, lowered_session

TOLERANCE = 1e-4
PROMPTS = ((3,), (2, 1), (8,), (5, 4), (21,), (13, 8))
STEPS = 14

# States beside full layers; a ring and a full layer: test_equality.py. With --full all, one with states under Inductor.
COMPILED = ("lfm2",)
INDUCTOR = ("mamba", "mamba2")
# A scan. With --full the other one, with attention in one layer, latent attention and chosen slots, and the cache as
# an argument, which is in the fast lane of test_pt2.py; chunks: patches/test_rotary.py.
EXPORTED = ("mamba",)


def worst_difference(session, model) -> dict[tuple[int, ...], float]:
    """By the parts of the prompt. The session is not told that a new sequence starts, but by position 0."""
    found = {}
    for parts in PROMPTS:
        prompt = sum(parts)
        ids = tokens(prompt + STEPS, seed=prompt)
        session.stepper.shift(-session.length)
        for part in ids[:, :prompt].split(parts, dim=1):
            last = session.prefill(part)
        rows = [last, *(session.decode(ids[:, at]) for at in range(prompt, prompt + STEPS))]
        found[parts] = (torch.stack(rows, 1) - reference_logits(model, ids, prompt)).abs().max().item()
    return found


@pytest.mark.parametrize("family", KINDS)
def test_eager(family: str) -> None:
    model = kind_model(family)
    session = live_session(model, False, 64)
    fields, labels = KINDS[family]
    if not hasattr(cache_utils, "DummyLayer"):
        # Caches of transformers 5.20 have no entry for layers that share keys.
        labels = labels[: len(labels) - fields.get("num_kv_shared_layers", 0)]
    assert [layer.label for layer in session.layers] == labels
    found = worst_difference(session, model)
    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize("family", among(KINDS, fast=EXPORTED))
def test_pt2(family: str) -> None:
    model = kind_model(family)
    found = worst_difference(lowered_session(model, "pt2", 64), model)
    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize("family", among(["deepseek_v32", "falcon_h1", "mamba", "gemma3n_text"], fast=[]))
def test_pt2_with_the_cache_as_an_argument(family: str) -> None:
    model = kind_model(family)
    found = worst_difference(lowered_session(model, "pt2", 64, form="explicit"), model)
    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize("family", among(KINDS, fast=COMPILED))
def test_compiled_in_one_graph_per_method(family: str) -> None:
    counters.clear()
    model = kind_model(family)
    backend = "inductor" if family in INDUCTOR else FUNCTIONALIZED
    with compiling_with(backend), torch._dynamo.config.patch(error_on_recompile=True):
        found = worst_difference(live_session(model, True, 64), model)
    assert max(found.values()) <= TOLERANCE, found
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]


@pytest.mark.full
def test_machine_code_of_a_scan() -> None:
    model = kind_model("mamba")
    found = worst_difference(lowered_session(model, "aoti", 64), model)
    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize("family", KINDS)
def test_the_oracle_can_tell(family: str) -> None:
    """The first token moves the last logits, so a layer that forgets cannot pass."""
    model = kind_model(family)
    ids = tokens(12)
    changed = ids.clone()
    changed[0, 0] = 3 + (ids[0, 0] + 1) % 100
    expected = reference_logits(model, ids, 12)
    assert expected.std() > 0.05
    assert (reference_logits(model, changed, 12) - expected).abs().max() > 10 * TOLERANCE


@pytest.mark.parametrize("family", ["lfm2", "mamba", "falcon_h1"])
def test_a_plain_model_call(family: str) -> None:
    """The model with the cache as an argument, outside a session: the cache counts, and reset starts anew."""
    model, ids = kind_model(family), tokens(20)
    cache = ExportableCache.from_model(model, max_cache_len=32)
    for _ in range(2):
        with torch.no_grad():
            options = {cache_argument(model): cache}
            model(ids[:, :9], **options)
            model(ids[:, 9:10], **options)
            last = model(ids[:, 10:20], **options).logits[:, -1]
        assert cache.cumulative_length.tolist() == [20]
        assert (last - reference_logits(model, ids, 20)[:, -1]).abs().max() <= TOLERANCE
        cache.reset()


def test_states_are_not_wound_back() -> None:
    session = live_session(kind_model("lfm2"), False, 32)
    session.prefill(tokens(6))
    with pytest.raises(InputError, match="a layer's state sums up all tokens, at most 0 can be taken back"):
        session.rewind(1)
    assert session.length.tolist() == [6]


def test_taking_back_everything_starts_anew() -> None:
    """A state of fixed size has no past, but it has a beginning."""
    session = live_session(kind_model("qwen3_next"), False, 64)
    expected = session.prefill(tokens(9))
    session.decode(tokens(1)[0])
    with pytest.raises(InputError, match="cannot rewind 9 tokens"):
        session.rewind(9)
    session.rewind(10)
    assert session.length.tolist() == [0]
    torch.testing.assert_close(session.prefill(tokens(9)), expected)
