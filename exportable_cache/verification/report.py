"""Report of a verification: the differences of each prompt, those from the stored dtype, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from pydantic import TypeAdapter, ValidationError

from ..errors import BundleError

if TYPE_CHECKING:
    from ..bundle.manifest import Manifest
    from ..cache.spec import Sinks


@dataclass(frozen=True)
class VerifiedPrompt:
    """Result for one prompt and the steps after it.

    Attributes:
        length: Tokens of the prompt.
        chunks: Prefill steps of the program, in all parts.
        decode_steps: Single tokens fed after the prompt.
        max_difference: Largest |logit difference|; NaN if either side produced one.
        argmax_agreement: Share of positions with the same most probable token. Not part of the verdict, because ties
            flip.
        rms_difference: Largest root mean square of a position's logit differences; None in older reports.
        placed: Number of its tokens that were not read: keys and values of others were placed in their slots.
    """

    length: int
    chunks: int
    decode_steps: int
    max_difference: float
    argmax_agreement: float
    rms_difference: float | None = None
    placed: int = 0


@dataclass(frozen=True)
class VerifiedEncoder:
    """Result for one encoder, on random items.

    Attributes:
        method: Name of the method, such as `encode_image`.
        max_difference: Largest |difference| of the embeddings; NaN if either side produced one.
        tolerance: Limit of the difference.
    """

    method: str
    max_difference: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """True if the difference is within the tolerance."""
        return self.max_difference <= self.tolerance

    def __str__(self) -> str:
        return f"{self.method} {self.max_difference:.1e} {'<=' if self.passed else 'exceeds'} {self.tolerance:.0e}"


@dataclass(frozen=True)
class RoundingDistance:
    """Distances from the model that rounds neither activations nor keys and values.

    Attributes:
        divergence: Mean KL divergence of the program's tokens over the positions.
        of_reference: The same of the reference, which rounds as the program does.
        ratio: Geometric mean over the positions of the square root of the one divided by the other; NaN if either side
            produced one.
        limit: Limit of the ratio.
        effect: Largest |logit difference| that rounding makes in the reference.
        layers: Number of layers whose keys and values were compared in the same way, by their mean squares.
        largest: Largest mean ratio of the keys or the values of a layer; None if none was compared.
        failed: Indices of layers whose ratio exceeds the limit.
    """

    divergence: float
    of_reference: float
    ratio: float
    limit: float
    effect: float
    layers: int = 0
    largest: float | None = None
    failed: tuple[int, ...] = ()

    @property
    def passed(self) -> bool:
        """True if the program is not further away than the reference."""
        return self.ratio <= self.limit and not self.failed

    def __str__(self) -> str:
        sign = "<=" if self.ratio <= self.limit else "exceeds"
        text = (
            f"KL divergence from the model without rounding {self.divergence:.1e} (the reference's "
            f"{self.of_reference:.1e}), ratio of distances {self.ratio:.2f} {sign} {self.limit}"
        )
        if self.layers:
            text += f", of keys and values in {self.layers} layers up to {self.largest:.2f}"
        if self.failed:
            text += f", which exceeds the limit in {'layer' if len(self.failed) == 1 else 'layers'} "
            text += ", ".join(map(str, self.failed))
        return text


@dataclass(frozen=True)
class VerifyReport:
    """Result of a verification.

    Attributes:
        passed: True if no difference is NaN, each is at most `tolerance`, each position's root mean square is at most
            `rms_tolerance`, the distance from the model without rounding is within its limit, and each encoder's
            difference is within its tolerance.
        max_difference: Largest |logit difference|; NaN if any is NaN.
        tolerance: Limit of the difference; None if rounding alone may change a logit by more than `spread`.
        prompts: One entry per prompt, shortest first.
        steps: Positions compared, over all prompts and rows.
        windows: Sliding windows that were exceeded; for layers with attention sinks, the number of tokens they keep.
        target: Target of the program.
        remark: Note on what the result does not cover, if the program itself was not run.
        encoders: One entry per encoder of images, video or audio.
        stored: Distance from the model in the dtype of its stored weights, if the program has another. Not part of the
            verdict.
        at_once: True if all prompts are prefixes of one sequence, which the reference computed in one pass, as for
            large models.
        rms_tolerance: Limit of each position's root mean square, if activations, or keys and values, are rounded.
        spread: Largest standard deviation over the vocabulary of a position's reference logits; None in older reports.
        runtime: What ran the program: "native" for the native runner, "torch" for a session; "" if not recorded.
        rounding: Distance from the model without rounding, if the program rounds activations, or keys and values, and
            no tolerance was given; None in older reports.
        unread: Number of last slots that no prompt reached, if the prompts were chosen by `VerifySpec`.
    """

    passed: bool
    max_difference: float
    tolerance: float | None
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
    runtime: str = ""
    rounding: RoundingDistance | None = None
    unread: int = 0

    @classmethod
    def recorded(cls, fields: Mapping[str, Any]) -> VerifyReport:
        """Read the output of `to_dict` from a manifest, which may be untrusted.

        Raises:
            BundleError: If it is invalid.
        """
        # NaN is null in JSON.
        numbers = {"max_difference": math.nan} if fields.get("max_difference", 0) is None else {}
        try:
            return TypeAdapter(cls).validate_python({**fields, **numbers})
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, ("verification", *first["loc"])))
            raise BundleError(f"the manifest is damaged: {where}: {first['msg']}; export the model again") from error

    @property
    def rms_difference(self) -> float | None:
        """Largest root mean square of all prompts; None in older reports."""
        found = [prompt.rms_difference for prompt in self.prompts if prompt.rms_difference is not None]
        return largest(found) if found else None

    def __post_init__(self) -> None:
        # Accepts the output of `to_dict`, so that a recorded report can be read: `VerifyReport(**recorded)`.
        prompts = (VerifiedPrompt(**prompt) if isinstance(prompt, Mapping) else prompt for prompt in self.prompts)
        object.__setattr__(self, "prompts", tuple(prompts))
        object.__setattr__(self, "windows", tuple(self.windows))
        encoders = (
            VerifiedEncoder(**encoder) if isinstance(encoder, Mapping) else encoder for encoder in self.encoders
        )
        object.__setattr__(self, "encoders", tuple(encoders))
        if isinstance(self.rounding, Mapping):
            fields = {**self.rounding, "failed": tuple(self.rounding.get("failed", ()))}
            object.__setattr__(self, "rounding", RoundingDistance(**fields))
        if isinstance(self.stored, Mapping):
            object.__setattr__(self, "stored", StoredDistance(**self.stored))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values; NaN becomes null."""
        return _jsonable(asdict(self))

    def _root_mean_square(self) -> str:
        difference, limit = self.rms_difference, self.rms_tolerance
        if difference is None or limit is None:
            return ""
        return f", root mean square {difference:.1e} {'<=' if difference <= limit else 'exceeds'} {limit:.0e}"

    def _without_rounding(self) -> str:
        if self.rounding is None:
            return ""
        text = f", {self.rounding}"
        if self.tolerance is None:
            text += (
                f"; no limit for single logits, because rounding alone changes them by up to "
                f"{self.rounding.effect:.1f}, and their spread is {self.spread:.1f}"
            )
        return text

    def __str__(self) -> str:
        lengths = ", ".join(str(prompt.length) for prompt in self.prompts if not prompt.placed)
        ends = " and ".join(str(prompt.length + prompt.decode_steps) for prompt in self.prompts if prompt.placed)
        reached = f", up to {ends} over placed keys" if ends else ""
        reached += f", not the last {self.unread} slots" if self.unread else ""
        windows = f", past the window of {' and '.join(map(str, self.windows))}" if self.windows else ""
        limit = self.tolerance
        sign = "" if limit is None else f" {'<=' if self.max_difference <= limit else 'exceeds'} {limit:.0e}"
        return (
            f"{'verified' if self.passed else 'NOT verified'}: {self.steps} positions, prompts of {lengths} "
            f"tokens{reached}{windows}, max |logit difference| {self.max_difference:.1e}{sign}"
            + self._root_mean_square()
            + self._without_rounding()
            + "".join(f", {encoder}" for encoder in self.encoders)
            + (f"; {self.stored}" if self.stored is not None else "")
            + (", beginnings of one sequence" if self.at_once else "")
            + (f"; {self.remark}" if self.remark and self.passed else "")
        )


