"""Images, video and audio in a prompt: the embeddings of each encoder replace its placeholder tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ...common.tensors import TensorSpec
from ...errors import BundleError, InputError
from ...program.inputs.examples import PATCH_INDICES, VIDEO_GRID, shifted_indices
from ...program.inputs.kinds import VIDEO
from ...program.methods import CROSS_MASK, ITEM_STATES, ITEMS_SEEN
from ..images import Placed, PlacedImages, seen_tiles
from .encoder import check_tensors

if TYPE_CHECKING:
    from ...program.methods import ProgramMethod
    from ..rows import Prompt, Steps, TokenRows
    from ..stepper import ProgramStepper

# Some processors give a mask of pixels. A program has no such input, because items of one size have no padding.
_MASK = "pixel_attention_mask"


class ItemStage:
    """Checks and encodes the items of one kind, such as images, for a text decoder.

    Args:
        method: The encoder, such as `encode_image`.
        token: Id of its placeholder token.
        device: Device of the inputs.
    """

    def __init__(self, method: ProgramMethod, token: int, device: torch.device) -> None:
        self.method = method
        self.token = token
        self.device = device
        self.fixed = {} if method.item is None else {name: one.tensor() for name, one in method.item.fixed.items()}
        if method.grid is not None and not self.fixed:
            # Older bundles have no `item`.
            self.fixed = {"image_grid_thw": torch.tensor([method.grid])}
        self.names: tuple[str, ...] = (*method.input_names, *self.fixed)
        if _MASK not in self.names and "pixel_values" in self.names:
            self.names += (_MASK,)

    @property
    def tokens_per_item(self) -> int:
        """Number of embeddings of one item."""
        return int(self.method.outputs[0].shape[0])

    def most_items(self, slots: int | None, methods: Mapping[str, ProgramMethod]) -> int | None:
        """Return the most items that a cache of so many slots holds; None for any number.

        Args:
            slots: Number of slots; None for no limit.
            methods: Methods of the program.
        """
        return None if slots is None else slots // self.tokens_per_item

    def check(self, rows: TokenRows, given: Mapping[str, Any]) -> Mapping[str, list[tuple[torch.Tensor, ...]]]:
        """Check the items of a prompt, and return the encoder's inputs of each item by the method's name.

        Args:
            rows: The prompt, with one placeholder per embedding.
            given: Outputs of the processor by name.

        Raises:
            InputError: If a shape or dtype is wrong, the number of embeddings is not that of the placeholders, or the
                grid, size or mask is not the one that the program was made for.
        """
        if _MASK in given and _MASK not in self.fixed and not bool(given[_MASK].all()):
            raise InputError(f"{_MASK} must be 1 everywhere, got padding; pass images of the exported size")
        items: list[tuple[torch.Tensor, ...]] = []
        if any(name in given for name in self.method.input_names):
            parts = [self._checked(index, given) for index in range(len(self.method.inputs))]
            if len({len(part) for part in parts}) > 1:
                counts = ", ".join(f"{name} of {len(part)}" for name, part in zip(self.method.input_names, parts))
                raise InputError(
                    f"all inputs must have the same number of items, got {counts}; pass the processor's outputs"
                )
            items = list(zip(*parts, strict=True))
        for name, fixed in self.fixed.items():
            if name in given:
                self._check_fixed(name, given[name], fixed, len(items))
            elif items and not bool((fixed == 1).all()):
                raise InputError(f"{self.method.name} takes {name} with {self.names[0]}; pass it too")
        count = int(rows.mask_of(self.token).sum())
        embeddings = self.tokens_per_item * len(items)
        if count != embeddings:
            kind = self.method.name.removeprefix("encode_")
            remedy = "build the prompt with the model's own processor"
            if not items:
                option = "" if kind == VIDEO else f" (--{kind} FILE)"
                remedy = f"pass each {kind}{option}, or leave its placeholders out of the text"
            raise InputError(
                f"the prompt has {count} tokens of id {self.token}, {self.method.name} gives {embeddings} embeddings "
                f"for them; {remedy}"
            )
        return {self.method.name: items} if items else {}

    def extend(self, steps: Steps, prompt: Prompt, stepper: ProgramStepper) -> Steps:
        """Replace the placeholders of a prompt by this encoder's embeddings."""
        if self.method.name not in prompt.items:
            return steps
        embeds = embedded(steps, stepper)
        parts = [stepper.runner.run(self.method.name, *item)[0].clone() for item in prompt.items[self.method.name]]
        is_item = prompt.rows.mask_of(self.token)[..., None]
        return replace(steps, fed=embeds.masked_scatter(is_item, torch.cat(parts).to(embeds.dtype)))

    def _checked(self, index: int, given: Mapping[str, Any]) -> list[torch.Tensor]:
        """Split an input into one tensor per item; the inverse of `modality.joined_items`."""
        spec = self.method.inputs[index]
        shape = [int(size) for size in spec.shape]
        if spec.name not in given:
            raise InputError(f"{self.method.name} takes {', '.join(self.method.input_names)}; pass {spec.name} too")
        tensor = given[spec.name]
        if not isinstance(tensor, torch.Tensor):
            raise InputError(
                f"{spec.name} must be a {spec.dtype} tensor, got a {type(tensor).__name__}; use return_tensors='pt'"
            )
        found = None
        if tensor.dim() == len(shape) + 1:
            tensor = tensor.flatten(0, 1)
        if tensor.dim() == len(shape) and tensor.numel():
            if list(tensor.shape[1:]) == shape[1:] and tensor.shape[0] % shape[0] == 0:
                found = list(tensor.split(shape[0]))
            elif shape[0] == 1 and len(shape) > 1 and list(tensor.shape[2:]) == shape[2:]:
                flat, rest = tensor.flatten(0, 1), tensor.shape[1] % shape[1]
                found = [part[None] for part in flat.split(shape[1])] if not rest else None
            elif len(shape) > 2 and list(tensor.shape[:-1]) == shape[:-1] and tensor.shape[-1] % shape[-1] == 0:
                found = list(tensor.split(shape[-1], dim=-1))
        if found is None:
            rows = "items" if shape[0] == 1 else f"items * {shape[0]}"
            raise InputError(
                f"{spec.name} must have shape [{', '.join([rows, *map(str, shape[1:])])}], the size of the export, got "
                f"{list(tensor.shape)}"
            )
        if tensor.dtype != getattr(torch, spec.dtype) or tensor.device != self.device:
            raise InputError(
                f"{spec.name} must be torch.{spec.dtype} on {self.device}, got {tensor.dtype} on {tensor.device}"
            )
        return [part.contiguous() for part in found]

    def _check_fixed(self, name: str, value: Any, fixed: torch.Tensor, items: int) -> None:
        tensor = torch.as_tensor(value).cpu()
        if name == VIDEO_GRID and self.method.item is not None and self.method.item.apart:
            frames = torch.cat([torch.ones_like(tensor[:, :1]), tensor[:, 1:]], dim=1)
            tensor = frames.repeat_interleave(tensor[:, 0], dim=0)
        wanted = fixed.flatten().repeat(items)
        if name in PATCH_INDICES:
            patches = math.prod(int(size) for size in self.method.inputs[0].shape[:2])
            wanted = shifted_indices(fixed, items, patches).flatten() if items else wanted
        if tensor.numel() == wanted.numel() and bool((tensor.flatten() == wanted).all()):
            return
        each = tensor.reshape(-1, fixed.shape[-1]) if tensor.numel() % fixed.shape[-1] == 0 else tensor
        row = fixed.reshape(-1, fixed.shape[-1])
        other = next((one for one in each if not bool((row == one).all(-1).any())), each)
        raise InputError(
            f"{name} must be {_short(row if len(row) > 1 else row[0])} for each item of {self.method.name}, got "
            f"{_short(other)}; resize items before the processor, or make the session, or export, with another "
            "image_size or example"
        )


