"""Options of target `pt2`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ...common.settings import setting
from ...program.spec import Form, ProgramSpec
from ..options import TargetOptions


@dataclass(frozen=True)
class Pt2Options(TargetOptions):
    """
    Attributes:
        form: `resident` (default: the cache is inside, updated in place) or `explicit` (the cache is an input and an
            output, in its pytree form, for runtimes that pass state along).
        strict: Trace through TorchDynamo.
        buckets: Read lengths that get methods of their own, so that a step costs what the filled part of the cache
            costs, see `ProgramSpec`; each method adds its graph to the file, not its weights.
        score_length: Add a method that gives logits after each of up to this many tokens, for speculative decoding.
    """

    target: ClassVar[str] = "pt2"

    form: Form | str = Form.RESIDENT
    strict: bool = setting(False, "Trace through TorchDynamo.", kind=bool)
    buckets: Sequence[int] = ()
    score_length: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.program_spec(ProgramSpec())

    def program_spec(self, asked: ProgramSpec) -> ProgramSpec:
        """What these options make of a program."""
        return replace(asked, form=self.form, buckets=self.buckets, score_length=self.score_length)
