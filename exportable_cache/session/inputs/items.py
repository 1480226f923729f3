"""Images, video and sound in a prompt: each encoder's embeddings take the places of its placeholder tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ...errors import BundleError, InputError
from ...program.inputs.examples import VIDEO_GRID

if TYPE_CHECKING:
    from ...program.methods import ProgramMethod
    from ..program_stepper import ProgramStepper
    from ..rows import TokenRows
    from .stages import Prompt, Steps

# What some processors give beside pixels that a program does not take: nothing is padded in items of one size.
_MASK = "pixel_attention_mask"


class ItemStage:
    """The items of one kind: what an encoder of a text decoder takes.

    Args:
        method: The encoder, such as `encode_image`.
        token: Id of its placeholder.
        device: Where inputs are expected.
    """

    def __init__(self, method: ProgramMethod, token: int, device: torch.device) -> None:
        self.method = method
        self.token = token
        self.device = device
        self.fixed = {} if method.item is None else {name: one.tensor() for name, one in method.item.fixed.items()}
        if method.grid is not None and not self.fixed:
            # Bundles from before say no more.
            self.fixed = {"image_grid_thw": torch.tensor([method.grid])}
        self.names: tuple[str, ...] = (*method.input_names, *self.fixed)
        if _MASK not in self.names and "pixel_values" in self.names:
            self.names += (_MASK,)

    @property
    def tokens_per_item(self) -> int:
        """Embeddings that the encoder gives for one item."""
        return int(self.method.outputs[0].shape[0])

    def check(self, rows: TokenRows, given: Mapping[str, Any]) -> Mapping[str, list[tuple[torch.Tensor, ...]]]:
        """What the encoder takes, by item, for prompts with one placeholder per embedding.

        Raises:
            InputError: If it has another shape or dtype, or gives another number of embeddings than there are
                placeholders, or goes with another grid, size or mask than the program was made for.
        """
        if _MASK in given and _MASK not in self.fixed and not bool(given[_MASK].all()):
            raise InputError(f"{_MASK} has padding; pass images of the exported size")
        items: list[tuple[torch.Tensor, ...]] = []
        if any(name in given for name in self.method.input_names):
            parts = [self._checked(index, given) for index in range(len(self.method.inputs))]
            if len({len(part) for part in parts}) > 1:
                counts = ", ".join(f"{name} of {len(part)}" for name, part in zip(self.method.input_names, parts))
                raise InputError(f"got {counts} items; pass what the processor gives, as many of each")
            items = list(zip(*parts, strict=True))
        for name, fixed in self.fixed.items():
            if name in given:
                self._check_fixed(name, given[name], fixed, len(items))
            elif items and not bool((fixed == 1).all()):
                raise InputError(f"{self.method.name} takes {name} with {self.names[0]}; pass it too")
        places = int(placeholders(rows, self.token).sum())
        embeddings = self.tokens_per_item * len(items)
        if places != embeddings:
            raise InputError(
                f"the prompt has {places} tokens of id {self.token}, {self.method.name} gives {embeddings} embeddings "
                "for them; build the prompt with the model's own processor"
            )
        return {self.method.name: items} if items else {}

    def extend(self, steps: Steps, prompt: Prompt, stepper: ProgramStepper) -> Steps:
        """The steps with this encoder's embeddings in their places, where the prompt has any."""
        if self.method.name not in prompt.items:
            return steps
        embeds = embedded(steps, stepper)
        parts = [stepper.runner.run(self.method.name, *item)[0].clone() for item in prompt.items[self.method.name]]
        places = placeholders(prompt.rows, self.token)[..., None]
        return replace(steps, fed=embeds.masked_scatter(places, torch.cat(parts).to(embeds.dtype)))

    def _checked(self, index: int, given: Mapping[str, Any]) -> list[torch.Tensor]:
        """One tensor per item, from those of all items joined as `modality.joined_items` does."""
        spec = self.method.inputs[index]
        shape = [int(size) for size in spec.shape]
        if spec.name not in given:
            raise InputError(f"{self.method.name} takes {', '.join(self.method.input_names)}; pass {spec.name} too")
        tensor = given[spec.name]
        if not isinstance(tensor, torch.Tensor):
            raise InputError(
                f"{spec.name} is a {type(tensor).__name__}; pass a {spec.dtype} tensor (return_tensors='pt')"
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
                f"{spec.name} has shape {list(tensor.shape)}; it must be [{', '.join([rows, *map(str, shape[1:])])}], "
                "the size of the export"
            )
        if tensor.dtype != getattr(torch, spec.dtype) or tensor.device != self.device:
            raise InputError(
                f"{spec.name} is {tensor.dtype} on {tensor.device}; it must be torch.{spec.dtype} on {self.device}"
            )
        return [part.contiguous() for part in found]

    def _check_fixed(self, name: str, value: Any, fixed: torch.Tensor, items: int) -> None:
        tensor = torch.as_tensor(value).cpu()
        if name == VIDEO_GRID and self.method.item is not None and self.method.item.apart:
            frames = torch.cat([torch.ones_like(tensor[:, :1]), tensor[:, 1:]], dim=1)
            tensor = frames.repeat_interleave(tensor[:, 0], dim=0)
        wanted = fixed.flatten().repeat(items)
        if tensor.numel() == wanted.numel() and bool((tensor.flatten() == wanted).all()):
            return
        each = tensor.reshape(-1, fixed.shape[-1]) if tensor.numel() % fixed.shape[-1] == 0 else tensor
        row = fixed.reshape(-1, fixed.shape[-1])
        other = next((one for one in each if not bool((row == one).all(-1).any())), each)
        raise InputError(
            f"{name} has {_short(other)}, {self.method.name} was made for {_short(row if len(row) > 1 else row[0])} of "
            "each item: bring items to that size before the processor, or make the session, or export, with another "
            "image_size or example"
        )


def _short(tensor: torch.Tensor) -> str:
    return str(tensor.tolist()) if tensor.numel() <= 12 else f"shape {list(tensor.shape)}"


def placeholders(rows: TokenRows, token: int) -> torch.Tensor:
    """Where the prompts have a token, bool [batch, length]; not before a shorter row begins."""
    columns = torch.arange(rows.ids.shape[1])[None]
    real = columns >= rows.ids.shape[1] - torch.tensor(rows.lengths)[:, None]
    return (rows.ids == token) & real.to(rows.ids.device)


def embedded(steps: Steps, stepper: ProgramStepper) -> torch.Tensor:
    """The prompt as embeddings [batch, length, hidden_size], whether it is that already or still ids."""
    if not steps.are_ids:
        return steps.fed
    longest = stepper.runner.methods["embed"].max_length
    parts = [stepper.runner.run("embed", part.contiguous())[0].clone() for part in steps.fed.split(longest, dim=1)]
    return torch.cat(parts, dim=1)


def recorded_placeholders(methods: Iterable[ProgramMethod], config: Mapping[str, Any]) -> dict[str, int]:
    """Placeholder token by name of the method, as a bundle records it: of the method, or in the model's config."""
    found = {}
    for method in methods:
        if method.name.startswith("encode_"):
            kind = method.name.removeprefix("encode_")
            # Llava's config writes the older name.
            token = config.get(f"{kind}_token_id", config.get(f"{kind}_token_index"))
            if method.item is not None:
                token = method.item.token_id
            if not isinstance(token, int):
                raise BundleError(
                    f"the bundle has a method {method.name!r}, its config no {kind}_token_id; export the model again"
                )
            found[method.name] = token
    return found
