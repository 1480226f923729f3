"""The cache argument: `past_key_values` before transformers 5.24, then `cache`, or `cache_params`."""

from __future__ import annotations

import inspect
import warnings
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

from exportable_cache import ExportableCache, Session
from exportable_cache.common.compat.transformers import cache_argument, cache_name
from exportable_cache.models.patches.conditions import with_new_names

from ..support.models import tiny_model, tokens

#: Families whose sources of 5.20.2 no patch knows.
LATER = pytest.mark.skipif(
    Version(metadata.version("transformers")) < Version("5.23"), reason="needs the sources of transformers 5.23"
)


@pytest.mark.parametrize("family", ["llama", pytest.param("mamba", marks=LATER), pytest.param("bloom", marks=LATER)])
def test_no_model_is_called_by_a_deprecated_name(family: str) -> None:
    model = tiny_model(family)
    assert cache_argument(model) in inspect.signature(model.forward).parameters
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", FutureWarning)
        session = Session.from_model(model, ExportableCache.from_model(model, 16))
        session.prefill(tokens(5))
        session.decode(torch.tensor([3]))


def test_code_from_a_repository_keeps_its_name() -> None:
    def forward(input_ids: Any, past_key_values: Any = None) -> None: ...

    def newer(input_ids: Any, cache: Any = None) -> None: ...

    def without(input_ids: Any, **kwargs: Any) -> None: ...

    names = [cache_argument(SimpleNamespace(forward=one)) for one in (forward, newer, without)]
    assert names == ["past_key_values", "cache", cache_name()]


def test_a_replacement_takes_each_name() -> None:
    def replacement(cache: Any = None, *, original: Any = None, **kwargs: Any) -> Any:
        return cache, kwargs

    renaming = with_new_names(replacement)
    for name in ("cache", "past_key_values", "cache_params"):
        assert renaming(**{name: 1}, use_cache=True) == (1, {"use_cache": True})
    assert renaming(past_key_values_length=2) == (None, {"past_key_values_length": 2})
