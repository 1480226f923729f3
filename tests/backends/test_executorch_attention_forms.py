"""The forms of attention over fused layers, against torch's own attention on the same keys and values."""

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("executorch", reason="the executorch extra is not installed")

from exportable_cache.backends.executorch.attention.forms import forms_of, least_single
from exportable_cache.backends.executorch.attention.layouts import fold_of
from exportable_cache.common.compat.executorch import register_fused_operators

SLOTS, DIM, SCALING = 12, 8, 0.3
# Heads and key heads: each its own, shared by two, by three, all with one, and more to share than are folded.
HEADS = [(6, 6), (4, 2), (12, 4), (4, 1), (16, 2)]


@pytest.fixture(scope="module", autouse=True)
def fused_operators() -> None:
    """Operators that the forms call, which tests of other files register too."""
    register_fused_operators()


def keys_and_values(num_heads: int, slots: int = SLOTS) -> tuple[torch.Tensor, torch.Tensor]:
    """[num_heads, slots, 1, dim] each."""
    return torch.randn(num_heads, slots, 1, DIM), torch.randn(num_heads, slots, 1, DIM)


def expected(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """[1, query_length, heads, dim], of slots `seen` [query_length, slots]."""
    keys, values = (states.squeeze(2)[None] for states in (keys, values))
    return F.scaled_dot_product_attention(
        query, keys, values, attn_mask=seen, scale=SCALING, enable_gqa=True
    ).transpose(1, 2)


@pytest.mark.parametrize(("heads", "num_heads"), HEADS)
@pytest.mark.parametrize("query_length", [2, 5])
@pytest.mark.parametrize("length", [0, 4])
def test_several_tokens_over_a_full_layer(heads: int, num_heads: int, query_length: int, length: int) -> None:
    keys, values = keys_and_values(num_heads)
    query = torch.randn(1, heads, query_length, DIM)
    _, several = forms_of("full", fold_of(heads, num_heads, SLOTS), SLOTS, SCALING)
    (output,) = several(query, torch.tensor([length]), keys, values)
    seen = torch.arange(SLOTS) <= length + torch.arange(query_length)[:, None]
    torch.testing.assert_close(output, expected(query, keys, values, seen))


@pytest.mark.parametrize(("heads", "num_heads"), HEADS)
@pytest.mark.parametrize("further", [0, 1, 6])
def test_one_token_over_a_full_layer(heads: int, num_heads: int, further: int) -> None:
    keys, values = keys_and_values(num_heads)
    query = torch.randn(1, heads, 1, DIM)
    fold = fold_of(heads, num_heads, SLOTS)
    length = least_single(fold) + further
    one, _ = forms_of("full", fold, SLOTS, SCALING)
    (output,) = one(query, torch.tensor([length]), keys, values)
    torch.testing.assert_close(output, expected(query, keys, values, torch.arange(SLOTS)[None] <= length))


@pytest.mark.parametrize(("heads", "num_heads"), HEADS)
@pytest.mark.parametrize("length", [3, SLOTS - 1, 40])
def test_one_token_over_a_ring(heads: int, num_heads: int, length: int) -> None:
    keys, values = keys_and_values(num_heads, SLOTS + 1)
    new = keys_and_values(num_heads, 1)
    query, mask, slots = (
        torch.randn(1, heads, 1, DIM),
        torch.zeros(1, SLOTS + 1),
        torch.zeros(num_heads, 1, dtype=torch.int64),
    )
    one, _ = forms_of("ring", fold_of(heads, num_heads, SLOTS), SLOTS, SCALING)
    output, handed_through = one(query, mask, slots, torch.tensor([length]), keys, values, *new)
    seen = torch.arange(SLOTS + 1)[None] <= min(length, SLOTS - 1)
    torch.testing.assert_close(output, expected(query, keys, values, seen))
    assert torch.equal(handed_through, slots)


@pytest.mark.parametrize(("heads", "num_heads"), HEADS)
def test_several_tokens_over_a_ring(heads: int, num_heads: int) -> None:
    keys, values = keys_and_values(num_heads, SLOTS + 1)
    new = keys_and_values(num_heads, 5)
    query, seen = torch.randn(1, heads, 5, DIM), torch.rand(5, SLOTS + 5) < 0.5
    seen[:, -1] = True
    mask, slots = torch.where(seen, 0.0, torch.finfo(torch.float32).min), torch.zeros(num_heads, 5, dtype=torch.int64)
    _, several = forms_of("ring", fold_of(heads, num_heads, SLOTS), SLOTS, SCALING)
    output, handed_through = several(query, mask, slots, torch.tensor([30]), keys, values, *new)
    joined = (torch.cat([old[:, :SLOTS], added], dim=1) for old, added in zip((keys, values), new, strict=True))
    torch.testing.assert_close(output, expected(query, *joined, seen))
    assert torch.equal(handed_through, slots)
