"""Inputs and outputs of a program's methods: their names, dtypes and sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import TYPE_CHECKING


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a method takes or gives: `TensorSpec("input_ids", "int64", ("batch", "length"))`.

    Attributes:
        name: Of the argument.
        dtype: Name of a torch dtype.
        shape: Numbers, and names of sizes: "batch" is the program's batch size, "length" runs over the method's range,
            others over the range that `ProgramMethod.ranges` gives them.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def sizes(self, named: Mapping[str, int]) -> list[int]:
        """The shape, with a number for each name."""
        return [named[size] if isinstance(size, str) else size for size in self.shape]


if TYPE_CHECKING:
    from torch import nn


def name_forward(module: nn.Module, names: Sequence[str]) -> None:
    """Give `module` a `forward(*names)` that passes them all by name to its method `call`."""
    namespace: dict[str, FunctionType] = {}
    passed = ", ".join(f"{name}={name}" for name in names)
    exec(f"def forward(self, {', '.join(names)}):\n    return self.call({passed})\n", namespace)
    module.forward = MethodType(namespace["forward"], module)
