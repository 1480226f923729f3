"""Images and sound in a session: their embeddings take the places of placeholder tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..backends.base import Runner
from ..errors import BundleError, InputError
from ..methods import chunk_sizes


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

    def embed(self, input_ids: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Embeddings [batch, length, hidden_size] of a prompt.

        Args:
            input_ids: int64 [batch, length], with one placeholder per embedding.
            inputs: What the processor gave beside them, such as pixel_values.

        Raises:
            InputError: If an input is unknown, of another shape or dtype, or gives another number of embeddings than there
                are placeholders. Nothing has changed then.
        """
        features = {}
        for name, tensor in inputs.items():
            if name == "attention_mask" or name == "pixel_attention_mask":
                if not bool(tensor.all()):
                    raise InputError(f"{name} has padding; pass one prompt without padding, and images of the exported size")
                continue
            if name not in self.by_input:
                raise InputError(f"prefill takes {', '.join(self.by_input)} beside input_ids, got {name!r}; leave it out")
            method = self.by_input[name]
            items = self._checked_items(name, method, tensor)
            features[method] = torch.cat([self.runner.run(method, item.contiguous())[0] for item in items.split(1)])
        longest = self.runner.methods["embed"].max_length
        parts = [self.runner.run("embed", part.contiguous())[0] for part in input_ids.split(longest, dim=1)]
        embeds = torch.cat(parts, dim=1)
        for method, token in self.placeholders.items():
            places = input_ids == token
            found = features.get(method)
            given = 0 if found is None else found.shape[0]
            if int(places.sum()) != given:
                raise InputError(
                    f"the prompt has {int(places.sum())} tokens of id {token}, {method} gave {given} embeddings for them; "
                    "build the prompt with the model's own processor"
                )
            if found is not None:
                embeds = embeds.masked_scatter(places[..., None], found.to(embeds.dtype))
        return embeds

    def chunk_sizes(self, length: int) -> list[int]:
        """How many tokens of a prompt go through each step."""
        return chunk_sizes({name: method for name, method in self.runner.methods.items() if not method.takes_ids}, length)

    def _checked_items(self, name: str, method: str, tensor: Any) -> torch.Tensor:
        """[items, ...], from that or from [batch, items, ...]."""
        spec = self.runner.methods[method].inputs[0]
        if not isinstance(tensor, torch.Tensor):
            raise InputError(f"{name} is a {type(tensor).__name__}; pass a {spec.dtype} tensor (return_tensors='pt')")
        items = tensor.flatten(0, 1) if tensor.dim() == len(spec.shape) + 1 else tensor
        if list(items.shape[1:]) != list(spec.shape[1:]) or items.shape[0] == 0:
            shape = ", ".join(map(str, spec.shape[1:]))
            raise InputError(f"{name} has shape {list(tensor.shape)}; it must be [items, {shape}], the size of the export")
        if tensor.dtype != getattr(torch, spec.dtype) or tensor.device != self.device:
            raise InputError(f"{name} is {tensor.dtype} on {tensor.device}; it must be torch.{spec.dtype} on {self.device}")
        return items


def recorded_placeholders(methods: Iterable[str], config: Mapping[str, Any]) -> dict[str, int]:
    """Placeholder token by name of the method, from the model config that a bundle records."""
    found = {}
    for name in methods:
        if name.startswith("encode_"):
            kind = name.removeprefix("encode_")
            # Llava's config writes the older name.
            token = config.get(f"{kind}_token_id", config.get(f"{kind}_token_index"))
            if not isinstance(token, int):
                raise BundleError(f"the bundle has a method {name!r}, its config no {kind}_token_id; export the model again")
            found[name] = token
    return found
