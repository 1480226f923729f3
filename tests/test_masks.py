"""`position_mask` against transformers' own masks, and where those do not go: rings, ragged rows, right padding."""

import pytest
import torch
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    eager_mask,
    sliding_window_causal_mask_function,
)

from exportable_cache.cache.attention.masks import position_mask

from .support.layers import ring_layer

LOWEST = torch.finfo(torch.float32).min
FUNCTIONS = {
    "causal": causal_mask_function,
    "sliding": sliding_window_causal_mask_function(4),
    "chunked": chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64)),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("q_length", "q_offset", "kv_length", "kv_offset"), [(5, 0, 5, 0), (1, 9, 12, 0), (3, 9, 7, 5)]
)
@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_equal_to_transformers_where_both_apply(function, q_length, q_offset, kv_length, kv_offset, padding) -> None:
    attention_mask = None
    if padding is not None:
        attention_mask = torch.ones(2, kv_offset + kv_length, dtype=torch.bool)
        attention_mask[1, :3] = padding != "left"
        attention_mask[1, -3:] = padding != "right"
    arguments = {"mask_function": FUNCTIONS[function], "attention_mask": attention_mask}
    sizes = (2, q_length, kv_length, q_offset, kv_offset)
    expected = eager_mask(*sizes, **arguments)
    assert torch.equal(position_mask(*sizes, **arguments).expand_as(expected), expected)
    offsets = (torch.tensor([[q_offset]] * 2), torch.full((2, kv_length), kv_offset))
    assert torch.equal(position_mask(2, q_length, kv_length, *offsets, **arguments).expand_as(expected), expected)


def test_a_short_padding_mask_hides_what_it_does_not_cover() -> None:
    mask = position_mask(1, 1, 6, 5, 0, attention_mask=torch.tensor([[False, True, True]]))
    assert (mask[0, 0, 0] == 0).tolist() == [False, True, True, False, False, False]


def test_rows_of_different_length() -> None:
    mask = position_mask(2, 1, 4, torch.tensor([[1], [3]]), 0)
    assert (mask[:, 0, 0] == 0).tolist() == [[True, True, False, False], [True, True, True, True]]


@pytest.mark.parametrize("length", [0, 2, 5, 8, 11])
@pytest.mark.parametrize("q_length", [1, 2, 7])
def test_ring_offsets_give_the_window_of_each_query(length: int, q_length: int) -> None:
    layer = ring_layer(1, 1, 1, window=5)
    layer.cumulative_length.fill_(length)
    kv_length, offset = layer.get_mask_sizes(q_length)
    positions = (torch.arange(kv_length) + offset)[0]
    mask = position_mask(
        1, q_length, kv_length, length, offset[0], mask_function=sliding_window_causal_mask_function(5)
    )
    for index, query in enumerate(range(length, length + q_length)):
        assert sorted(positions[mask[0, 0, index] == 0].tolist()) == list(range(max(0, query - 4), query + 1))


def test_padding_is_looked_up_at_the_position_a_ring_slot_holds() -> None:
    layer = ring_layer(1, 1, 1, window=5)
    layer.cumulative_length.fill_(8)
    kv_length, offset = layer.get_mask_sizes(1)
    attention_mask = torch.ones(1, 9, dtype=torch.bool)
    attention_mask[0, 6] = False
    mask = position_mask(1, 1, kv_length, 8, offset[0], attention_mask=attention_mask)
    positions = (torch.arange(kv_length) + offset)[0]
    assert sorted(positions[mask[0, 0, 0] == 0].tolist()) == [4, 5, 7, 8]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_mask_has_the_dtype_of_the_model_and_is_finite(dtype: torch.dtype) -> None:
    mask = position_mask(1, 2, 3, dtype=dtype)
    assert mask.dtype == dtype and torch.isfinite(mask).all()
    assert mask.min() == torch.finfo(dtype).min


def test_none_where_everything_is_seen() -> None:
    assert position_mask(1, 2, 2, allow_is_bidirectional_skip=True) is None
    assert (
        position_mask(1, 2, 2, attention_mask=torch.ones(1, 2, dtype=torch.bool), allow_is_bidirectional_skip=True)
        is not None
    )
