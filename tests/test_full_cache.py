"""A prompt or a step that does not fit is refused before any state changes, on every target; what fits goes on right."""

import pytest
import torch

from exportable_cache import ExportableCache
from exportable_cache.errors import CacheFullError

from .support.models import tiny_model, tokens
from .support.oracle import reference_logits
from .support.sessions import live_session, lowered_session

CAPACITY = 20


@pytest.fixture(params=["eager", "compiled", "pt2", "executorch"])
def session(request, tmp_path):
    model = tiny_model("gemma3_text")
    if request.param in ("eager", "compiled"):
        return model, live_session(model, request.param == "compiled", CAPACITY)
    return model, lowered_session(model, request.param, CAPACITY)


def test_refused_and_then_continued(session) -> None:
    model, session = session
    ids = tokens(CAPACITY)
    with pytest.raises(CacheFullError, match="21"):
        session.prefill(tokens(CAPACITY + 1, seed=3))
    assert session.length.tolist() == [0]
    session.prefill(ids[:, :17])
    for too_long in (4, 40):
        with pytest.raises(CacheFullError, match=f"17.*{CAPACITY}"):
            session.prefill(tokens(too_long, seed=too_long))
        assert session.length.tolist() == [17]
    reference = reference_logits(model, ids, 17)
    for position in range(17, CAPACITY):
        logits = session.decode(ids[:, position])
        assert (logits - reference[:, position - 16]).abs().max() <= 1e-4
    with pytest.raises(CacheFullError, match=f"{CAPACITY}"):
        session.decode(ids[:, 0])
    assert session.length.tolist() == [CAPACITY]
    session.reset()
    assert (session.prefill(ids) - reference_logits(model, ids, CAPACITY)[:, 0]).abs().max() <= 1e-4


def test_a_compiled_model_call_raises_instead_of_writing_elsewhere() -> None:
    """Without a session nobody looks at the length: the compiled write checks its own bounds."""
    model = tiny_model("llama")
    cache = ExportableCache.from_config(model.config, max_cache_len=CAPACITY)
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    with torch.no_grad():
        model(tokens(CAPACITY), past_key_values=cache)
        before = {name: tensor.clone() for name, tensor in cache.named_state()}
        with pytest.raises(RuntimeError, match="index"):
            compiled(tokens(1), past_key_values=cache)
    for name, tensor in cache.named_state():
        if not name.endswith("cumulative_length"):
            assert torch.equal(tensor, before[name]), name
