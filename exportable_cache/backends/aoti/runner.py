"""Running an AOTInductor package from Python."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...common.compat.torch import load_package
from ...errors import BundleError

if TYPE_CHECKING:
    from ..base import ProgramDescription


class AotiRunner:
    """The methods of one package, all over the tensors that are held here: weights mapped from disk, and a zeroed
    cache.

    Raises:
        BundleError: If the files cannot be loaded by this torch, or on this processor.
    """

    def __init__(self, code: Path, constants: Path, description: ProgramDescription) -> None:
        self.methods = description.methods
        try:
            stored = torch.load(constants, mmap=True, weights_only=True)
            self._models = {name: load_package(code, name) for name in description.methods}
        except (OSError, RuntimeError, ValueError) as error:
            raise BundleError(f"cannot load {code.name}: {error}; export the model again, on this machine") from error
        state = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in stored["state"].items()}
        self._tensors = {**stored["weights"], **state}
        names = (
            f"layers.{index}.{name}" for index, layer in enumerate(description.layers) for name in layer["tensors"]
        )
        self.state = {name: state[name.replace(".", "_")] for name in names if name.replace(".", "_") in state}
        for model in self._models.values():
            shared = {name: self._tensors[name] for name in model.get_constant_fqns()}
            # The models keep bare pointers: `_tensors` keeps what they point to.
            model.load_constants(shared, check_full_update=True, user_managed=True)

    @torch.no_grad()
    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor:
        return self._models[method](*(tensor.contiguous() for tensor in inputs))
