"""Options of target `coreai`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..options import ResidentOptions


@dataclass(frozen=True)
class CoreAIOptions(ResidentOptions):
    """Options of target `coreai`: those of every resident program."""

    target: ClassVar[str] = "coreai"
