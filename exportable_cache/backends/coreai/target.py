"""The `coreai` target: its options; programs of Apple's Core AI, `.aimodel`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ...cache.attention import ATTENTION
from ..base import LoweredFile
from ..options import ResidentOptions
from .convert import check_integers, check_symmetric, convert, gathered_layers
from .runner import CoreAIRunner, check_calls

if TYPE_CHECKING:
    from ...program.program import Program
    from ...program.spec import ProgramSpec
    from ..base import ProgramDescription, Runner


@dataclass(frozen=True)
class CoreAIOptions(ResidentOptions):
    """Options of target `coreai`: those of every resident program."""

    target: ClassVar[str] = "coreai"


FOLDER = "program.aimodel"


class CoreAIBackend:
    """One `.aimodel` with a function for each method, over one copy of the weights and one cache."""

    name = "coreai"
    packages = ("coreai-core",)
    max_batch_size = None
    # Not 4 bits: the converter stores them, and the runtime on Linux (1.0.0b3) aborts in a prompt.
    linear_schemes = ("8w",)
    embedding_schemes = ("8w",)
    machine_code = "programs for Apple's Core AI runtime"
    options = CoreAIOptions

    def program_spec(self, asked: ProgramSpec, options: CoreAIOptions) -> ProgramSpec:
        """Return the program for a requested one, see `Backend.program_spec`."""
        return replace(
            options.program_spec(asked),
            attention=ATTENTION,
            # Batched products, because Core AI has no grouped ones of tensors whose sizes are values.
            experts="batched_mm",
            takes_lengths=True,
            adapt=gathered_layers,
            adapts_items=True,
        )

    def lower(self, program: Program, folder: Path, options: CoreAIOptions) -> list[LoweredFile]:
        """Write the program's files to `folder`.

        Raises:
            UnsupportedModelError: If a weight has zero points, an integer has more than 32 bits, or the converter or
                the runtime refuses a method.
        """
        check_symmetric(program.model)
        check_integers(program.model)
        exported = {name: program.export(name) for name in program.methods}
        convert(exported, program.methods).save_asset(folder / FOLDER)
        check_calls(folder / FOLDER, program)
        holds = f"methods {', '.join(exported)}, weights"
        return [
            LoweredFile(str(path.relative_to(folder)), holds if path.suffix == ".mlirb" else "checksum and description")
            for path in sorted((folder / FOLDER).rglob("*"))
            if path.is_file()
        ]

    def open(self, folder: Path, description: ProgramDescription) -> Runner:
        """Open the files that `lower` wrote."""
        return CoreAIRunner(folder / FOLDER, description)


backend = CoreAIBackend()