def _short(tensor: torch.Tensor) -> str:
    if tensor.numel() <= 12:
        return str(tensor.tolist())
    return f"values of shape {list(tensor.shape)} with sum {tensor.sum().item():g}"


def embedded(steps: Steps, stepper: ProgramStepper) -> torch.Tensor:
    """Return the prompt as embeddings [batch, length, hidden_size], and embed it if it is still ids."""
    if not steps.are_ids:
        return steps.fed
    longest = stepper.runner.methods["embed"].max_length
    parts = [stepper.runner.run("embed", part.contiguous())[0].clone() for part in steps.fed.split(longest, dim=1)]
    return torch.cat(parts, dim=1)


def recorded_placeholders(methods: Iterable[ProgramMethod], config: Mapping[str, Any]) -> dict[str, int]:
    """Return the placeholder token of each method from its item, or else from the model's config."""
    found = {}
    for method in methods:
        if method.name.startswith("encode_"):
            kind = method.name.removeprefix("encode_")
            # The config of Llava uses the older name.
            token = config.get(f"{kind}_token_id", config.get(f"{kind}_token_index"))
            if method.item is not None:
                token = method.item.token_id
            if not isinstance(token, int):
                raise BundleError(
                    f"the bundle has a method {method.name!r}, but its config has no {kind}_token_id; export the model "
                    "again"
                )
            found[method.name] = token
    return found


