"""Running exported programs in torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from ...cache.policies import CrossPolicy
from ...models.cache_factory import ExportableCache, ExportableEncoderDecoderCache
from ..base import empty_layers

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from ..base import ProgramDescription


class ResidentRunner:
    """Programs whose cache is inside: the methods share its buffers."""

    def __init__(self, programs: Mapping[str, ExportedProgram], description: ProgramDescription) -> None:
        self.methods = description.methods
        self._modules = {name: program.module() for name, program in programs.items()}
        self.state: Mapping[str, torch.Tensor] = {
            f"layers.{index}.{name}": program.constants[f"layers_{index}_{name}"]
            for program in programs.values()
            for index, layer in enumerate(description.layers)
            for name in layer["tensors"]
            if f"layers_{index}_{name}" in program.constants
        }

    @torch.no_grad()
    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        return self._modules[method](*inputs)


class ExplicitRunner:
    """Programs whose cache is an input and an output: it is held here and passed along."""

    def __init__(self, programs: Mapping[str, ExportedProgram], description: ProgramDescription) -> None:
        self.methods = description.methods
        self._modules = {name: program.module() for name, program in programs.items()}
        layers = empty_layers(description)
        has_encoder = any(isinstance(layer.policy, CrossPolicy) for layer in layers)
        self.cache = (ExportableEncoderDecoderCache if has_encoder else ExportableCache)(layers)

    @property
    def state(self) -> Mapping[str, torch.Tensor]:
        """The cache as it is now, without the lengths, which are inputs."""
        return self.cache.stored_state()

    @torch.no_grad()
    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if not self.methods[method].is_step:
            return self._modules[method](*inputs)
        logits, self.cache = self._modules[method](*inputs, self.cache)
        return logits
