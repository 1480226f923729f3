"""Keys and values in 8 bits: what is kept, and what is given out."""

import json

import pytest
import torch

from exportable_cache.cache.layers import QuantizedFullLayer, QuantizedRingLayer, RingLayer
from exportable_cache.cache.layers.quantized import dequantize_rows, quantize_rows
from exportable_cache.errors import InputError


def test_rounding_is_off_by_half_a_step_at_most() -> None:
    rows = torch.randn(2, 3, 5, 16) * torch.logspace(-6, 6, 5)[:, None]
    stored, scales = quantize_rows(rows)
    assert stored.dtype == torch.int8 and scales.dtype == torch.float32 and scales.shape == (2, 3, 5, 1)
    assert ((dequantize_rows(stored, scales, torch.float32) - rows).abs() <= scales * 0.5001).all()
    assert (stored.abs().amax(-1) == 127).all()


def test_rows_of_zeros_stay_zeros() -> None:
    stored, scales = quantize_rows(torch.zeros(1, 1, 2, 4))
    assert torch.equal(dequantize_rows(stored, scales, torch.float32), torch.zeros(1, 1, 2, 4))


def test_rounding_twice_changes_nothing() -> None:
    once = dequantize_rows(*quantize_rows(torch.randn(4, 8)), torch.float32)
    torch.testing.assert_close(dequantize_rows(*quantize_rows(once), torch.float32), once, rtol=1e-6, atol=0)


@pytest.mark.parametrize("pieces", [[1] * 12, [3, 1, 9, 1, 1], [20, 1, 1]])
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "functional"])
def test_a_ring_gives_out_what_a_ring_of_rounded_rows_does(pieces: list[int], in_place: bool) -> None:
    quantized, plain = QuantizedRingLayer(2, 2, 4, window=5), RingLayer(2, 2, 4, window=5)
    quantized.in_place = plain.in_place = in_place
    for count in pieces:
        states = [torch.randn(2, 2, count, 4) for _ in range(2)]
        expected = plain.update(*(dequantize_rows(*quantize_rows(rows), rows.dtype) for rows in states))
        for found, wanted in zip(quantized.update(*states), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)


def test_the_declaration_counts_every_byte() -> None:
    layer = QuantizedFullLayer(1, 2, 64, 100, dtype=torch.bfloat16)
    assert list(layer.state) == ["keys", "key_scales", "values", "value_scales", "cumulative_length"]
    assert layer.nbytes == 2 * 100 * 2 * (64 + 4) + 8
    assert layer.config() == json.loads(json.dumps(layer.config())) == {"capacity": 100, "dtype": "bfloat16"}
    keys, _ = layer.update(*(torch.randn(1, 2, 3, 64, dtype=torch.bfloat16) for _ in range(2)))
    assert keys.dtype == torch.bfloat16
    with pytest.raises(InputError, match="new keys are torch.float32, the cache holds torch.bfloat16"):
        layer.update(torch.randn(1, 2, 3, 64), torch.randn(1, 2, 3, 64))
