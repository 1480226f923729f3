"""The arithmetic of attention sinks: which positions each query is shown, read from the keys themselves."""

import pytest
import torch

from exportable_cache.cache.layers import CacheLayer
from exportable_cache.errors import InputError

from ..support.layers import in_step, sink_layer
from .test_ring import DIM, HEADS, rows

SINKS, NEWEST = 3, 8
KEPT = SINKS + NEWEST


def expected(query: int) -> list[int]:
    return sorted({*range(min(SINKS, query + 1)), *range(max(0, query - NEWEST + 1), query + 1)})


def seen(layer: CacheLayer, positions: torch.Tensor | None, keys: torch.Tensor, index: int, query: int) -> list[int]:
    """Positions whose keys a causal query is shown, read from the keys themselves."""
    if positions is None:
        positions = torch.arange(keys.shape[2])[None]
    shown = positions[0, index] if positions.dim() == 3 else positions[0]
    return sorted(keys[0, 0, shown <= query, 0].long().tolist())


@pytest.mark.parametrize("slack", [0, 3])
@pytest.mark.parametrize(
    "pieces", [[1] * 30, [2, 1, 1], [4, 1], [10, 1, 1], [11, 1], [12, 1], [40, 1, 1], [5, 6, 1, 20, 2, 1, 8, 1]]
)
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "functional"])
def test_each_query_sees_the_first_tokens_and_its_window(pieces: list[int], slack: int, in_place: bool) -> None:
    layer = sink_layer(1, HEADS, DIM, SINKS, NEWEST, slack=slack)
    layer = in_step(layer, in_place=in_place)
    length = 0
    for piece in pieces:
        positions = layer.slot_positions(piece)
        keys, values = layer.update(rows([length], piece), -rows([length], piece))
        assert torch.equal(keys, -values)
        for index in range(piece):
            assert seen(layer, positions, keys, index, length + index) == expected(length + index)
        length += piece
    assert layer.cumulative_length.tolist() == [length] and layer.capacity == KEPT + slack


def test_rows_of_different_length_are_told_apart() -> None:
    layer = sink_layer(2, HEADS, DIM, SINKS, NEWEST)
    layer.cumulative_length.copy_(torch.tensor([0, 20]))
    single = sink_layer(1, HEADS, DIM, SINKS, NEWEST)
    single.update(rows([0], 20), rows([0], 20))
    layer.keys[1], layer.values[1] = single.keys[0], single.values[0]
    for piece in (1, 5, 1):
        start = layer.cumulative_length.tolist()
        positions = layer.slot_positions(piece)
        keys, _ = layer.update(rows(start, piece), rows(start, piece))
        for row in (0, 1):
            for index in range(piece):
                query = start[row] + index
                shown = positions[row, index] if positions.dim() == 3 else positions[row]
                assert sorted(keys[row, 0, shown <= query, 0].long().tolist()) == expected(query)


@pytest.mark.parametrize("pieces", [[1] * 11, [4, 1, 6]])
def test_a_short_read_is_that_of_a_full_layer(pieces: list[int]) -> None:
    layer = sink_layer(1, HEADS, DIM, SINKS, NEWEST)
    whole, layer = layer, in_step(layer, kv_read_len=KEPT)
    length = 0
    for piece in pieces:
        assert layer.slot_positions(piece) is None
        keys, _ = layer.update(rows([length], piece), rows([length], piece))
        length += piece
        assert keys[0, 0, :length, 0].long().tolist() == list(range(length))
    layer = whole
    positions = layer.slot_positions(1)
    keys, _ = layer.update(rows([length], 1), rows([length], 1))
    assert seen(layer, positions, keys, 0, length) == expected(length)


@pytest.mark.parametrize("slack", [0, 3])
@pytest.mark.parametrize("back", range(1, 6))
@pytest.mark.parametrize("length", [5, 11, 12, 13, 30])
def test_crop_gives_back_the_earlier_state_or_refuses(length: int, back: int, slack: int) -> None:
    layer = sink_layer(1, HEADS, DIM, SINKS, NEWEST, slack=slack)
    layer.update(rows([0], length), rows([0], length))
    if length > layer.capacity and back > slack + 1:
        with pytest.raises(InputError, match="at most"):
            layer.crop(-back)
        return
    layer.crop(-back)
    for piece in (1, 4, 1):
        start = int(layer.cumulative_length)
        positions = layer.slot_positions(piece)
        keys, _ = layer.update(rows([start], piece), rows([start], piece))
        for index in range(piece):
            assert seen(layer, positions, keys, index, start + index) == expected(start + index)


@pytest.mark.parametrize(("sinks", "window", "slack"), [(0, 8, 0), (4, 0, 0), (True, 8, 0), (4, 2.0, 0), (4, 8, -1)])
def test_sizes_are_checked_at_construction(sinks: object, window: object, slack: object) -> None:
    with pytest.raises(InputError, match="must be an int of at least"):
        sink_layer(1, HEADS, DIM, sinks, window, slack=slack)
