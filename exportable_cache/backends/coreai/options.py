"""Options of target `coreai`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ...program.spec import Form, ProgramSpec
from ..options import TargetOptions


@dataclass(frozen=True)
class CoreAIOptions(TargetOptions):
    """Options of target `coreai`.

    Attributes:
        buckets: Read lengths with a separate method, see `ProgramSpec`. Each adds its graph to the file, and no
            weights.
        score_length: If not 0, add a method that returns logits after each of up to this many tokens, for speculative
            decoding.
    """

    target: ClassVar[str] = "coreai"

    buckets: Sequence[int] = ()
    score_length: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.program_spec(ProgramSpec())

    def program_spec(self, asked: ProgramSpec) -> ProgramSpec:
        """Return the program for these options."""
        return replace(asked, form=Form.RESIDENT, buckets=self.buckets, score_length=self.score_length)
