"""Keys and values in 8 bits: what is kept, and what is given out."""

import json

import pytest
import torch

from exportable_cache.cache.storage import Int4Storage, Int8Storage, RoundedStorage
from exportable_cache.errors import InputError

from ..support.layers import full_layer, in_step, ring_layer

INT8 = Int8Storage("float32")


def test_rounding_is_off_by_half_a_step_at_most() -> None:
    rows = torch.randn(2, 3, 5, 16) * torch.logspace(-6, 6, 5)[:, None]
    stored, scales = INT8.quantize(rows)
    assert stored.dtype == torch.int8 and scales.dtype == torch.float32 and scales.shape == (2, 3, 5, 1)
    assert ((INT8.dequantize(stored, scales) - rows).abs() <= scales * 0.5001).all()
    assert (stored.abs().amax(-1) == 127).all()


def test_rows_of_zeros_stay_zeros() -> None:
    stored, scales = INT8.quantize(torch.zeros(1, 1, 2, 4))
    assert torch.equal(INT8.dequantize(stored, scales), torch.zeros(1, 1, 2, 4))


@pytest.mark.parametrize("storage", [INT8, Int4Storage("float32")])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_with_what_is_no_number_is_none(storage: RoundedStorage, value: float) -> None:
    """A model that has gone astray shows it, rather than going on with zeros; the rows beside it are as they were."""
    rows = torch.randn(1, 2, 3, 4)
    plain = storage.dequantize(*storage.quantize(rows))
    rows[0, 1, 1, 2] = value
    found = storage.dequantize(*storage.quantize(rows))
    assert not found[0, 1, 1].isfinite().any()
    found[0, 1, 1] = plain[0, 1, 1]
    assert torch.equal(found, plain)


def test_rounding_twice_changes_nothing() -> None:
    once = INT8.dequantize(*INT8.quantize(torch.randn(4, 8)))
    torch.testing.assert_close(INT8.dequantize(*INT8.quantize(once)), once, rtol=1e-6, atol=0)


@pytest.mark.parametrize("pieces", [[1] * 12, [3, 1, 9, 1, 1], [20, 1, 1]])
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "functional"])
def test_a_ring_gives_out_what_a_ring_of_rounded_rows_does(pieces: list[int], in_place: bool) -> None:
    layers = ring_layer(2, 2, 4, 5, kv_dtype="int8"), ring_layer(2, 2, 4, 5)
    quantized, plain = (in_step(layer, in_place=in_place) for layer in layers)
    for count in pieces:
        states = [torch.randn(2, 2, count, 4) for _ in range(2)]
        expected = plain.update(*INT8.decode(INT8.encode(*states)))
        for found, wanted in zip(quantized.update(*states), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)


def test_the_declaration_counts_every_byte() -> None:
    layer = full_layer(1, 2, 64, 100, dtype=torch.bfloat16, kv_dtype="int8")
    assert list(layer.state) == ["keys", "values", "key_scales", "value_scales", "cumulative_length"]
    assert layer.nbytes == 2 * 100 * 2 * (64 + 4) + 8
    assert layer.config() == json.loads(json.dumps(layer.config()))
    assert layer.config()["storage"] == {"kind": "int8", "dtype": "bfloat16"}
    keys, _ = layer.update(*(torch.randn(1, 2, 3, 64, dtype=torch.bfloat16) for _ in range(2)))
    assert keys.dtype == torch.bfloat16
    with pytest.raises(InputError, match="new keys are torch.float32, the cache holds torch.bfloat16"):
        layer.update(torch.randn(1, 2, 3, 64), torch.randn(1, 2, 3, 64))
