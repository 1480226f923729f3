"""The `pt2` target: programs are traced by torch.export and run by torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...cache.attention import ATTENTION
from ...models.lora import LORA_TENSORS
from ...program.spec import Form
from ..base import LoweredFile
from .archive import read_archive, write_archive
from .options import Pt2Options
from .runner import ExplicitRunner, ResidentRunner

if TYPE_CHECKING:
    from ...program.program import Program
    from ...program.spec import ProgramSpec
    from ..base import ProgramDescription, Runner

FILE = "program.pt2"


class Pt2Backend:
    """Programs stored as torch.export graphs."""

    name = "pt2"
    packages = ("torch",)
    max_batch_size = None
    sums_over_ranks = True
    holds_adapters = True
    # No 4-bit schemes, because torch.export stores 4-bit weights in 8 bits each.
    linear_schemes = ("8w", "8da8w", "keep")
    embedding_schemes = ("8w",)

    machine_code = ""
    options = Pt2Options

    def program_spec(self, asked: ProgramSpec, options: Pt2Options) -> ProgramSpec:
        """Return the program for a requested one, see `Backend.program_spec`."""
        return replace(options.program_spec(asked), attention=ATTENTION, takes_lengths=True)

    def lower(self, program: Program, folder: Path, options: Pt2Options) -> list[LoweredFile]:
        """Write the program's files to `folder`."""
        exported = {name: program.export(name, strict=options.strict) for name in program.methods}
        longest = max(
            program.methods.values(),
            key=lambda one: (one.is_step, one.kv_read_len is None, not one.only_scores, one.max_length),
        )
        write_archive(folder / FILE, exported, longest.name)
        return [LoweredFile(FILE, f"methods {', '.join(exported)}, weights")]

    def open(self, folder: Path, description: ProgramDescription) -> Runner:
        """Open the files that `lower` wrote."""
        declared = {
            f"layers_{index}_{name}" for index, layer in enumerate(description.layers) for name in layer["tensors"]
        }
        if description.lora is not None:
            declared |= {f"model.{one.name}.{name}" for one in description.lora.targets for name in LORA_TENSORS}
        programs = read_archive(folder / FILE, declared)
        if description.form is Form.RESIDENT:
            return ResidentRunner(programs, description)
        return ExplicitRunner(programs, description)


backend = Pt2Backend()
