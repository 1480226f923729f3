"""Options of target `aoti`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..options import ResidentOptions


@dataclass(frozen=True)
class AotiOptions(ResidentOptions):
    """Options of target `aoti`: those of every resident program.

    A bucket adds compile time and the code of one layer of each kind.
    """

    target: ClassVar[str] = "aoti"
