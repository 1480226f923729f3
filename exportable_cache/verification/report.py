"""What a verification saw: every prompt, its differences, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from ..errors import BundleError
from .stored import StoredDistance


@dataclass(frozen=True)
class VerifiedPrompt:
    """One prompt and the steps after it.

    Attributes:
        length: Tokens of the prompt.
        chunks: Steps that the program took for them, over both parts where they were fed in two.
        decode_steps: Single tokens fed after it.
        max_difference: Largest |logit difference|; not a number if either side produced one.
        argmax_agreement: Share of positions whose most probable token is the same. Reported, not judged: ties flip.
        rms_difference: Root mean square of the logit differences of a position, of the one where it is largest; None in
            reports of before.
    """

    length: int
    chunks: int
    decode_steps: int
    max_difference: float
    argmax_agreement: float
    rms_difference: float | None = None


@dataclass(frozen=True)
class VerifiedEncoder:
    """One method, on items of random numbers.

    Attributes:
        method: `encode_image` or `encode_audio`.
        max_difference: Largest |difference| of an embedding's values; not a number if either side produced one.
        tolerance: The limit.
    """

    method: str
    max_difference: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.max_difference <= self.tolerance

    def __str__(self) -> str:
        return f"{self.method} {self.max_difference:.1e} {'<=' if self.passed else 'exceeds'} {self.tolerance:.0e}"


@dataclass(frozen=True)
class VerifyReport:
    """What a verification saw.

    Attributes:
        passed: Whether every difference is a number and at most `tolerance`, every position's root mean square at most
            `rms_tolerance`, and every encoder's difference at most its own.
        max_difference: Largest |logit difference| of all; not a number if any is not.
        tolerance: The limit.
        prompts: One entry per prompt, shortest first.
        steps: Positions compared, over all prompts and rows.
        windows: Sliding windows that were passed; of layers with attention sinks, all that they keep.
        target: What was verified.
        remark: What the result does not cover, where the program itself was not run.
        encoders: Of images and sound, one entry each.
        stored: How far the model in the dtype its weights are stored in is, where the program is in another. Not
            judged.
        at_once: Whether all prompts began one sequence, which the reference took as a whole, as it does for large
            models.
        rms_tolerance: The limit of each position's root mean square, where activations are quantised.
        spread: Standard deviation of the reference's logits over the vocabulary, of the position where it is largest;
            None in reports of earlier releases.
    """

    passed: bool
    max_difference: float
    tolerance: float
    prompts: tuple[VerifiedPrompt, ...]
    steps: int
    windows: tuple[int, ...]
    target: str
    remark: str = ""
    encoders: tuple[VerifiedEncoder, ...] = ()
    stored: StoredDistance | None = None
    at_once: bool = False
    rms_tolerance: float | None = None
    spread: float | None = None

    @classmethod
    def recorded(cls, fields: Mapping[str, Any]) -> VerifyReport:
        """Return what `to_dict` gave, of a manifest that may be a stranger's.

        Raises:
            BundleError: If it is something else.
        """
        # Differences that are not a number are null in JSON.
        numbers = {name: math.nan for name in ("max_difference", "tolerance") if fields.get(name, 0) is None}
        try:
            return TypeAdapter(cls).validate_python({**fields, **numbers})
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, ("verification", *first["loc"])))
            raise BundleError(f"the manifest is damaged: {where}: {first['msg']}; export the model again") from error

    @property
    def rms_difference(self) -> float | None:
        """Largest of the prompts'; None in reports of before."""
        found = [prompt.rms_difference for prompt in self.prompts if prompt.rms_difference is not None]
        return largest(found) if found else None

    def __post_init__(self) -> None:
        # As `to_dict` gives them, so that a recorded report can be read back: `VerifyReport(**recorded)`.
        prompts = (VerifiedPrompt(**prompt) if isinstance(prompt, Mapping) else prompt for prompt in self.prompts)
        object.__setattr__(self, "prompts", tuple(prompts))
        object.__setattr__(self, "windows", tuple(self.windows))
        encoders = (
            VerifiedEncoder(**encoder) if isinstance(encoder, Mapping) else encoder for encoder in self.encoders
        )
        object.__setattr__(self, "encoders", tuple(encoders))
        if isinstance(self.stored, Mapping):
            object.__setattr__(self, "stored", StoredDistance(**self.stored))

    def to_dict(self) -> dict[str, Any]:
        """JSON; a difference that is not a number is null."""
        return _jsonable(asdict(self))

    def _root_mean_square(self) -> str:
        difference, limit = self.rms_difference, self.rms_tolerance
        if difference is None or limit is None:
            return ""
        return f", root mean square {difference:.1e} {'<=' if difference <= limit else 'exceeds'} {limit:.0e}"

    def __str__(self) -> str:
        lengths = ", ".join(str(prompt.length) for prompt in self.prompts)
        windows = f", past the window of {' and '.join(map(str, self.windows))}" if self.windows else ""
        sign = "<=" if self.max_difference <= self.tolerance else "exceeds"
        return (
            f"{'verified' if self.passed else 'NOT verified'}: {self.steps} positions, prompts of {lengths} "
            f"tokens{windows}, max |logit difference| {self.max_difference:.1e} {sign} {self.tolerance:.0e}"
            + self._root_mean_square()
            + "".join(f", {encoder}" for encoder in self.encoders)
            + (f"; {self.stored}" if self.stored is not None else "")
            + (", beginnings of one sequence" if self.at_once else "")
            + (f"; {self.remark}" if self.remark and self.passed else "")
        )


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def largest(values: Sequence[float]) -> float:
    """Not a number if any is not, which Python's `max` does not keep."""
    return torch.tensor(values, dtype=torch.float64).max().item()