def distance_from_model(manifest: Manifest) -> float | None:
    """Return the largest recorded |logit difference| from the model with exact weights and cache; None if not measured.

    The distance of quantized weights is measured over the cache of the program, so it includes that of the cache.
    """
    for rounded in (manifest.quantization, manifest.kv_cache):
        if rounded is not None:
            return rounded.max_difference
    recorded = manifest.verification or {}
    return (recorded.get("stored") or recorded).get("max_difference")


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def largest(values: Sequence[float]) -> float:
    """Return the largest value, or NaN if any is NaN, which Python's `max` does not propagate."""
    return torch.tensor(values, dtype=torch.float64).max().item()


#: Steps after each prompt whose logits are kept, few because the stored model must run them too.
KEPT_STEPS = 8


@dataclass(frozen=True)
class FedPrompt:
    """A prompt that was verified, with the program's logits.

    Attributes:
        length: Tokens of the prompt.
        ids: int64 [batch, length + steps], the prompt and the tokens after it.
        sinks: Attention sinks of the full-attention layers; None if they kept every token.
        encoder_inputs: Inputs of the encoder by name, for an encoder-decoder.
        logits: Logits of the program, [steps + 1, batch, vocab].
        without: The same of the model without rounding; None if it was not run.
        at_once: True if all prompts are prefixes of one sequence, so that one pass of a model computes their logits.
    """

    length: int
    ids: torch.Tensor
    sinks: Sinks | None
    encoder_inputs: dict[str, torch.Tensor] | None
    logits: torch.Tensor
    at_once: bool = False
    without: torch.Tensor | None = None

    @property
    def steps(self) -> int:
        """Number of tokens after the prompt."""
        return self.ids.shape[1] - self.length


@dataclass(frozen=True)
class Distance:
    """Distance of a program's logits from those of a model.

    Attributes:
        positions: Positions compared, over all prompts and rows.
        max_difference: Largest |logit difference|; NaN if either side produced one.
        argmax_agreement: Share of positions with the same most probable token.
    """

    positions: int
    max_difference: float
    argmax_agreement: float


@dataclass(frozen=True)
class StoredDistance:
    """Distance of a program from the model in the dtype of its stored weights.

    Attributes:
        dtype: The stored dtype.
        positions: Positions compared, over all prompts and rows.
        max_difference: Largest |logit difference|; NaN if either side produced one.
    """

    dtype: str
    positions: int
    max_difference: float

    def __str__(self) -> str:
        return f"{self.max_difference:.1e} from the model as stored in {self.dtype} ({self.positions} positions)"
