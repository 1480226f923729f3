"""Inputs and outputs of a program's methods: their names, dtypes and sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import TYPE_CHECKING


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a method: `TensorSpec("input_ids", "int64", ("batch", "length"))`.

    Attributes:
        name: Name of the argument.
        dtype: Name of a torch dtype.
        shape: Sizes, as numbers or names. "batch" is the program's batch size, "length" has the method's range, and
            other names have the range in `ProgramMethod.ranges`.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorSpec:
        """Return the spec of inputs like a tensor, all of whose sizes are fixed."""
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    def sizes(self, named: Mapping[str, int]) -> list[int]:
        """Return the shape with each name replaced by its number."""
        return [named[size] if isinstance(size, str) else size for size in self.shape]


if TYPE_CHECKING:
    import torch
    from torch import nn


def name_forward(module: nn.Module, names: Sequence[str]) -> None:
    """Give `module` a `forward(*names)` that passes its arguments by name to `module.call`.

    The tracer names a graph's inputs after the parameters of `forward`.
    """
    namespace: dict[str, FunctionType] = {}
    passed = ", ".join(f"{name}={name}" for name in names)
    exec(f"def forward(self, {', '.join(names)}):\n    return self.call({passed})\n", namespace)
    module.forward = MethodType(namespace["forward"], module)
