"""Tolerances for the difference between a program and its model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..cache.attention.implementation import attention_of
from ..models.layers.specs import vocab_size_of
from ..models.quantization.quantize import DRAWS, rounding_noise
from .references import encoder_lengths, random_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..models.quantization.quantize import Quantization
    from ..program.methods import ProgramMethod

#: Smallest tolerance of |logit difference| by the model's dtype, see `default_tolerance`.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 5e-2}

# On nine families, two correct computations in half precision differed by up to 2.6 roundings of the largest logit.
_ROUNDINGS = 4
# In float32 the limit is relative to the logits' standard deviation, because rounding accumulates over layers. Correct
# programs of 6 to 28 layers differ by 2e-6 to 1e-5 of it.
_SHARE_OF_SPREAD = 4e-5
# Margin for differences between positions; for Llama-3.2-1B the first has three quarters of the later ones' noise.
_RMS_MARGIN = 1.5


def default_tolerance(dtype: torch.dtype, largest_logit: float, spread: float = 0.0) -> float:
    """Return the largest |logit difference| that two correct computations in `dtype` may have.

    It is the largest of `TOLERANCES`, of `_ROUNDINGS` roundings of the largest logit, and of `_SHARE_OF_SPREAD` of the
    logits' spread. A program in bfloat16 whose logits reach 16 cannot agree to 5e-2, because neighbouring numbers are
    0.06 apart there; a program in float32 whose logits have a spread of 16 cannot agree to 1e-4.

    Args:
        dtype: The model's dtype, or the one that the program rounds the inputs of linear layers to.
        largest_logit: Largest |logit| of the reference.
        spread: Largest standard deviation over the vocabulary of any position's reference logits.
    """
    rounding = torch.finfo(dtype).eps * largest_logit if math.isfinite(largest_logit) else 0.0
    share = _SHARE_OF_SPREAD * spread if math.isfinite(spread) else 0.0
    return max(TOLERANCES.get(dtype, TOLERANCES[torch.float32]), _ROUNDINGS * rounding, share)


class Tolerances(NamedTuple):
    """Limits of a verification.

    Attributes:
        largest: Limit of |logit difference|; None for the default.
        rms: Limit of the root mean square over the vocabulary of any position; None for no limit.
    """

    largest: float | None
    rms: float | None


def tolerances_of(
    model: PreTrainedModel, quantization: Quantization | None, encode: ProgramMethod | None = None
) -> Tolerances:
    """Return the limits for a program of a quantised model.

    If activations are quantised, the limits follow from the effect of random rounding on the logits. The largest
    difference is estimated from a few draws, so twice that is accepted. The root mean square hardly depends on the
    draw, and so detects programs that compute something else.

    Args:
        model: The quantised model.
        quantization: Its quantisation, or None.
        encode: The encoder method of an encoder-decoder.

    Raises:
        UnsupportedModelError: If the quantised model's logits are not finite in its dtype.
    """
    if quantization is None:
        return Tolerances(None, None)
    with torch.no_grad(), attention_of(model, "eager"):
        inputs = None
        if encode is not None:
            generator = torch.Generator().manual_seed(0)
            inputs = random_inputs(encode, encoder_lengths(encode)[0], DRAWS, vocab_size_of(model), generator)
        noise = rounding_noise(model, encoder_inputs=inputs)
    usual = TOLERANCES[torch.float32]
    if 2 * noise.largest <= usual:
        return Tolerances(None, None)
    return Tolerances(2 * noise.largest, max(usual, _RMS_MARGIN * noise.rms))
