"""Running stored programs whose cache is an input and an output.

A module of its own, as caches are transformers', whose import takes longer than a bundle takes to open.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from ...cache.policies import CrossPolicy
from ...common.compat.torch import tree_flatten, tree_unflatten
from ...errors import BundleError
from ...models.cache_factory import ExportableCache, ExportableEncoderDecoderCache
from ..base import empty_layers
from .runner import StoredRunner

if TYPE_CHECKING:
    from ..base import ProgramDescription
    from .archive import StoredProgram


class ExplicitRunner(StoredRunner):
    """The cache is held here and passed along."""

    def __init__(self, programs: Mapping[str, StoredProgram], description: ProgramDescription) -> None:
        super().__init__(programs, description)
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
            return self.call(method, inputs)
        leaves, spec = tree_flatten(self.cache)
        logits, *written = self.call(method, (*inputs, *leaves))
        if len(written) != len(leaves):
            raise BundleError(f"method {method!r} gives {len(written)} cache tensors, of {len(leaves)}; export again")
        self.cache = tree_unflatten(written, spec)
        return logits
