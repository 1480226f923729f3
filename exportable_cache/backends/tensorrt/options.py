"""Options of target `tensorrt`, with the compute capabilities that a plan is built for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ...common.settings import setting
from ...errors import InputError
from ...program.spec import ProgramSpec
from ..options import TargetOptions

if TYPE_CHECKING:
    import torch

    from ...models.quantization.spec import Quantization

#: Compute capabilities that TensorRT-RTX 1.5 builds for, on any machine. It has no name for 90.
CAPABILITIES = (75, 80, 86, 89, 120, 121)

#: What plans are, for people who are asked to trust a bundle.
MACHINE_CODE = "plans of TensorRT (code for a GPU)"

#: What a verification says of float32 products on a GPU.
TF32_REMARK = "TensorRT-RTX multiplies float32 in TF32, with 10 bits"

#: Whether methods share an engine.
ENGINES = ("shared", "separate")

#: Capabilities from which TensorRT builds 4-bit weights, and bfloat16.
LEAST_INT4 = LEAST_BFLOAT16 = 80
#: Capabilities from which TensorRT builds float8, and 4-bit floats.
LEAST_FLOAT8, LEAST_FLOAT4 = 89, 120
#: Schemes of floats -> capability from which TensorRT builds them, the floats' name, and the scheme for older GPUs.
_FLOATS = {"fp8": (LEAST_FLOAT8, "float8", "8w"), "nvfp4": (LEAST_FLOAT4, "4-bit floats", "4w")}

#: Portable plans load on these and later ones, according to its documentation.
PORTABLE = (80, 86, 89, 120)
#: Hopper is not in the documentation, but an H200 loaded and ran portable plans and plans for 80 (docs/gpu.md).
HOPPER = 90


def parse_capabilities(given: Any) -> tuple[int, ...]:
    """Return `"80,86"`, `80`, `[80, 86]` or None (the portable default) as sorted numbers.

    Raises:
        InputError: If a number is not in `CAPABILITIES`, or the list is empty.
    """
    if given is None:
        return ()
    parts = given.split(",") if isinstance(given, str) else list(given) if isinstance(given, (list, tuple)) else [given]
    known = {str(capability): capability for capability in CAPABILITIES}
    # 8.6, 86 and sm86 are equal.
    names = [str(part).strip().lower().removeprefix("sm").removeprefix("_").replace(".", "") for part in parts]
    unknown = [part for part, name in zip(parts, names, strict=True) if name not in known]
    if unknown or not parts:
        raise InputError(
            f"sm must be one or more of {', '.join(known)}, such as '80,89', got {given!r}; or omit it for a plan that "
            "loads on every GPU from 80 on except 100"
        )
    return tuple(sorted({known[name] for name in names}))


def describe_capabilities(capabilities: tuple[int, ...] | list[int]) -> str:
    """Return text such as `SM 80, 86`, or the portable default."""
    if not capabilities:
        return f"SM {', '.join(map(str, PORTABLE))} and later"
    return f"SM {', '.join(map(str, capabilities))}"


def loads_on(here: int, capabilities: Sequence[int]) -> bool:
    """Return True if a plan loads on a GPU.

    Args:
        here: Compute capability of the GPU, such as 86.
        capabilities: What the plan was built for; empty for the portable default.
    """
    if here == HOPPER:
        return not capabilities or 80 in capabilities
    return here in capabilities or (not capabilities and here in PORTABLE) or here >= PORTABLE[-1]


def least_capability(scheme: str | None) -> int:
    """Return the capability from which TensorRT builds the floats of a scheme of linear layers; 0 for any."""
    return _FLOATS[scheme][0] if scheme in _FLOATS else 0


def remedy_for(here: int) -> str:
    """Return what makes a plan for a GPU of capability `here`, such as 86."""
    if here in CAPABILITIES:
        return f"export again with sm={here}"
    return "export again without sm" if here == HOPPER else "TensorRT-RTX builds no plan for it; use another GPU"


@dataclass(frozen=True)
class TensorRTOptions(TargetOptions):
    """Options of target `tensorrt`.

    Attributes:
        opt_length: New tokens per prefill that TensorRT optimizes for; the longest chunk by default.
        engines: "shared" for one engine with a range of lengths for each method, if the model has no recurrent layers;
            "separate" for an engine per method, which stores the weights twice and writes rings in place.
        score_length: If not 0, add a method `forward` that returns logits after each of up to this many tokens, for
            speculative decoding. It shares the engine, so a prompt computes logits of that many tokens, too.
        sm: Compute capabilities to build for, as "80,86,89,120"; by default a portable plan.
    """

    target: ClassVar[str] = "tensorrt"

    opt_length: int | None = None
    score_length: int = 0
    engines: str = setting(
        "shared",
        "With TensorRT: separate builds a plan for each method, each with its own copy of the weights.",
        choices=ENGINES,
    )
    sm: str | int | Sequence[int | str] | None = setting(
        None,
        "With TensorRT: compute capabilities to build for, such as 80,86,89,120.",
        flags=("--sm",),
        metavar="LIST",
        shown_default="a portable plan",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_capabilities(self.sm)
        ProgramSpec(score_length=self.score_length)
        length = self.opt_length
        if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 2):
            raise InputError(
                f"opt_length must be an int of at least 2, within the length of a prefill, got {length!r}; leave it out"
            )

    def check_quantization(self, quantization: Quantization) -> None:
        """See `TargetOptions.check_quantization`."""
        least, floats, other = _FLOATS.get(quantization.linear or "", (0, "", ""))
        if any(capability < least for capability in self.capabilities or PORTABLE):
            given = ", ".join(map(str, self.capabilities)) or f"none, which is a plan for SM {PORTABLE[0]} and later"
            fitting = ",".join(str(one) for one in PORTABLE if one >= least)
            raise InputError(
                f"sm must be {least} and later with quantize={quantization.linear!r}, because older GPUs have no "
                f"{floats}, got {given}; pass sm='{fitting}' (--sm), or use {other!r}"
            )
        lacking = [capability for capability in self.capabilities if capability < LEAST_INT4]
        if lacking and quantization.linear == "4w":
            raise InputError(
                f"quantize must be '8w' for SM {', '.join(map(str, lacking))}, got '4w', because TensorRT builds 4-bit "
                f"weights for SM {LEAST_INT4} and later; use '8w', or leave {', '.join(map(str, lacking))} out of sm"
            )

    def check_dtype(self, dtype: torch.dtype) -> None:
        """See `TargetOptions.check_dtype`; TensorRT would build for minutes and fail."""
        from torch import bfloat16

        lacking = ", ".join(str(capability) for capability in self.capabilities if capability < LEAST_BFLOAT16)
        if lacking and dtype == bfloat16:
            raise InputError(
                f"dtype must be float16 or float32 for SM {lacking}, got bfloat16, which TensorRT builds for SM "
                f"{LEAST_BFLOAT16} and later; pass dtype='float16' (--dtype float16), or leave {lacking} out of sm"
            )

    @property
    def capabilities(self) -> tuple[int, ...]:
        """`sm` as sorted numbers, empty for a portable plan."""
        return parse_capabilities(self.sm)
