"""How close a program has to be to its model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..cache.attention.implementation import attention_of
from ..models.quantization import rounding_noise

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..models.quantization import Quantization

#: Largest |logit difference| that passes, by the dtype the model runs in, see `default_tolerance`.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 5e-2}

# Measured on nine families: two right computations in half precision differ by up to 2.6 roundings of the largest
# logit.
_ROUNDINGS = 4
# Positions differ: of Llama-3.2-1B's shape the first has three quarters of the later ones' noise.
_RMS_MARGIN = 1.5


def default_tolerance(dtype: torch.dtype, largest_logit: float) -> float:
    """Largest |logit difference| of two right computations in `dtype`.

    `TOLERANCES`, or `_ROUNDINGS` roundings of the largest logit where that is more: a program in bfloat16 whose logits
    reach 16 cannot agree to 5e-2, as neighbouring numbers are 0.06 apart there.

    Args:
        largest_logit: Largest |logit| of the reference.
    """
    rounding = torch.finfo(dtype).eps * largest_logit if math.isfinite(largest_logit) else 0.0
    return max(TOLERANCES.get(dtype, TOLERANCES[torch.float32]), _ROUNDINGS * rounding)


class Tolerances(NamedTuple):
    """What passes.

    Attributes:
        largest: |logit difference|; None for the usual one.
        rms: Root mean square over the vocabulary, of any position; None where it is not judged.
    """

    largest: float | None
    rms: float | None


def tolerances_of(model: PreTrainedModel, quantization: Quantization | None) -> Tolerances:
    """How far a program may be from the quantised model.

    As usual, unless activations are quantised: then what different roundings do, where that is more. Their largest
    difference is that of a few draws, so twice as much passes; their root mean square hardly depends on the draw, and
    is what tells a program that computes something else.
    """
    if quantization is None:
        return Tolerances(None, None)
    with torch.no_grad(), attention_of(model, "eager"):
        noise = rounding_noise(model)
    usual = TOLERANCES[torch.float32]
    if 2 * noise.largest <= usual:
        return Tolerances(usual, None)
    return Tolerances(2 * noise.largest, max(usual, _RMS_MARGIN * noise.rms))
