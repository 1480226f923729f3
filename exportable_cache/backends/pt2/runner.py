"""Run stored programs in torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from ...cache.policies import CrossPolicy
from ...common.compat.torch import tree_flatten, tree_unflatten
from ...errors import BundleError, first_line
from ..base import empty_layers

if TYPE_CHECKING:
    from ..base import ProgramDescription
    from .archive import StoredProgram


class StoredRunner:
    """Runs the programs of a file and checks their outputs, because the file may not match its manifest.

    Raises:
        BundleError: If a method of the description is not in the file.
    """

    def __init__(self, programs: Mapping[str, StoredProgram], description: ProgramDescription) -> None:
        missing = description.methods.keys() - programs.keys()
        if missing:
            raise BundleError(
                f"the manifest names the methods {', '.join(sorted(missing))}, which the program's file does not have; "
                "export the model again"
            )
        self.methods, self._rows = description.methods, description.batch_size
        self._modules = {name: programs[name].module for name in description.methods}

    def call(self, method: str, inputs: tuple) -> tuple[torch.Tensor, ...]:
        """Return the outputs of a method.

        Raises:
            BundleError: If the method fails, or a step does not return logits.
        """
        try:
            outputs = self._modules[method](*inputs)
        except (
            ArithmeticError,
            AssertionError,
            AttributeError,
            LookupError,
            MemoryError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise BundleError(
                f"method {method!r} of the program failed, {type(error).__name__}: {first_line(error)[:200]}; "
                "export the model again"
            ) from error
        if self.methods[method].is_step:
            self._check_step(method, outputs)
        return outputs

    def _check_step(self, method: str, outputs: tuple) -> None:
        first = outputs[0] if outputs else None
        if not isinstance(first, torch.Tensor):
            raise BundleError(f"method {method!r} of the program returns no logits; export the model again")
        if not first.is_floating_point() or first.ndim not in (2, 3) or first.shape[0] != self._rows:
            raise BundleError(
                f"method {method!r} of the program must return logits of {self._rows} rows, got {first.dtype} "
                f"{list(first.shape)}; export the model again"
            )


class ResidentRunner(StoredRunner):
    """Runs programs that contain their cache, which all methods share.

    Raises:
        BundleError: If the cache in the file does not match the description.
    """

    def __init__(self, programs: Mapping[str, StoredProgram], description: ProgramDescription) -> None:
        super().__init__(programs, description)
        held = {name: tensor for method in self.methods for name, tensor in programs[method].state.items()}
        self.state: Mapping[str, torch.Tensor] = {
            f"layers.{index}.{name}": _checked(held[f"layers_{index}_{name}"], f"layers.{index}.{name}", declared)
            for index, layer in enumerate(description.layers)
            for name, declared in layer["tensors"].items()
            if f"layers_{index}_{name}" in held
        }

    @torch.no_grad()
    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run a method, see `Runner.run`."""
        outputs = self.call(method, inputs)
        return outputs[0] if self.methods[method].is_step else outputs


def _checked(tensor: torch.Tensor, name: str, declared: Mapping) -> torch.Tensor:
    found = (list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    if found != (list(declared["shape"]), declared["dtype"]):
        raise BundleError(
            f"{name} is {found[1]} {found[0]} in the program's file and {declared['dtype']} {declared['shape']} in the "
            "manifest; export the model again"
        )
    return tensor


class ExplicitRunner(StoredRunner):
    """Runs programs that take the cache as an input and return it. This object holds the cache."""

    def __init__(self, programs: Mapping[str, StoredProgram], description: ProgramDescription) -> None:
        # Imported here because transformers takes longer to import than a bundle takes to open.
        from ...models.cache_factory import ExportableCache, ExportableEncoderDecoderCache

        super().__init__(programs, description)
        layers = empty_layers(description)
        has_encoder = any(isinstance(layer.policy, CrossPolicy) for layer in layers)
        self.cache = (ExportableEncoderDecoderCache if has_encoder else ExportableCache)(layers)

    @property
    def state(self) -> Mapping[str, torch.Tensor]:
        """The current cache tensors without the lengths, which are inputs."""
        return self.cache.stored_state()

    @torch.no_grad()
    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run a method, see `Runner.run`."""
        if not self.methods[method].is_step:
            return self.call(method, inputs)
        leaves, spec = tree_flatten(self.cache)
        logits, *written = self.call(method, (*inputs, *leaves))
        if len(written) != len(leaves):
            raise BundleError(
                f"method {method!r} must return {len(leaves)} cache tensors, got {len(written)}; export the model again"
            )
        self.cache = tree_unflatten(written, spec)
        return logits
