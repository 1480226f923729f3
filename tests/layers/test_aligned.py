"""Keys of a prompt are padded to a multiple of 8 where attention needs it."""

from __future__ import annotations

import pytest
import torch

from exportable_cache import ExportableCache, Session
from exportable_cache.cache import slots
from exportable_cache.cache.attention.functions import fused_attention
from exportable_cache.cache.attention.masks import aligned_mask
from exportable_cache.cache.layers import CacheLayer, RowSizes
from exportable_cache.cache.policies import RingPolicy, SinkPolicy
from exportable_cache.cache.storage import FloatStorage

from ..support.models import tiny_model, tokens
from ..support.oracle import reference_logits

POLICIES = [RingPolicy(5), SinkPolicy(2, 5)]


@pytest.fixture
def needs_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the CPU a device that needs aligned masks."""
    monkeypatch.setattr(slots, "_ANY_WIDTH", frozenset())


def updated(policy, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return keys, values and key positions of a prompt of `length` tokens in two parts."""
    layer = CacheLayer(policy, FloatStorage("float32"), RowSizes(2, 1, 4))
    tokens = torch.arange(1.0, length + 4).reshape(1, 1, -1, 1).expand(2, 1, -1, 4)
    layer.update(tokens[:, :, :3], tokens[:, :, :3])
    positions = layer.slot_positions(length)
    return *layer.update(tokens[:, :, 3:], tokens[:, :, 3:]), positions


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.kind)
@pytest.mark.parametrize("length", [2, 4, 9])
def test_padding_is_hidden(policy, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, values, positions = updated(policy, length)
    monkeypatch.setattr(slots, "_ANY_WIDTH", frozenset())
    padded_keys, padded_values, padded_positions = updated(policy, length)

    width = keys.shape[2]
    assert padded_keys.shape[2] == padded_values.shape[2] == padded_positions.shape[-1] == -(-width // 8) * 8
    assert padded_keys[:, :, :width].equal(keys) and padded_values[:, :, :width].equal(values)
    assert padded_positions[..., :width].equal(positions)
    assert (padded_positions[..., width:] == 3 + length).all()


def test_a_cpu_pads_nothing() -> None:
    assert updated(RingPolicy(5), 4)[0].shape[2] == 9


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt_oss"])
def test_logits_are_those_without_padding(model_type: str, needs_alignment: None) -> None:
    """Check prompts in two parts, of widths that are no multiples of 8, past every window."""
    model = tiny_model(model_type)
    ids = tokens(31)
    with Session.from_model(model, ExportableCache.from_model(model, 64)) as session:
        session.prefill(ids[:, :19])
        found = session.prefill(ids[:, 19:])
    torch.testing.assert_close(found, reference_logits(model, ids, 31)[:, -1], rtol=1e-4, atol=1e-4)


class MaskedAttention(torch.nn.Module):
    """Attention under a mask."""

    def forward(self, query: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Attend to keys that are the values too."""
        return fused_attention(self, query, keys, keys, mask)[0]


def masked(heads: int, length: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys, and a mask of `length` keys, which hides some of them from all queries."""
    seen = (torch.arange(length) % 3 != 1).expand(2, 1, 3, length)
    mask = seen if dtype == torch.bool else torch.where(seen, 0.0, torch.finfo(dtype).min)
    return torch.randn(2, heads, 3, 4), torch.randn(2, 1, length, 4), mask


@pytest.mark.skipif(torch.__version__ < "2.13", reason="exporters need torch 2.13: 2.11 keeps a guard for two heads")
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("heads", [1, 2])
def test_a_graph_for_every_length_hides_the_padding(heads: int, dtype: torch.dtype, needs_alignment: None) -> None:
    """Check that a traced graph pads, and computes what uncompiled attention computes."""
    dim = torch.export.Dim("length", min=2, max=64)
    shapes = ({}, {2: dim}, {3: dim})
    program = torch.export.export(MaskedAttention(), masked(heads, 11, dtype), dynamic_shapes=shapes)
    (attention,) = program.graph.find_nodes(
        op="call_function", target=torch.ops.aten.scaled_dot_product_attention.default
    )
    assert attention.args[1].meta["val"].shape[2] % 8 == 0
    for length in (3, 8, 13):
        inputs = masked(heads, length, dtype)
        torch.testing.assert_close(program.module()(*inputs), MaskedAttention()(*inputs))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16])
def test_the_padding_of_a_mask_is_hidden(dtype: torch.dtype, needs_alignment: None) -> None:
    """Check both kinds of masks."""
    mask = torch.ones(1, 1, 2, 5, dtype=dtype)
    padded = aligned_mask(mask)
    assert padded.dtype == dtype and padded[..., :5].equal(mask)
    assert padded[..., 5:].tolist() == [[[[False if dtype == torch.bool else torch.finfo(dtype).min] * 3] * 2]]
