"""The `aoti` target: its options, and methods compiled ahead of time over one set of weights and one cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ...cache.attention import ATTENTION
from ..base import LoweredFile
from ..options import ResidentOptions
from .runner import AotiRunner

if TYPE_CHECKING:
    from ...program.program import Program
    from ...program.spec import ProgramSpec
    from ..base import ProgramDescription, Runner


@dataclass(frozen=True)
class AotiOptions(ResidentOptions):
    """Options of target `aoti`: those of every resident program.

    A bucket adds compile time and the code of one layer of each kind.
    """

    target: ClassVar[str] = "aoti"


CODE = "program.pt2"
CONSTANTS = "constants.pt"
TABLE = "regions.json"


class AotiBackend:
    """AOTInductor packages: shared libraries that need torch's libraries, but no Python."""

    name = "aoti"
    packages = ("torch",)
    max_batch_size = None
    sums_over_ranks = True

    machine_code = "machine code that AOTInductor has compiled"
    options = AotiOptions

    def program_spec(self, asked: ProgramSpec, options: AotiOptions) -> ProgramSpec:
        """Return the program for a requested one, see `Backend.program_spec`."""
        return replace(options.program_spec(asked), attention=ATTENTION, takes_lengths=True)

    def lower(self, program: Program, folder: Path, options: AotiOptions) -> list[LoweredFile]:
        """Write the program's files to `folder`."""
        from .package import compile_methods, write_constants

        exported = {name: program.export(name) for name in program.methods}
        table, tensors = compile_methods(folder / CODE, exported)
        table.write(folder / TABLE)
        write_constants(folder / CONSTANTS, program, tensors)
        return [
            LoweredFile(CODE, f"machine code of methods {', '.join(exported)}"),
            LoweredFile(TABLE, "the machine code that each method calls"),
            LoweredFile(CONSTANTS, "weights; shapes of the cache"),
        ]

    def open(self, folder: Path, description: ProgramDescription) -> Runner:
        """Open the files that `lower` wrote."""
        return AotiRunner(folder / CODE, folder / TABLE, folder / CONSTANTS, description)


backend = AotiBackend()
