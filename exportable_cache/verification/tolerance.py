"""How close a program has to be to its model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ..cache.attention.implementation import attention_of
from ..models.quantization import rounding_sensitivity

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..models.quantization import Quantization

#: Largest |logit difference| that passes, by the dtype the model runs in, see `default_tolerance`.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 5e-2}

# Measured on nine families: two right computations in half precision differ by up to 2.6 roundings of the largest
# logit.
_ROUNDINGS = 4


def default_tolerance(dtype: torch.dtype, largest_logit: float) -> float:
    """Largest |logit difference| of two right computations in `dtype`.

    `TOLERANCES`, or `_ROUNDINGS` roundings of the largest logit where that is more: a program in bfloat16 whose logits
    reach 16 cannot agree to 5e-2, as neighbouring numbers are 0.06 apart there.

    Args:
        largest_logit: Largest |logit| of the reference.
    """
    rounding = torch.finfo(dtype).eps * largest_logit if math.isfinite(largest_logit) else 0.0
    return max(TOLERANCES.get(dtype, TOLERANCES[torch.float32]), _ROUNDINGS * rounding)


def tolerance_of(model: PreTrainedModel, quantization: Quantization | None) -> float | None:
    """Largest |logit difference| between a program and the quantised model that passes; None for the usual one.

    The usual one, unless activations are quantised: then what one different rounding per layer does, where that is
    more.
    """
    if quantization is None:
        return None
    with torch.no_grad(), attention_of(model, "eager"):
        return max(TOLERANCES[torch.float32], rounding_sensitivity(model))
