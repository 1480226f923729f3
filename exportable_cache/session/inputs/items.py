"""Images and sound in a prompt: each encoder's embeddings take the places of its placeholder tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ...errors import BundleError, InputError

if TYPE_CHECKING:
    from ...program.methods import ProgramMethod
    from ..program_stepper import ProgramStepper
    from .stage import Prompt, Steps


class ItemStage:
    """Sound, or whatever else an encoder of a text decoder takes and nothing more is to be known of.

    Args:
        method: The encoder, `encode_audio`.
        token: Id of its placeholder.
        device: Where inputs are expected.
    """

    def __init__(self, method: ProgramMethod, token: int, device: torch.device) -> None:
        self.method = method
        self.token = token
        self.device = device
        self.names: tuple[str, ...] = (method.inputs[0].name,)

    @property
    def tokens_per_item(self) -> int:
        """Embeddings that the encoder gives for one item."""
        return int(self.method.outputs[0].shape[0])

    def check(self, ids: torch.Tensor, given: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        """The encoder's input, [items, ...], of `ids` int64 [batch, length] with one placeholder per embedding.

        Raises:
            InputError: If it has another shape or dtype, or gives another number of embeddings than there are
                placeholders.
        """
        main = self.names[0]
        items = {self.method.name: self._checked(main, given[main])} if main in given else {}
        places = int((ids == self.token).sum())
        embeddings = sum(self.tokens_per_item * tensor.shape[0] for tensor in items.values())
        if places != embeddings:
            raise InputError(
                f"the prompt has {places} tokens of id {self.token}, {self.method.name} gives {embeddings} embeddings "
                "for them; build the prompt with the model's own processor"
            )
        return items

    def extend(self, steps: Steps, prompt: Prompt, stepper: ProgramStepper) -> Steps:
        """The steps with this encoder's embeddings in their places, where the prompt has any."""
        if self.method.name not in prompt.items:
            return steps
        embeds = embedded(steps, stepper)
        shape = self.method.inputs[0].shape
        parts = (
            stepper.runner.run(self.method.name, item.reshape(shape).contiguous())[0]
            for item in prompt.items[self.method.name].split(1)
        )
        places = (prompt.rows.ids == self.token)[..., None]
        return replace(steps, fed=embeds.masked_scatter(places, torch.cat(list(parts)).to(embeds.dtype)))

    def _checked(self, name: str, tensor: Any) -> torch.Tensor:
        """[items, ...], from that, from [batch, items, ...], or from the patches of all items, [items * patches,
        values].
        """
        spec = self.method.inputs[0]
        if not isinstance(tensor, torch.Tensor):
            raise InputError(f"{name} is a {type(tensor).__name__}; pass a {spec.dtype} tensor (return_tensors='pt')")
        items, rows = tensor.flatten(0, 1) if tensor.dim() == len(spec.shape) + 1 else tensor, int(spec.shape[0])
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


def embedded(steps: Steps, stepper: ProgramStepper) -> torch.Tensor:
    """The prompt as embeddings [batch, length, hidden_size], whether it is that already or still ids."""
    if not steps.are_ids:
        return steps.fed
    longest = stepper.runner.methods["embed"].max_length
    parts = [stepper.runner.run("embed", part.contiguous())[0] for part in steps.fed.split(longest, dim=1)]
    return torch.cat(parts, dim=1)


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
