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
    """Options of target `pt2`.

    Attributes:
        form: `resident` (the default: the program contains the cache and updates it in place) or `explicit` (the cache
            is an input and an output).
        strict: Trace through TorchDynamo.
        buckets: Read lengths with a separate method, so that short sequences take less time, see `ProgramSpec`. Each
            adds its graph to the file, but no weights.
        score_length: If not 0, add a method that returns logits after each of up to this many tokens, for speculative
            decoding.
        shift: Add the method `shift`, which drops old tokens of a full cache, see `Session.shift`.
    """

    target: ClassVar[str] = "pt2"

    form: Form | str = Form.RESIDENT
    strict: bool = setting(False, "Trace through TorchDynamo.", kind=bool)
    buckets: Sequence[int] = ()
    score_length: int = 0
    shift: bool = setting(False, "Add a method that drops old tokens when the cache is full.", kind=bool)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.program_spec(ProgramSpec())

    def program_spec(self, asked: ProgramSpec) -> ProgramSpec:
        """Return the program for these options."""
        return replace(asked, form=self.form, buckets=self.buckets, score_length=self.score_length, shift=self.shift)
