"""Keys and values in 4 bits: how they lie in bytes, and what is given out."""

import pytest
import torch

from exportable_cache.cache.layers import CacheLayer, RowSizes
from exportable_cache.cache.policies import CrossPolicy, FullPolicy, RingPolicy, SinkPolicy
from exportable_cache.cache.spec import KV_DTYPES
from exportable_cache.cache.storage import FloatStorage, Int4Storage, Storage
from exportable_cache.errors import InputError

from ..support.layers import full_layer, in_step, indexed_layer, ring_layer, sink_layer

INT4 = Int4Storage("float32")


def test_two_numbers_lie_in_a_byte_and_come_out_again() -> None:
    rows = torch.arange(-7.0, 8.0)
    pairs = torch.cartesian_prod(rows, rows)
    stored, scales = INT4.quantize(pairs)
    assert stored.dtype == torch.uint8 and stored.shape == (225, 1) and scales.shape == (225, 1)
    largest = pairs.abs().amax(-1, keepdim=True)
    exact = (largest == 7).expand_as(pairs)
    # Where the largest is 7, the scale is 1 and every number its own.
    assert torch.equal(INT4.dequantize(stored, scales)[exact], pairs[exact])
    assert INT4.pack(torch.tensor([[-7.0, 7.0, 0.0, 3.0]])).tolist() == [[1 + 16 * 8, 15 + 16 * 11]]


def test_rounding_is_off_by_half_a_step_at_most() -> None:
    rows = torch.randn(2, 3, 5, 16) * torch.logspace(-6, 6, 5)[:, None]
    stored, scales = INT4.quantize(rows)
    assert stored.shape == (2, 3, 5, 8) and scales.dtype == torch.float32
    assert ((INT4.dequantize(stored, scales) - rows).abs() <= scales * 0.5001).all()
    # Written out row by row, in Python's own arithmetic.
    row = rows[1, 2, 3].tolist()
    step = max(map(abs, row)) / 7
    expected = torch.tensor([round(value / step) * step for value in row])
    torch.testing.assert_close(INT4.dequantize(stored, scales)[1, 2, 3], expected, rtol=1e-5, atol=0)


def test_rows_of_zeros_and_slots_never_written_are_zeros() -> None:
    assert not INT4.dequantize(*INT4.quantize(torch.zeros(1, 1, 2, 4))).any()
    keys, values = full_layer(1, 2, 4, 8, kv_dtype="int4").read(8)
    assert keys.shape == (1, 2, 8, 4) and not keys.any() and not values.any()


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "functional"])
@pytest.mark.parametrize("pieces", [[1] * 12, [3, 1, 9, 1, 1], [20, 1, 1]])
@pytest.mark.parametrize("policy", [RingPolicy(5), RingPolicy(5, 2), SinkPolicy(2, 5), FullPolicy(24)], ids=repr)
def test_every_policy_gives_out_what_it_does_of_rounded_rows(policy, pieces: list[int], in_place: bool) -> None:
    sizes = RowSizes(2, 2, 4, 6)
    kept, plain = (
        in_step(CacheLayer(policy, storage, sizes), in_place=in_place) for storage in (INT4, FloatStorage("float32"))
    )
    for count in pieces:
        states = torch.randn(2, 2, count, 4), torch.randn(2, 2, count, 6)
        expected = plain.update(*INT4.decode(INT4.encode(*states)))
        for found, wanted in zip(kept.update(*states), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)


def test_an_indexer_keeps_its_own_keys_as_they_are() -> None:
    kept = indexed_layer(1, 2, 4, 8, index_head_dim=3, kv_dtype="int4")
    assert kept.label == "full int4 + indexer"
    rows = torch.randn(1, 2, 3, 4)
    kept.update(rows, rows)
    indexer_keys = torch.randn(1, 3, 3)
    assert torch.equal(kept.update_indexer(indexer_keys)[:, :3], indexer_keys)


def test_the_declaration_counts_every_byte() -> None:
    layer = full_layer(1, 2, 64, 100, value_head_dim=32, kv_dtype="int4", dtype=torch.bfloat16)
    assert layer.state["keys"].dims == ("batch_size", "num_heads", "capacity", "packed_head_dim")
    assert layer.nbytes == 2 * 100 * (64 // 2 + 32 // 2 + 2 * 4) + 8
    keys, values = layer.update(
        torch.randn(1, 2, 3, 64, dtype=torch.bfloat16), torch.randn(1, 2, 3, 32, dtype=torch.bfloat16)
    )
    assert keys.dtype == values.dtype == torch.bfloat16 and keys.shape[-1] == 64 and values.shape[-1] == 32


@pytest.mark.parametrize("make", [full_layer, ring_layer, lambda *sizes, **options: sink_layer(*sizes, 4, **options)])
def test_what_does_not_go_in_pairs_is_refused(make) -> None:
    with pytest.raises(InputError, match="head_dim must be even .*got 5; pass kv_dtype='int8'"):
        make(1, 2, 5, 8, kv_dtype="int4")
    with pytest.raises(InputError, match="value_head_dim must be at least 1"):
        make(1, 2, 4, 8, value_head_dim=0, kv_dtype="int4")


def test_new_states_are_compared_with_the_size_of_a_head() -> None:
    layer = full_layer(1, 2, 4, 8, kv_dtype="int4")
    with pytest.raises(InputError, match=r"= \[1, 2, 1, 2\], the cache was allocated for \[1, 2, 1, 4\]"):
        layer.update(torch.randn(1, 2, 1, 2), torch.randn(1, 2, 1, 2))


def test_a_cross_policy_needs_no_storage_of_its_own() -> None:
    assert CacheLayer(CrossPolicy(6), INT4, RowSizes(1, 2, 4)).keys.shape == (1, 2, 6, 2)


def test_what_a_spec_may_name_are_the_storages_that_round() -> None:
    """The spec lists them without importing torch."""
    assert set(KV_DTYPES) == {kind for kind, storage in Storage.kinds.items() if storage.rounds}
