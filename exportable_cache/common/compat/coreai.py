"""Private names of coreai-torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

#: Module whose import registers the operators of compressed weights (0.4.3); the public ones import it later.
_OPERATORS = "coreai_torch._compression.custom_layers"


def dequantized_weight() -> Callable[..., Any]:
    """Return the operator whose integers the converter stores.

    It takes the integers, scales of as many dimensions, zero points, least values, and the dtypes of both sides.
    """
    import_module(_OPERATORS)
    return torch.ops.coreai.constexpr_blockwise_shift_scale
