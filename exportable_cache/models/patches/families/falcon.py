"""Falcon: its linear layers transpose their weight, which torchao's quantised weights do not support."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from ....common.patch import Patch
from ...quantized_rows import is_quantized


def _as_linear(original: Callable) -> Callable:
    """Use the forward of `torch.nn.Linear`, which is equal, for quantised weights."""

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
            "it transposes its weight, which quantised weights do not support",
            digests=("aaa9ff47a1d2eceb",),
        ),
    ),
}
