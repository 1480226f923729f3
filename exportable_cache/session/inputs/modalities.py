"""Images and sound in a session: their embeddings take the places of placeholder tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...backends.base import Runner
from ...errors import BundleError, InputError
from ...program.entry_points import chunk_sizes
from ...program.inputs.multimodal import IMAGE_IDS, POSITIONS
from .image_places import PlacedImages, image_ids, placed_images, rope_positions, whole_chunks

# What processors give beside the main input, and is read or checked here.
_MASKS = ("attention_mask", "pixel_attention_mask")
_KINDS = ("token_type_ids", "mm_token_type_ids")
_GRID = "image_grid_thw"


@dataclass(frozen=True)
class EmbeddedPrompt:
    """A prompt as the steps take it.

    Attributes:
        embeds: [batch, length, hidden_size].
        sizes: Tokens of each step.
        further: What steps take besides, by name of the input, [..., length].
        placed: Where its images are, counted from its first token.
    """

    embeds: torch.Tensor
    sizes: list[int]
    further: dict[str, torch.Tensor] = field(default_factory=dict)
    placed: PlacedImages | None = None


class SessionModalities:
    """Turns a prompt and what a processor gave beside it into embeddings.

    Args:
        runner: Of a program that has the methods.
        placeholders: Token id by name of the method, such as `{"encode_image": 32000}`.
        device: Where inputs are expected.
    """

    def __init__(self, runner: Runner, placeholders: Mapping[str, int], device: torch.device) -> None:
        self.runner = runner
        self.device = device
        self.placeholders = dict(placeholders)
        self.by_input = {runner.methods[name].inputs[0].name: name for name in placeholders}
        further = {name for method in runner.methods.values() if method.is_step for name in method.input_names}
        self.stays_whole = IMAGE_IDS.name in further
        self.has_axes = POSITIONS.name in further

    def check(self, input_ids: torch.Tensor, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """What each encoder is to be given, [items, ...] by name of its method.

        Args:
            input_ids: int64 [batch, length], with one placeholder per embedding.
            inputs: What the processor gave beside them, such as pixel_values.

        Raises:
            InputError: If an input is unknown, of another shape, dtype or grid, or gives another number of embeddings than
                there are placeholders, or an image is longer than a step. Nothing has changed then.
        """
        items = {}
        for name, tensor in inputs.items():
            if name in _MASKS:
                if not bool(tensor.all()):
                    raise InputError(
                        f"{name} has padding; pass one prompt without padding, and images of the exported size"
                    )
            elif name in _KINDS:
                if not torch.equal(tensor != 0, self._is_item(input_ids)):
                    raise InputError(
                        f"{name} marks other tokens than the prompt's placeholders; pass what the processor gave"
                    )
            elif name == _GRID and self.has_axes:
                self._check_grid(tensor)
            elif name in self.by_input:
                items[self.by_input[name]] = self._checked_items(name, self.by_input[name], tensor)
            else:
                raise InputError(
                    f"prefill takes {', '.join(self.by_input)} beside input_ids, got {name!r}; leave it out"
                )
        for method, token in self.placeholders.items():
            places = int((input_ids == token).sum())
            given = self._tokens(method) * (items[method].shape[0] if method in items else 0)
            if places != given:
                raise InputError(
                    f"the prompt has {places} tokens of id {token}, {method} gives {given} embeddings for them; "
                    "build the prompt with the model's own processor"
                )
        if self.stays_whole:
            whole_chunks(image_ids(self._is_item(input_ids)), self._longest())
        return items

    def embed(self, input_ids: torch.Tensor, items: Mapping[str, torch.Tensor], first: torch.Tensor) -> EmbeddedPrompt:
        """The prompt with the embeddings of its images or sound.

        Args:
            input_ids: int64 [batch, length].
            items: What `check` gave for it.
            first: int64 [batch], rotary position of each row's first token.
        """
        longest = self.runner.methods["embed"].max_length
        parts = [self.runner.run("embed", part.contiguous())[0] for part in input_ids.split(longest, dim=1)]
        embeds = torch.cat(parts, dim=1)
        for method, tensors in items.items():
            found = torch.cat([self.runner.run(method, self._item(method, item))[0] for item in tensors.split(1)])
            places = input_ids == self.placeholders[method]
            embeds = embeds.masked_scatter(places[..., None], found.to(embeds.dtype))
        is_item = self._is_item(input_ids)
        if self.has_axes:
            positions, placed = rope_positions(is_item, first, self._size())
            return EmbeddedPrompt(
                embeds, self._sizes(input_ids.shape[1]), {POSITIONS.name: positions.to(self.device)}, placed
            )
        if self.stays_whole:
            ids = image_ids(is_item)
            sizes = whole_chunks(ids, self._longest())
            return EmbeddedPrompt(embeds, sizes, {IMAGE_IDS.name: ids.to(self.device)}, placed_images(ids))
        return EmbeddedPrompt(embeds, self._sizes(input_ids.shape[1]))

    def _sizes(self, length: int) -> list[int]:
        return chunk_sizes(
            {name: method for name, method in self.runner.methods.items() if not method.takes_ids}, length
        )

    def _longest(self) -> int:
        return max(
            method.max_length for method in self.runner.methods.values() if method.is_step and not method.takes_ids
        )

    def _is_item(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.stack([input_ids == token for token in self.placeholders.values()]).any(dim=0)

    def _tokens(self, method: str) -> int:
        return self.runner.methods[method].outputs[0].shape[0]

    def _grid(self) -> tuple[str, tuple[int, int, int]]:
        return next((name, method.grid) for name, method in self.runner.methods.items() if method.grid is not None)

    def _size(self) -> tuple[int, int]:
        """Rows and columns of an image's tokens: a square of patches goes into each."""
        name, (time, height, width) = self._grid()
        merged = math.isqrt(time * height * width // self._tokens(name))
        return height // merged, width // merged

    def _check_grid(self, tensor: Any) -> None:
        name, grid = self._grid()
        grids = tensor.tolist() if isinstance(tensor, torch.Tensor) else tensor
        other = next((given for given in grids if tuple(given) != grid), None)
        if other is not None:
            raise InputError(
                f"{_GRID} has {list(other)}, {name} was made for {list(grid)} patches (time, height, width): resize images to "
                "that size before the processor, or make the session, or export, with another image_size"
            )

    def _item(self, method: str, item: torch.Tensor) -> torch.Tensor:
        return item.reshape(self.runner.methods[method].inputs[0].shape).contiguous()

    def _checked_items(self, name: str, method: str, tensor: Any) -> torch.Tensor:
        """[items, ...], from that, from [batch, items, ...], or from the patches of all items, [items * patches, values]."""
        spec = self.runner.methods[method].inputs[0]
        if not isinstance(tensor, torch.Tensor):
            raise InputError(f"{name} is a {type(tensor).__name__}; pass a {spec.dtype} tensor (return_tensors='pt')")
        items, rows = tensor.flatten(0, 1) if tensor.dim() == len(spec.shape) + 1 else tensor, spec.shape[0]
        if list(items.shape[1:]) != list(spec.shape[1:]) or items.shape[0] == 0 or items.shape[0] % rows:
            shape = ", ".join(map(str, spec.shape[1:]))
            first = "items" if rows == 1 else f"items * {rows}"
            raise InputError(
                f"{name} has shape {list(tensor.shape)}; it must be [{first}, {shape}], the size of the export"
            )
        if tensor.dtype != getattr(torch, spec.dtype) or tensor.device != self.device:
            raise InputError(
                f"{name} is {tensor.dtype} on {tensor.device}; it must be torch.{spec.dtype} on {self.device}"
            )
        return items.unflatten(0, (-1, rows))


def recorded_placeholders(methods: Iterable[str], config: Mapping[str, Any]) -> dict[str, int]:
    """Placeholder token by name of the method, from the model config that a bundle records."""
    found = {}
    for name in methods:
        if name.startswith("encode_"):
            kind = name.removeprefix("encode_")
            # Llava's config writes the older name.
            token = config.get(f"{kind}_token_id", config.get(f"{kind}_token_index"))
            if not isinstance(token, int):
                raise BundleError(
                    f"the bundle has a method {name!r}, its config no {kind}_token_id; export the model again"
                )
            found[name] = token
    return found
