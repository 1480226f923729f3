"""Tolerances for the difference between a program and its model, and limits for programs that round to few bits.

Some programs round activations, or keys and values. Two correct ones compute these with different last bits, so values
halfway between two integers round differently, and each difference causes others in later layers. In a trained model of
30 layers, the logits of two correct programs then differ by as much as rounding changes logits at all, and a limit of
that difference says little. But neither program is further than the other from the model that rounds nothing, neither
in its logits nor in the keys and values of any layer. An error moves a program away from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..common.tensors import dtype_name, logit_differences
from ..errors import UnsupportedModelError
from ..session.persistence import stored_rows
from .report import RoundingDistance, largest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..session.session import Session
    from .references import Reference

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


# Two correct programs whose roundings are independent differ by the square root of two times the effect of rounding.
_TIMES_ROUNDING = 2.0
#: Limit of the ratio of two distances from the model without rounding. Single roundings of early tokens shift the
#: distances of all later positions together, so the ratio of two correct programs is not exactly one.
LIMIT = 1.4
# Difference of keys and values, relative to their root mean square, that two correct programs have without rounding: at
# least this, and as many roundings of the dtype.
_EQUAL_ROWS, _ROUNDINGS_OF_ROWS = 1e-4, 4


class RoundingLimits(NamedTuple):
    """Limits of the differences between two correct programs that round.

    Attributes:
        largest: Limit of |logit difference|; None if rounding alone may change a logit by more than the spread.
        rms: The same for the root mean square over the vocabulary of any position.
        distance: Distances of the program and its reference from the model without rounding, and their limit.
    """

    largest: float | None
    rms: float | None
    distance: RoundingDistance


def _ratio(program: torch.Tensor, reference: torch.Tensor, equal: float) -> float:
    """Return the geometric mean of the ratios of two distances from the model without rounding.

    Args:
        program: Squares of the program's distances by position.
        reference: The same of the reference.
        equal: Square of the distance that two correct programs have without rounding.
    """
    return (((program + equal) / (reference + equal)).log().mean() / 2).exp().item()


def _divergence(found: torch.Tensor, without: torch.Tensor) -> torch.Tensor:
    """Return the KL divergence [batch] of logits [batch, vocab] from those of the model without rounding."""
    expected = without.double().log_softmax(-1)
    apart = expected - found.double().log_softmax(-1)
    return (expected.exp() * apart.masked_fill(expected.isneginf(), 0.0)).sum(-1).clamp(min=0.0)


class Roundings:
    """Differences between a program, its reference, and the model without rounding.

    Args:
        dtype: Dtype that the program computes products in.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._equal = max(_EQUAL_ROWS, _ROUNDINGS_OF_ROWS * torch.finfo(dtype).eps)
        self._largest, self._rms = 0.0, 0.0
        self._of_program: list[torch.Tensor] = []
        self._of_reference: list[torch.Tensor] = []
        self._layers: dict[int, float] = {}

    def add(self, program: torch.Tensor, reference: torch.Tensor, without: torch.Tensor) -> None:
        """Add a position.

        Args:
            program: Logits of the program [batch, vocab].
            reference: Logits of the reference, which rounds as the program does.
            without: Logits of the model without rounding.
        """
        self._of_program.append(_divergence(program, without))
        self._of_reference.append(_divergence(reference, without))
        effect = logit_differences(reference, without)
        self._largest = max(self._largest, effect.abs().max().item())
        self._rms = max(self._rms, effect.square().mean(-1).max().sqrt().item())

    def add_layers(self, session: Session, rounds: Reference, exact: Reference, start: int = 0) -> None:
        """Compare keys and values of each layer from position `start`, after the program was fed the tokens of `exact`.

        Layers that the runtime does not give out, or keeps in another form than the model, are left out.
        """
        tokens = int(session.length[0])
        for index, layer in enumerate(session.layers):
            first, without = rounds.first_position(index), exact.first_position(index)
            if first is None or without is None or layer.storage is None:
                continue
            held = layer.policy.positions(torch.tensor([[tokens]]))[0]
            positions = held[(held >= max(first, without, start)) & (held < tokens)].sort().values
            found = stored_rows(session, index, positions)
            if found is None:
                continue
            sides = zip(found, rounds.rows(index, positions), exact.rows(index, positions), strict=True)
            for program, reference, rows in sides:
                if not program.shape == reference.shape == rows.shape or not program.numel():
                    continue
                expected = rows.double()
                of_program, of_reference = (
                    (side.to(expected.device).double() - expected).square().mean((1, 2))
                    for side in (program, reference)
                )
                ratio = _ratio(of_program, of_reference, self._equal**2 * expected.square().mean().item())
                self._layers[index] = largest([ratio, self._layers.get(index, 0.0)])

    def limits(self, tolerance: float, spread: float) -> RoundingLimits:
        """Return the limits.

        Args:
            tolerance: Largest |logit difference| of two correct programs that do not round.
            spread: Largest standard deviation over the vocabulary of any position's logits.
        """

        def limit(effect: float) -> float | None:
            most = max(tolerance, _TIMES_ROUNDING * effect)
            return most if most <= max(tolerance, spread) else None

        program, reference = torch.cat(self._of_program), torch.cat(self._of_reference)
        ratios = list(self._layers.values())
        distance = RoundingDistance(
            divergence=program.mean().item(),
            of_reference=reference.mean().item(),
            ratio=_ratio(program, reference, tolerance**2 / 2),
            limit=LIMIT,
            effect=self._largest,
            layers=len(ratios),
            largest=largest(ratios) if ratios else None,
            failed=tuple(index for index, ratio in self._layers.items() if not ratio <= LIMIT),
        )
        return RoundingLimits(limit(self._largest), limit(self._rms), distance)
