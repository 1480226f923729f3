"""Live sessions compile on every torch of the range, and older ones are refused where programs are exported."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch

from exportable_cache import ExportableCache, Session
from exportable_cache.backends import registry
from exportable_cache.errors import MissingDependencyError

from .support.models import tiny_model


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.1"])
def test_an_older_torch_is_refused_by_every_target(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = metadata.version
    monkeypatch.setattr(registry.metadata, "version", lambda name: version if name == "torch" else installed(name))
    with pytest.raises(
        MissingDependencyError, match=f"need torch 2.13 or newer, and {version} is installed".replace("+", "[+]")
    ):
        registry.backend_for("pt2")


@pytest.mark.parametrize("version", ["2.13.0", "2.15.0", "3.0.1a0"])
def test_a_newer_torch_is_accepted(version: str) -> None:
    registry.check_torch(version)


# In the fast lane, and in `make test-live`: test_session.py.
@pytest.mark.full
def test_a_compiled_session_is_the_model_past_its_window() -> None:
    model = tiny_model("gemma3_text")
    torch._dynamo.reset()
    prompt = torch.arange(1, 25)[None]
    session = Session.from_model(model, ExportableCache.from_model(model, max_cache_len=64), compile="wait")
    expected = model.generate(prompt, max_new_tokens=24, do_sample=False)[0, prompt.shape[1] :]
    assert list(session.generate(prompt, max_new_tokens=24)) == expected.tolist()
