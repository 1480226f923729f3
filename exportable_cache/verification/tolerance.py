"""Tolerances for the difference between a program and its model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..common.tensors import dtype_name
from ..errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Smallest tolerance of |logit difference| by the model's dtype, see `default_tolerance`.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 5e-2}

# On nine families, two correct computations in half precision differed by up to 2.6 roundings of the largest logit.
_ROUNDINGS = 4
# In float32 the limit is relative to the logits' standard deviation, because rounding accumulates over layers. Correct
# programs of 6 to 28 layers differ by 2e-6 to 1e-5 of it.
_SHARE_OF_SPREAD = 4e-5


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


def check_finite(model: PreTrainedModel, logits: Sequence[torch.Tensor]) -> None:
    """Check the logits of a quantised model.

    Args:
        model: The quantised model.
        logits: Its logits [batch, vocab] of some positions; minus infinity for tokens of a reduced vocabulary.

    Raises:
        UnsupportedModelError: If they are not finite.
    """
    if all(bool((one.isfinite() | one.isneginf()).all()) for one in logits):
        return
    raise UnsupportedModelError(
        f"the logits of the quantized {type(model).__name__} must be finite, got infinities or not-a-number in "
        f"{dtype_name(model.dtype)}: the model overflows there; export it with dtype='bfloat16' or 'float32'"
    )