class CrossItemStage(ItemStage):
    """Checks and encodes the images that cross-attention layers attend to; each has one placeholder.

    Args:
        method: The encoder, `encode_image`.
        token: Id of its placeholder token.
        device: Device of the inputs.
    """

    def __init__(self, method: ProgramMethod, token: int, device: torch.device) -> None:
        super().__init__(method, token, device)
        self.names += (CROSS_MASK,)
        self.tiles = method.item.tiles if method.item is not None else 0

    @property
    def tokens_per_item(self) -> int:
        """Number of placeholders of one item."""
        return 1

    def most_items(self, slots: int | None, methods: Mapping[str, ProgramMethod]) -> int:
        """See `ItemStage.most_items`. Images take no slots of the text."""
        return _states_spec(methods).sizes({"batch": 1})[1] // int(self.method.outputs[0].shape[0])

    def check(self, rows: TokenRows, given: Mapping[str, Any]) -> Mapping[str, list[tuple[torch.Tensor, ...]]]:
        """Check the images of a prompt, and return the encoder's inputs of each, followed by its tiles, bool [tiles].

        Args:
            rows: The prompt.
            given: Outputs of the processor by name.

        Raises:
            InputError: See `ItemStage.check`; or if there are several rows, or the mask is not the processor's.
        """
        found = super().check(rows, {name: given[name] for name in given if name != CROSS_MASK})
        if not found:
            return found
        if rows.ids.shape[0] != 1:
            raise InputError(
                f"batch_size must be 1 for cross-attention to images, got a prompt of {rows.ids.shape[0]} rows; use "
                "batch_size=1"
            )
        (items,) = found.values()
        tiles = self._tiles(rows, len(items), given.get(CROSS_MASK))
        return {self.method.name: [(*item, real) for item, real in zip(items, tiles, strict=True)]}

    def extend(self, steps: Steps, prompt: Prompt, stepper: ProgramStepper) -> Steps:
        """Add the states of all images to the first step, and to each step the images that its tokens attend to.

        Raises:
            InputError: If there are more images than the cache keeps.
        """
        if self.method.name not in prompt.items:
            return steps
        items, state = prompt.items[self.method.name], stepper.state
        shape = _states_spec(stepper.runner.methods).sizes({"batch": 1})
        slots = int(self.method.outputs[0].shape[0])
        most, held = self.most_items(None, stepper.runner.methods), len(state.images.rows[0])
        if held + len(items) > most:
            raise InputError(
                f"the session holds {held} images, the prompt has {len(items)}, and the cache keeps {most}; reset(), "
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
        starts = prompt.rows.mask_of(self.token)[0].nonzero()[:, 0].tolist()
        placed = tuple(Placed(start, start + 1) for start in starts)
        first, length = int(state.length[0]), steps.fed.shape[1]
        added = tuple(Placed(one.start + first, one.end + first) for one in placed)
        seen = seen_tiles(state.images.rows[0] + added, tiles[0], range(first, first + length))
        if not held:
            # As in transformers, tokens before the first image attend to all images of the prompt, padding included.
            seen[: len(items) * self.tiles, : starts[0]] = -1
        return replace(
            steps,
            extra={**steps.extra, ITEMS_SEEN: seen[None].to(self.device)},
            first={ITEM_STATES: states},
            placed=PlacedImages((placed,)),
        )

    def check_given(self, encoded: Sequence[torch.Tensor], methods: Mapping[str, ProgramMethod]) -> None:
        """Check the encoder output of a file.

        Args:
            encoded: States and tiles.
            methods: Methods of the program.

        Raises:
            ValueError: If this encoder cannot have computed it.
        """
        states = replace(_states_spec(methods), dtype=self.method.outputs[0].dtype)
        most = states.sizes({"batch": 1})[1] // int(self.method.outputs[0].shape[0])
        check_tensors(encoded, (states, TensorSpec("tiles", "int64", (1, most, self.tiles))), {"batch": 1})

    def _tiles(self, rows: TokenRows, items: int, mask: Any) -> torch.Tensor:
        """Check the mask of a processor, and return True for the real tiles of each item, bool [items, tiles]."""
        expected = [1, rows.ids.shape[1], items, self.tiles]
        if not isinstance(mask, torch.Tensor) or list(mask.shape) != expected:
            found = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise InputError(
                f"{CROSS_MASK} must have shape [batch, length, items, tiles] = {expected}, got {found}; pass the mask "
                "that the processor gave with the prompt"
            )
        mask = mask[0].cpu() != 0
        tiles = mask.any(dim=0)
        starts = rows.mask_of(self.token)[0].nonzero()[:, 0].tolist()
        rule = seen_tiles([Placed(one, one + 1) for one in starts], tiles.to(torch.int64), range(mask.shape[0]))
        if not torch.equal(rule.bool().T, mask.flatten(1)):
            raise InputError(
                f"{CROSS_MASK} must let each token attend to the nearest run of images before it, as a processor's "
                "mask does; pass the mask that the processor gave with the prompt"
            )
        return tiles


def _states_spec(methods: Mapping[str, ProgramMethod]) -> TensorSpec:
    """Return the specification of the input for the states of all images."""
    return next(spec for method in methods.values() for spec in method.inputs if spec.name == ITEM_STATES)
