"""Where images lie: chunks, positions of three axes against the model's own, rewinding."""

import pytest
import torch

from exportable_cache.errors import InputError
from exportable_cache.session.images import (
    Placed,
    PlacedImages,
    grid_pattern,
    image_ids,
    rope_positions,
    runs,
    shifted,
    whole_chunks,
)

from ..support.multimodal import prompt, tiny_multimodal


def is_image(text: str) -> torch.Tensor:
    """`..##.` is two tokens of text, two of an image, one of text; rows are separated by spaces."""
    return torch.tensor([[letter == "#" for letter in row] for row in text.split()])


def test_runs_and_ids() -> None:
    assert runs([False, True, True, False, True]) == [(1, 3), (4, 5)]
    assert image_ids(is_image("..##.# ######")).tolist() == [[-1, -1, 0, 0, -1, 1], [0] * 6]


@pytest.mark.parametrize(
    "text, longest, sizes",
    [
        ("......", 4, [4, 2]),
        ("..###.", 4, [2, 4]),
        ("###...", 3, [3, 3]),
        ("..##..##.", 7, [6, 3]),
        ("..##..##.", 8, [8, 1]),
        ("..##.. .##...", 3, [1, 3, 2]),
    ],
)
def test_chunks_end_outside_of_images(text: str, longest: int, sizes: list[int]) -> None:
    if text == "..##.. .##...":
        # Rows cross: no cut leaves both images whole.
        with pytest.raises(InputError, match="the image at token 1 of the prompt has 3 tokens"):
            whole_chunks(image_ids(is_image(text)), 2)
    assert whole_chunks(image_ids(is_image(text)), longest) == sizes


def test_an_image_longer_than_a_step_is_refused() -> None:
    with pytest.raises(
        InputError, match="the image at token 2 of the prompt has 4 tokens.* at most 3; .*prefill_chunk=4"
    ):
        whole_chunks(image_ids(is_image("..####..")), 3)


@pytest.mark.parametrize("items, length, start", [(1, 5, 0), (1, 9, 9), (2, 12, 4), (3, 20, 1)])
def test_positions_are_those_of_the_model(items: int, length: int, start: int) -> None:
    model = tiny_multimodal("qwen2_5_vl")
    inputs = prompt(model, items, length, 6, start=start, apart=3)
    ids, kinds = inputs["input_ids"], inputs["mm_token_type_ids"]
    expected, deltas = model.model.get_rope_index(ids, kinds, inputs["image_grid_thw"])
    which = (kinds == 1).long() - 1
    positions, placed = rope_positions(which, (ids.shape[1],), torch.zeros(1, dtype=torch.int64), [grid_pattern(2, 3)])
    assert torch.equal(positions, expected)
    assert torch.equal(placed.deltas(torch.tensor([ids.shape[1]])), deltas[:, 0])
    later, _ = rope_positions(which, (ids.shape[1],), torch.tensor([7]), [grid_pattern(2, 3)])
    assert torch.equal(later, expected + 7)


def test_deltas_follow_the_newest_image() -> None:
    _, placed = rope_positions(is_image("..######.######.").long() - 1, (16,), torch.tensor([0]), [grid_pattern(2, 3)])
    assert placed.rows == ((Placed(2, 8, -3), Placed(9, 15, -6)),)
    placed = shifted(placed, torch.tensor([10]), torch.tensor([-3]))
    assert [int(placed.deltas(torch.tensor([length]))) for length in (10, 18, 24, 25)] == [0, -6, -6, -9]
    assert PlacedImages.from_saved(placed.to_lists(), [100] * len(placed.rows)) == placed
    assert placed.up_to(torch.tensor([18])).rows == ((Placed(12, 18, -6),),)
    with pytest.raises(InputError, match="cannot rewind to 20 tokens, which is inside the image at 19 to 24"):
        placed.up_to(torch.tensor([20]))
