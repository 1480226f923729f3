"""Keys and values in 16 bits: what is kept, and what is given out."""

import pytest
import torch

from exportable_cache.cache.storage import FloatStorage, storage_of

from ..support.layers import full_layer, in_step, ring_layer

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.mark.parametrize("kind", HALVES)
def test_rows_are_rounded_to_the_nearest(kind: str) -> None:
    storage, rows = storage_of(torch.float32, kind), torch.randn(2, 3, 5, 16) * 100
    stored = storage.encode(rows, rows[..., :8])
    assert [part.dtype for part in stored] == [HALVES[kind]] * 2 and stored[1].shape[-1] == 8
    keys, values = storage.decode(stored)
    assert keys.dtype == values.dtype == torch.float32
    assert torch.equal(keys, rows.to(HALVES[kind]).float()) and not torch.equal(keys, rows)
    assert all(torch.equal(one, other) for one, other in zip(storage.encode(keys, values), stored, strict=True))


def test_what_float16_cannot_hold_stays_finite() -> None:
    rows = torch.tensor([[1e6, -1e6, 65504.0, 0.0]])
    kept, _ = storage_of(torch.float32, "float16").encode(rows, rows)
    assert kept.tolist() == [[65504.0, -65504.0, 65504.0, 0.0]]
    kept, _ = storage_of(torch.float32, "bfloat16").encode(rows, rows)
    assert kept.isfinite().all() and kept[0, 0] == torch.tensor(1e6).bfloat16()
    # A mistake of the model is not hidden.
    lost = torch.full((1, 2), torch.nan)
    assert storage_of(torch.float32, "float16").encode(lost, lost)[0].isnan().all()


@pytest.mark.parametrize("kind", HALVES)
def test_what_a_model_writes_in_it_is_kept_as_it_is(kind: str) -> None:
    storage = storage_of(HALVES[kind], kind)
    assert storage == FloatStorage(kind) and not storage.rounds


@pytest.mark.parametrize("pieces", [[1] * 12, [3, 1, 9, 1, 1], [20, 1, 1]])
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "functional"])
def test_a_ring_gives_out_what_a_ring_of_rounded_rows_does(pieces: list[int], in_place: bool) -> None:
    half = storage_of(torch.float32, "float16")
    kept, plain = (
        in_step(layer, in_place=in_place)
        for layer in (ring_layer(2, 2, 4, 5, kv_dtype="float16"), ring_layer(2, 2, 4, 5))
    )
    for count in pieces:
        states = [torch.randn(2, 2, count, 4) for _ in range(2)]
        expected = plain.update(*half.decode(half.encode(*states)))
        for found, wanted in zip(kept.update(*states), expected, strict=True):
            assert torch.equal(found, wanted)


def test_the_declaration_counts_every_byte() -> None:
    layer = full_layer(1, 2, 64, 100, value_head_dim=32, kv_dtype="bfloat16")
    assert list(layer.state) == ["keys", "values", "cumulative_length"] and layer.label == "full bfloat16"
    assert layer.nbytes == 2 * 100 * (64 + 32) * 2 + 8
    assert layer.config()["storage"] == {"kind": "bfloat16", "dtype": "float32"}
    # Layers whose keys are all there is of a token have no scale to miss.
    assert full_layer(1, 2, 4, 8, value_head_dim=0, kv_dtype="bfloat16").values.shape[-1] == 0
