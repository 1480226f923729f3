"""Falcon's linear layers over quantised weights: they transpose the weight, which torchao's have no form for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from ....common.patch import Patch
from ...quantized_rows import is_quantized


def _as_linear(original: Callable) -> Callable:
    """`torch.nn.Linear`'s own forward where the weight is quantised: the same product and sum."""

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        return functional.linear(input, weight, self.bias) if is_quantized(weight) else original(self, input)

    return forward


PATCHES = {
    "falcon": (
        Patch(
            "falcon.modeling_falcon",
            "FalconLinear.forward",
            _as_linear,
            "it transposes its weight, which a quantised one cannot",
            digests=("aaa9ff47a1d2eceb",),
        ),
    ),
}
