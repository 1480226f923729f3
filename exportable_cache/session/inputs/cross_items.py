"""Pictures in a prompt that layers of cross-attention see: which of them each token sees, and where they are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ...common.method_io import TensorSpec
from ...errors import InputError
from ...program.items import CROSS_MASK, ITEM_STATES, ITEMS_SEEN
from .encoder import check_tensors
from .image import Placed, PlacedImages
from .items import ItemStage, placeholders

if TYPE_CHECKING:
    from ...program.methods import ProgramMethod
    from ..program_stepper import ProgramStepper
    from ..rows import TokenRows
    from ..sequence_state import SequenceState
    from .stages import Prompt, Steps


class CrossItemStage(ItemStage):
    """The pictures of a model with layers of cross-attention; each stands behind one placeholder.

    Args:
        method: The encoder, `encode_image`.
        token: Id of its placeholder.
        device: Where inputs are expected.
    """

    def __init__(self, method: ProgramMethod, token: int, device: torch.device) -> None:
        super().__init__(method, token, device)
        self.names += (CROSS_MASK,)
        self.tiles = method.item.tiles if method.item is not None else 0

    @property
    def tokens_per_item(self) -> int:
        """Placeholders of one item."""
        return 1

    def check(self, rows: TokenRows, given: Mapping[str, Any]) -> Mapping[str, list[tuple[torch.Tensor, ...]]]:
        """What the encoder takes, by item, and behind it which tiles of the item are real, bool [tiles].

        Raises:
            InputError: See `ItemStage.check`; or if there are several rows, or the mask is not the processor's.
        """
        found = super().check(rows, {name: given[name] for name in given if name != CROSS_MASK})
        if not found:
            return found
        if rows.ids.shape[0] != 1:
            raise InputError(
                f"the prompt has {rows.ids.shape[0]} rows, and layers of cross-attention see pictures in sessions of "
                "one; use batch_size=1"
            )
        (items,) = found.values()
        tiles = self._tiles(rows, len(items), given.get(CROSS_MASK))
        return {self.method.name: [(*item, mine) for item, mine in zip(items, tiles, strict=True)]}

    def extend(self, steps: Steps, prompt: Prompt, stepper: ProgramStepper) -> Steps:
        """The steps, the first with the states of all pictures, and each with what its tokens see.

        Raises:
            InputError: If there are more pictures than the cache keeps.
        """
        if self.method.name not in prompt.items:
            return steps
        items, state = prompt.items[self.method.name], stepper.state
        shape = _states_spec(stepper.runner.methods).sizes({"batch": 1})
        slots = int(self.method.outputs[0].shape[0])
        most, held = shape[1] // slots, len(state.images.rows[0])
        if held + len(items) > most:
            raise InputError(
                f"the session holds {held} pictures, the prompt has {len(items)}, and the cache keeps {most}; reset(), "
                f"or allocate, or export, with max_encoder_len={slots * (held + len(items))}"
            )
        if state.encoded:
            states, tiles = (tensor.clone() for tensor in state.encoded)
        else:
            dtype = getattr(torch, self.method.outputs[0].dtype)
            states = torch.zeros(shape, dtype=dtype, device=self.device)
            tiles = torch.zeros(1, most, self.tiles, dtype=torch.int64)
        for index, (*item, real) in enumerate(items, start=held):
            states[0, index * slots : (index + 1) * slots] = stepper.runner.run(self.method.name, *item)[0]
            tiles[0, index] = real
        stepper.state = state = replace(state, encoded=(states, tiles))
        starts = placeholders(prompt.rows, self.token)[0].nonzero()[:, 0].tolist()
        placed = tuple(Placed(start, start + 1) for start in starts)
        first, length = int(state.length[0]), steps.fed.shape[1]
        behind = tuple(Placed(one.start + first, one.end + first) for one in placed)
        seen = _seen(state.images.rows[0] + behind, tiles[0], range(first, first + length))
        if not held:
            # As upstream has it: attention of what comes before the first sees all of the prompt, its padding too.
            seen[: len(items) * self.tiles, : starts[0]] = -1
        return replace(
            steps,
            further={**steps.further, ITEMS_SEEN: seen[None].to(self.device)},
            first={ITEM_STATES: states},
            placed=PlacedImages((placed,)),
        )

    def check_given(self, encoded: Sequence[torch.Tensor], methods: Mapping[str, ProgramMethod]) -> None:
        """Refuse tensors of a file that this encoder cannot have given.

        Raises:
            ValueError: Then.
        """
        states = replace(_states_spec(methods), dtype=self.method.outputs[0].dtype)
        most = states.sizes({"batch": 1})[1] // int(self.method.outputs[0].shape[0])
        check_tensors(encoded, (states, TensorSpec("tiles", "int64", (1, most, self.tiles))), {"batch": 1})

    def _tiles(self, rows: TokenRows, items: int, mask: Any) -> torch.Tensor:
        """Which tiles of each item are real, bool [items, tiles], of the mask that a processor gives."""
        expected = [1, rows.ids.shape[1], items, self.tiles]
        if not isinstance(mask, torch.Tensor) or list(mask.shape) != expected:
            found = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise InputError(
                f"{CROSS_MASK} is {found}; it must be [batch, length, items, tiles] = {expected}: pass what the "
                "processor gave for the prompt"
            )
        mask = mask[0].cpu() != 0
        tiles = mask.any(dim=0)
        starts = placeholders(rows, self.token)[0].nonzero()[:, 0].tolist()
        rule = _seen([Placed(one, one + 1) for one in starts], tiles.to(torch.int64), range(mask.shape[0]))
        if not torch.equal(rule.bool().T, mask.flatten(1)):
            raise InputError(
                f"{CROSS_MASK} is not that of a processor, where each token sees the pictures that stand together "
                "nearest before it; pass what the processor gave for the prompt"
            )
        return tiles


def _states_spec(methods: Mapping[str, ProgramMethod]) -> TensorSpec:
    """Return the input of the states of all pictures."""
    return next(spec for method in methods.values() for spec in method.inputs if spec.name == ITEM_STATES)


def seen_by_next(state: SequenceState, spec_size: int, length: int) -> torch.Tensor:
    """What the next `length` tokens of text see, int64 [batch, spec_size, length], spec_size being items * tiles."""
    batch_size = len(state.length)
    if not state.encoded:
        return torch.zeros(batch_size, spec_size, length, dtype=torch.int64)
    tiles = state.encoded[1]
    return torch.stack(
        [
            _seen(images, of_row, range(first, first + length))
            for images, of_row, first in zip(state.images.rows, tiles.cpu(), state.length.tolist(), strict=True)
        ]
    )


def _seen(images: Sequence[Placed], tiles: torch.Tensor, positions: range) -> torch.Tensor:
    """1 where a token sees a tile, int64 [items * tiles, length]: those of the pictures that stand together, nearest at
    or before it (`get_cross_attention_token_mask` in mllama/processing_mllama.py, transformers 5.23).

    Args:
        images: Held, oldest first; the place of each among `tiles` is its number.
        tiles: int64 [items, tiles].
        positions: Of the tokens.
    """
    seen = torch.zeros(*tiles.shape, len(positions), dtype=torch.int64)
    first = 0
    for index, image in enumerate(images):
        if index and images[index - 1].end != image.start:
            first = index
        # The next one ends this, or adds to it.
        for column in range(max(image.start - positions.start, 0), len(positions)):
            seen[:, :, column] = 0
            seen[first : index + 1, :, column] = tiles[first : index + 1]
    return seen.flatten(0, 1)
