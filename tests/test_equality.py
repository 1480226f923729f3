"""The claim of the project: every target gives the logits of the eager model with `DynamicCache`, past the window.

The fast lane has every family in eager, and of the other targets the families that differ to them.

Teacher-forced, float32: prompts shorter, equal and longer than the window of 8, each followed by 20 decode steps.
"""

import pytest
import torch
from torch._dynamo.utils import counters

from exportable_cache import ExportableCache

from .support.compiling import compiling_with
from .support.models import FAMILIES, among, tiny_model, tokens
from .support.oracle import difference, reference_logits
from .support.sessions import live_session, lowered_session

TOLERANCE = 1e-4
PROMPTS = (3, 7, 8, 9, 40)
STEPS = 20


def worst_difference(session, model) -> dict[int, float]:
    found = {}
    for prompt in PROMPTS:
        ids = tokens(prompt + STEPS, seed=prompt)
        reference = reference_logits(model, ids, prompt)
        session.reset()
        found[prompt] = difference(
            lambda piece: session.decode(piece[:, 0]) if piece.shape[1] == 1 else session.prefill(piece),
            reference,
            ids,
            prompt,
        )
        assert session.length.tolist() == [prompt + STEPS]
    return found


@pytest.fixture
def no_recompiles():
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


@pytest.mark.parametrize("family", FAMILIES)
def test_the_oracle_can_tell(family: str) -> None:
    """The first token moves the last logits, and the window changes them: a wrong cache cannot pass."""
    model = tiny_model(family)
    ids = tokens(12)
    reference = reference_logits(model, ids, 12)
    assert reference.std() > 0.05
    for position in (0, 4):
        changed = ids.clone()
        changed[0, position] = 3 + (ids[0, position] + 1) % 100
        assert (reference_logits(model, changed, 12) - reference).abs().max() > 100 * TOLERANCE
    if getattr(model.config, "sliding_window", None):
        model.config.sliding_window = 7
        for module in model.modules():
            if getattr(module, "sliding_window", None):
                module.sliding_window = 7
        assert (reference_logits(model, ids, 12) - reference).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_eager(family: str) -> None:
    model = tiny_model(family)
    found = worst_difference(live_session(model, False, 96), model)
    assert max(found.values()) <= TOLERANCE, found


# In the fast lane test_session.py and test_kinds.py.
@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_in_one_graph_per_method(family: str, no_recompiles) -> None:
    model = tiny_model(family)
    found = worst_difference(live_session(model, True, 96), model)
    assert max(found.values()) <= TOLERANCE, found
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


# Rings and full layers.
@pytest.mark.parametrize("family", among(FAMILIES, fast=("gemma3_text",)))
def test_pt2(family: str) -> None:
    model = tiny_model(family)
    found = worst_difference(lowered_session(model, "pt2"), model)
    assert max(found.values()) <= TOLERANCE, found


# Rings and full layers by the portable operators; by the fused ones: backends/test_executorch_fused.py.
# In the fast lane programs are verified past the window by their export: test_exporter.py.
@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_executorch(family: str) -> None:
    model = tiny_model(family)
    found = worst_difference(lowered_session(model, "executorch"), model)
    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        # Full layers and rings in one model; with --full also the code that is generated for them.
        ("gemma3_text", "aot_eager"),
        pytest.param("gemma3_text", "inductor", marks=pytest.mark.full),
        pytest.param("llama", "aot_eager", marks=pytest.mark.full),
        pytest.param("mistral", "aot_eager", marks=pytest.mark.full),
    ],
)
def test_a_compiled_model_call_never_recompiles(family: str, backend: str) -> None:
    """Plain `torch.compile(model)`, the cache an argument: 200 steps across the window, one graph."""
    model = tiny_model(family)
    cache = ExportableCache.from_config(model.config, max_cache_len=256)
    ids = tokens(203)
    reference = reference_logits(model, ids, 3)
    counters.clear()
    with compiling_with(backend), torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(model, fullgraph=True, dynamic=False)

        def step(piece: torch.Tensor) -> torch.Tensor:
            return (compiled if piece.shape[1] == 1 else model)(piece, past_key_values=cache).logits[:, -1]

        assert difference(step, reference, ids, 3) <= TOLERANCE
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
