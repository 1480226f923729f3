"""How a verification is to be done: every option in one frozen value, checked where it is made.

Importing this module imports no torch: the command line makes its options from the fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..common.settings import check_settings, setting
from ..errors import InputError


@dataclass(frozen=True)
class VerifySpec:
    """How a program is compared with its model: `VerifySpec(prompts=(40,), decode_steps=8)` feeds 40 tokens, then 8.

    Attributes:
        tolerance: Largest |logit difference| that passes; by default `default_tolerance`, which follows from the dtype
            and the logits' spread, and for a session whose cache keeps 8 bits at least a quarter of what that rounding
            does to the logits: a value near the middle between two steps rounds either way.
        rms_tolerance: Largest root mean square of a position's logit differences that passes; None to judge none.
        prompts: Lengths; by default `default_prompts`, and one that fills the cache, or takes all of the model's
            positions, where that is at most 4096 tokens over all rows.
        decode_steps: Single tokens after each prompt; `default_decode_steps` by default. None follow the one that fills
            the cache.
        seed: Of the tokens.
        exact_cache: Let the model's cache keep what it is given, also where the session's keeps 8 bits.

    Raises:
        InputError: If a tolerance is not above 0, or the seed has more than 64 bits. Whether prompts fit is seen with
            the session.
    """

    tolerance: float | None = setting(
        None,
        "Largest |logit difference| to accept.",
        flags=("--tolerance",),
        metavar="X",
        kind=float,
        shown_default="by dtype and spread of the logits: at least 1e-4 in float32",
    )
    rms_tolerance: float | None = None
    prompts: Sequence[int] | None = None
    decode_steps: int | None = setting(
        None,
        "Tokens to feed one by one after each prompt.",
        flags=("--decode-steps",),
        metavar="N",
        kind=int,
        shown_default="past every window",
    )
    seed: int = setting(0, "Of the random tokens.", flags=("--seed",), metavar="N", kind=int)
    exact_cache: bool = False

    def __post_init__(self) -> None:
        from ..generation.sampling import check_seed

        check_settings(self)
        check_seed(self.seed)
        for name in ("tolerance", "rms_tolerance"):
            check_tolerance(name, getattr(self, name))


def check_tolerance(name: str, limit: float | None) -> None:
    """Refuse a limit that is not above 0; None is the default one.

    Raises:
        InputError: If it is out of range.
    """
    if limit is not None and not limit > 0:
        raise InputError(f"{name} must be above 0, got {limit}; leave it out for the default")
