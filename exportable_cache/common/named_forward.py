"""A `forward` made for the inputs of one method: the tracer names a graph's inputs after its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType, MethodType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def name_forward(module: nn.Module, names: Sequence[str]) -> None:
    """Give `module` a `forward(*names)` that passes them all by name to its method `call`."""
    namespace: dict[str, FunctionType] = {}
    passed = ", ".join(f"{name}={name}" for name in names)
    exec(f"def forward(self, {', '.join(names)}):\n    return self.call({passed})\n", namespace)
    module.forward = MethodType(namespace["forward"], module)
