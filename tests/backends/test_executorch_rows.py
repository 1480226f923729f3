"""Several rows on ExecuTorch without this package's kernels: each row as if it were alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from exportable_cache import ExportableCache
from exportable_cache.cache.layers import CacheLayer
from exportable_cache.cache.policies import FullPolicy, RingPolicy
from exportable_cache.cache.step import StepContext
from exportable_cache.errors import UnsupportedModelError

pytest.importorskip("executorch", reason="the executorch extra is not installed")

from exportable_cache.backends.executorch.attention.fused import fuse_layers
from exportable_cache.backends.executorch.attention.layouts import RowsLayout, takes_rows

from ..support.kinds import kind_model
from ..support.models import WINDOW, tiny_model
from ..support.sessions import lowered_session
from ..test_ragged import FAMILIES, check_rows, model_of

ROWS = 3


def _layers(policy: str) -> tuple[CacheLayer, Any]:
    """The layer of a model in both layouts."""
    model = tiny_model({"full": "llama", "ring": "mistral"}[policy])
    made = ExportableCache.from_model(model, 32, ROWS).layers[0]
    assert isinstance(made.policy, {"full": FullPolicy, "ring": RingPolicy}[policy])
    return made, RowsLayout.over(made)


@pytest.mark.parametrize("policy", ["full", "ring"])
def test_keys_are_those_of_the_portable_layout(policy: str) -> None:
    """Rows at positions of their own, steps of one token and of several, past the window."""
    portable, rows = _layers(policy)
    heads, dim = portable.keys.shape[1], portable.keys.shape[3]
    generator, length = torch.Generator().manual_seed(0), torch.tensor([0, 2, 5])
    for count in (3, 1, WINDOW + 2, 1, 1, 4):
        new = [torch.randn(ROWS, heads, count, dim, generator=generator) for _ in range(2)]
        found = []
        for layer in (portable, rows):
            layer.begin(StepContext(), max_len_ever=None)
            layer.cumulative_length.copy_(length)
            found.append(layer.layout.update(layer, *new))
        for one, other in zip(*found, strict=True):
            assert one.shape == other.shape and torch.equal(one, other)
        length = length + count
        assert torch.equal(rows.cumulative_length, length)
        assert torch.equal(rows.keys.view(portable.keys.shape), portable.keys)


def test_a_row_writes_nowhere_else() -> None:
    _, rows = _layers("full")
    heads, capacity = rows.layout.heads, rows.policy.capacity
    rows.cumulative_length.copy_(torch.tensor([0, 7, 31]))
    dim = rows.keys.shape[1]
    rows.layout.update(rows, torch.ones(ROWS, heads, 1, dim), torch.ones(ROWS, heads, 1, dim))
    written = rows.keys.view(ROWS, heads, capacity, dim)[..., 0].nonzero()
    assert written.tolist() == [[row, head, slot] for row, slot in enumerate((0, 7, 31)) for head in range(heads)]


def test_layers_that_write_by_themselves_are_refused_by_number() -> None:
    model = kind_model("falcon_h1")
    cache = ExportableCache.from_model(model, 32, 2)
    assert not any(takes_rows(layer) for layer in cache.layers)
    with pytest.raises(
        UnsupportedModelError, match=r"batch_size must be 1 for layers 0, 1 of FalconH1.*kernels='native'"
    ):
        fuse_layers(model, cache)


@pytest.mark.full
@pytest.mark.parametrize("family", [*FAMILIES, "rows of 8"])
def test_programs_answer_each_row_as_if_it_were_alone(family: str) -> None:
    lengths = (3, WINDOW, 29)
    if family == "rows of 8":
        family, lengths = "gemma3_text", (3, WINDOW, 29, 1, 2, WINDOW + 1, 17, 12)
    model = model_of(family)
    session = lowered_session(model, "executorch", 64, batch_size=len(lengths))
    check_rows(session, model, lengths, "left")
    session.reset()
    check_rows(session, model, tuple(reversed(lengths)), "right")
    session.reset()
    check_rows(session, model, (11,) * len(lengths), "left")
