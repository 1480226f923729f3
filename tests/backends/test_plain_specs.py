"""Specs of our caches as specs of dicts: every kind of layer, with leaves in the same order."""

from __future__ import annotations

import pytest
import torch.utils._pytree as pytree

from exportable_cache import ExportableCache
from exportable_cache.pytree.registry import plain_spec

from ..support.models import tiny_model
from ..support.seq2seq import tiny_seq2seq


# Rings and full layers, states, a layer of both, an encoder's keys.
@pytest.mark.parametrize("kind", ["gemma3_text", "mamba", "lfm2", "t5"])
def test_a_cache_is_dicts_and_lists_with_its_leaves_in_order(kind: str) -> None:
    model = tiny_seq2seq(kind) if kind == "t5" else tiny_model(kind)
    options = {"max_encoder_len": 8} if kind == "t5" else {}
    cache = ExportableCache.from_model(model, max_cache_len=16, **options)
    leaves, spec = pytree.tree_flatten((cache, {"more": 1}))
    text = plain_spec(pytree.treespec_dumps(spec))
    assert "exportable_cache" not in text
    plain, other = pytree.tree_unflatten(leaves, pytree.treespec_loads(text))
    assert other == {"more": 1}
    assert [list(layer) for layer in plain["layers"]] == [list(layer.state) for layer in cache.layers]
    for layer, named in zip(plain["layers"], cache.layers, strict=True):
        assert all(layer[name] is tensor for name, tensor in named.named_state())
