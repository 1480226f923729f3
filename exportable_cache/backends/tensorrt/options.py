"""Options of target `tensorrt`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...common.settings import setting
from ...errors import InputError
from ..options import TargetOptions
from .capabilities import parse_capabilities


@dataclass(frozen=True)
class TensorRTOptions(TargetOptions):
    """
    Attributes:
        opt_length: New tokens per prefill that TensorRT optimises for; the longest chunk by default.
        sm: Compute capabilities to build for, as "80,86,89,120"; by default a portable plan.
    """

    target: ClassVar[str] = "tensorrt"

    opt_length: int | None = None
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
        length = self.opt_length
        if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 2):
            raise InputError(
                f"opt_length is {length!r}; it must be an int of at least 2, within the length of a prefill"
            )

    @property
    def capabilities(self) -> tuple[int, ...]:
        """`sm` as sorted numbers, none for a portable plan."""
        return parse_capabilities(self.sm)
