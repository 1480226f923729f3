"""Options of target `aoti`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ...program.spec import Form, ProgramSpec
from ..options import TargetOptions


@dataclass(frozen=True)
class AotiOptions(TargetOptions):
    """
    Attributes:
        buckets: Read lengths that get methods of their own, see `ProgramSpec`. Each adds the code of a layer of each
            kind, and of what runs before the layers, to time and file, but no weights.
        score_length: Add a method that gives logits after each of up to this many tokens, for speculative decoding.
    """

    target: ClassVar[str] = "aoti"

    buckets: Sequence[int] = ()
    score_length: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.program_spec(ProgramSpec())

    def program_spec(self, asked: ProgramSpec) -> ProgramSpec:
        """What these options make of a program."""
        return replace(asked, form=Form.RESIDENT, buckets=self.buckets, score_length=self.score_length)
