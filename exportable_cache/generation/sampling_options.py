"""The options of sampling, checked. Nothing here imports torch, so that a program can start without it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ..errors import InputError

_Options = TypeVar("_Options", bound="SamplingOptions")
#: Values of the limits that keep all tokens.
_NO_LIMIT = {"top_k": 0, "top_p": 1, "min_p": 0}


def check_seed(seed: int) -> None:
    """Check that torch's generators take `seed`.

    Raises:
        InputError: If it is not an int from -2**63 to 2**64 - 1.
    """
    if not _is_int(seed) or not -(2**63) <= seed < 2**64:
        raise InputError(f"seed must be an int from {-(2**63)} to {2**64 - 1}, got {seed!r}")


@dataclass(frozen=True)
class SamplingOptions:
    """Settings for choosing tokens, see `Sampling`.

    Attributes:
        temperature: Divisor of the logits; 0 takes the most probable token.
        top_k: Draw from the k most probable tokens; None for all.
        top_p: Draw from the smallest set of most probable tokens whose probability reaches p; None for all. Applied
            after `top_k`.
        min_p: Draw from tokens at least p times as probable as the most probable one; None for all (Nguyen et al.
            2024).
        repetition_penalty: If above 1, tokens of the prompt and of the generation so far become less likely; see
            `penalise`.
        seed: Seed of the draws; None uses torch's global generator.

    Raises:
        InputError: If a value is out of range, or greedy choice would ignore it.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not math.isfinite(self.temperature) or self.temperature < 0:
            raise InputError(f"temperature must be a number of at least 0 (0 is greedy), got {self.temperature!r}")
        if self.top_k is not None and (not _is_int(self.top_k) or self.top_k < 1):
            raise InputError(f"top_k must be an int of at least 1, or None for all tokens, got {self.top_k!r}")
        if self.top_p is not None and (not _is_number(self.top_p) or not 0 < self.top_p <= 1):
            raise InputError(f"top_p must be above 0 and at most 1, or None for all tokens, got {self.top_p!r}")
        if self.min_p is not None and (not _is_number(self.min_p) or not 0 <= self.min_p <= 1):
            raise InputError(f"min_p must be from 0 to 1, or None for all tokens, got {self.min_p!r}")
        penalty = self.repetition_penalty
        if penalty is not None and (not _is_number(penalty) or not math.isfinite(penalty) or penalty <= 0):
            raise InputError(f"repetition_penalty must be a number above 0 (1 changes nothing), got {penalty!r}")
        if self.seed is not None:
            check_seed(self.seed)
        ignored = [f"{name}={getattr(self, name)}" for name in _NO_LIMIT if getattr(self, name) is not None]
        if self.temperature == 0 and ignored:
            raise InputError(
                f"temperature must be above 0 with {' and '.join(ignored)}, got 0, which is greedy; pass a "
                "temperature, or leave them out"
            )

    def over(self: _Options, **given: Any) -> _Options:
        """Return these options with given values in place of theirs.

        A temperature of 0 also removes the limits of these options, which greedy choice ignores.

        Args:
            **given: Values of attributes; None leaves a value unchanged. `top_k=0`, `top_p=1` and `min_p=0` remove a
                limit.

        Raises:
            InputError: If a value is out of range, or greedy choice would ignore it.
        """
        chosen: dict[str, Any] = dict.fromkeys(_NO_LIMIT) if given.get("temperature") == 0 else {}
        for name, value in given.items():
            if value is not None:
                keeps_all = name in _NO_LIMIT and _is_number(value) and value == _NO_LIMIT[name]
                chosen[name] = None if keeps_all else value
        return replace(self, **chosen)

    @property
    def is_greedy(self) -> bool:
        """True if the most probable token is always taken."""
        return self.temperature == 0


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
