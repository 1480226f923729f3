"""Options of a verification.

Importing this module imports no torch: the command line makes its options from the fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..common.settings import check_settings, setting
from ..errors import InputError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class VerifySpec:
    """Options for comparing a program with its model.

    `VerifySpec(prompts=(40,), decode_steps=8)` feeds 40 tokens, then 8 one by one.

    Attributes:
        tolerance: Largest |logit difference| to accept. By default `default_tolerance`, which depends on dtype and
            spread of the logits. If activations, or keys and values, are rounded, the default limits follow from the
            effect of rounding, see `tolerance.Roundings`; a given tolerance is the only limit.
        prompts: Prompt lengths; by default `default_prompts`, and one that fills the cache or the model's positions if
            that is at most 4096 tokens over all rows.
        decode_steps: Single tokens after each prompt; by default `default_decode_steps`. The prompt that fills the
            cache has none.
        seed: Seed of the random tokens.
        rounded: Dtype that linear layers round their inputs to, for the default tolerance; None for the model's dtype.
        exact_cache: If True, the model's cache is exact even if the session's is quantised.
        full: If True, a prompt of any length fills the cache, and large models read every token of it; see
            `prompts.read_and_placed`.

    Raises:
        InputError: If a tolerance is not above 0, or the seed has more than 64 bits. `compare` checks if prompts fit.
    """

    tolerance: float | None = setting(
        None,
        "Largest |logit difference| to accept.",
        flags=("--tolerance",),
        metavar="X",
        kind=float,
        shown_default="from dtype and spread of the logits, at least 1e-4 in float32",
    )
    prompts: Sequence[int] | None = None
    decode_steps: int | None = setting(
        None,
        "Tokens to feed one by one after each prompt.",
        flags=("--decode-steps",),
        metavar="N",
        kind=int,
        shown_default="past every window",
    )
    seed: int = setting(0, "Seed of the random tokens.", flags=("--seed",), metavar="N", kind=int)
    rounded: torch.dtype | None = None
    exact_cache: bool = False
    full: bool = setting(
        False,
        "Read every token up to the last slot, also of models and caches that are large.",
        flags=("--full",),
        kind=bool,
    )

    def __post_init__(self) -> None:
        from ..generation.sampling_options import check_seed

        check_settings(self)
        check_seed(self.seed)
        check_tolerance("tolerance", self.tolerance)


def check_tolerance(name: str, limit: float | None) -> None:
    """Check that a limit is above 0; None means the default.

    Raises:
        InputError: If it is out of range.
    """
    if limit is not None and not limit > 0:
        raise InputError(f"{name} must be above 0, got {limit}; leave it out for the default")
