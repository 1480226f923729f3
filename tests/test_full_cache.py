"""What does not fit is refused before any state changes, on every target; what fits goes on right."""

import pytest
import torch

from exportable_cache import ExportableCache, load
from exportable_cache.errors import CacheFullError

from .support.compiling import compiling_with
from .support.models import among, tiny_model, tokens
from .support.oracle import reference_logits
from .support.sessions import CAPACITY, folded_bundle, live_session, lowered_session

HELD = 17


@pytest.fixture(params=among(["eager", "compiled", "pt2", "executorch"], fast=["eager", "pt2", "executorch"]))
def session(request):
    if request.param == "executorch":
        pytest.importorskip("executorch")
        model, folder = folded_bundle(llm_runner=True)
        return model, load(folder)
    model = tiny_model("gemma3_text")
    if request.param in ("eager", "compiled"):
        return model, live_session(model, request.param == "compiled", CAPACITY)
    return model, lowered_session(model, request.param)


def test_refused_and_then_continued(session) -> None:
    model, session = session
    ids = tokens(CAPACITY)
    with pytest.raises(CacheFullError, match=str(CAPACITY + 1)):
        session.prefill(tokens(CAPACITY + 1, seed=3))
    assert session.length.tolist() == [0]
    session.prefill(ids[:, :HELD])
    for too_long in (CAPACITY - HELD + 1, CAPACITY):
        with pytest.raises(CacheFullError, match=f"{HELD}.*{CAPACITY}"):
            session.prefill(tokens(too_long, seed=too_long))
        assert session.length.tolist() == [HELD]
    reference = reference_logits(model, ids, HELD)
    for position in range(HELD, CAPACITY):
        logits = session.decode(ids[:, position])
        assert (logits - reference[:, position - HELD + 1]).abs().max() <= 1e-4
    with pytest.raises(CacheFullError, match=f"{CAPACITY}"):
        session.decode(ids[:, 0])
    assert session.length.tolist() == [CAPACITY]
    session.reset()
    assert (session.prefill(ids) - reference_logits(model, ids, CAPACITY)[:, 0]).abs().max() <= 1e-4


def test_a_compiled_model_call_raises_instead_of_writing_elsewhere() -> None:
    """Without a session nobody looks at the length: the compiled write checks its own bounds."""
    model = tiny_model("llama", num_hidden_layers=1)
    cache = ExportableCache.from_config(model.config, max_cache_len=CAPACITY)
    # Code of the write alone, as models call it.
    with torch.no_grad(), compiling_with("inductor"):
        compiled = torch.compile(cache.update, fullgraph=True, dynamic=False)
        model(tokens(CAPACITY), past_key_values=cache)
        before = {name: tensor.clone() for name, tensor in cache.named_state()}
        with pytest.raises(RuntimeError, match="index"):
            compiled(torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8), 0)
    for name, tensor in cache.named_state():
        if not name.endswith("cumulative_length"):
            assert torch.equal(tensor, before[name]), name
