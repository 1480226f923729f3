"""The ring's arithmetic against a plain list of everything that was ever written."""

import pytest
import torch

from exportable_cache.cache.layers import CacheLayer
from exportable_cache.errors import InputError

from ..support.layers import in_step, ring_layer

HEADS, DIM = 2, 4


def rows(first: list[int], count: int) -> torch.Tensor:
    """States [batch, HEADS, count, DIM] whose every element is the token's position."""
    positions = torch.tensor(first)[:, None] + torch.arange(count)
    return positions[:, None, :, None].expand(-1, HEADS, -1, DIM).float().clone()


def visible(layer: CacheLayer, positions: torch.Tensor, keys: torch.Tensor, row: int, query: int) -> list[int]:
    """What a causal query at position `query` sees through the window, read from the keys themselves."""
    seen = (positions[row] <= query) & (positions[row] > query - layer.policy.window)
    return sorted(keys[row, 0, seen, 0].long().tolist())


@pytest.mark.parametrize("slack", [0, 3])
@pytest.mark.parametrize("start", [[0], [0, 5, 13]], ids=["one row", "ragged rows"])
@pytest.mark.parametrize("pieces", [[1] * 30, [3, 1, 1], [7, 1], [8, 1], [9, 1], [40, 1, 1], [5, 6, 1, 20, 2, 1, 8, 1]])
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "functional"])
def test_ring_shows_each_query_exactly_its_window(
    pieces: list[int], start: list[int], slack: int, in_place: bool
) -> None:
    layer = ring_layer(len(start), HEADS, DIM, window=8, slack=slack)
    layer = in_step(layer, in_place=in_place)
    length = [0] * len(start)
    # Rows of different length are made by feeding each its own lead, which leaves the others' cells unread.
    for row, lead in enumerate(start):
        if lead:
            single = ring_layer(1, HEADS, DIM, window=8, slack=slack)
            single.update(rows([0], lead), -rows([0], lead))
            for name, tensor in layer.named_state():
                tensor[row] = getattr(single, name)[0]
            length[row] = lead
    for piece in pieces:
        positions = layer.slot_positions(piece)
        keys, values = layer.update(rows(length, piece), -rows(length, piece))
        assert keys.shape[2] == positions.shape[1]
        assert torch.equal(keys, -values)
        for row in range(len(start)):
            for query in range(length[row], length[row] + piece):
                assert visible(layer, positions, keys, row, query) == list(range(max(0, query - 7), query + 1))
            length[row] += piece
        assert layer.cumulative_length.tolist() == length


def test_empty_slots_lie_beyond_every_query() -> None:
    layer = ring_layer(1, HEADS, DIM, window=8)
    assert layer.slot_positions(1)[0].tolist() == [0] + [1] * 7
    assert layer.slot_positions(3)[0].tolist() == [3] * 8 + [0, 1, 2]


def test_one_token_is_written_to_one_slot_and_the_buffer_stays_where_it_is() -> None:
    layer = ring_layer(1, HEADS, DIM, window=8)
    layer.update(rows([0], 11), rows([0], 11))
    address, before = layer.keys.data_ptr(), layer.keys.clone()
    keys, _ = layer.update(rows([11], 1), rows([11], 1))
    changed = (layer.keys != before).any(dim=-1).any(dim=1)[0]
    assert changed.nonzero().flatten().tolist() == [11 % 8]
    assert keys.data_ptr() == layer.keys.data_ptr() == address


def test_memory_does_not_depend_on_how_much_was_seen() -> None:
    layer = ring_layer(1, HEADS, DIM, window=8)
    layer.update(rows([0], 1000), rows([0], 1000))
    assert layer.nbytes == 2 * 8 * HEADS * DIM * 4 + 8


@pytest.mark.parametrize("slack", [0, 3])
@pytest.mark.parametrize("seen", [5, 8, 9, 20])
@pytest.mark.parametrize("back", range(1, 7))
def test_crop_gives_back_the_earlier_state_or_refuses(seen: int, back: int, slack: int) -> None:
    layer = ring_layer(1, HEADS, DIM, window=8, slack=slack)
    layer.update(rows([0], seen), rows([0], seen))
    if back > seen or (seen > layer.capacity and back > slack + 1):
        with pytest.raises(InputError, match="at most"):
            layer.crop(-back)
        assert layer.cumulative_length.item() == seen
        return
    layer.crop(-back)
    length = seen - back
    for piece in (1, 3, 1):
        positions = layer.slot_positions(piece)
        keys, _ = layer.update(rows([length], piece), rows([length], piece))
        for query in range(length, length + piece):
            assert visible(layer, positions, keys, 0, query) == list(range(max(0, query - 7), query + 1))
        length += piece


def test_crop_remembers_what_earlier_crops_overwrote() -> None:
    layer = ring_layer(1, HEADS, DIM, window=8)
    layer.update(rows([0], 20), rows([0], 20))
    layer.crop(-1)
    with pytest.raises(InputError, match="at most 0"):
        layer.crop(-1)


def test_crop_of_a_ring_rebuilt_from_tensors_is_refused() -> None:
    layer = ring_layer(1, HEADS, DIM, window=8)
    layer.update(rows([0], 9), rows([0], 9))
    rebuilt = CacheLayer.from_state(layer.config(), dict(layer.named_state()))
    with pytest.raises(InputError, match="rebuilt"):
        rebuilt.crop(-1)


@pytest.mark.parametrize(("window", "slack"), [(0, 0), (-3, 0), (2.0, 0), (True, 0), (8, -1)])
def test_sizes_are_checked_at_construction(window: object, slack: object) -> None:
    with pytest.raises(InputError, match="must be an int of at least"):
        ring_layer(1, HEADS, DIM, window=window, slack=slack)
