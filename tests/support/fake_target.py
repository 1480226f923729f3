"""A target that lowers nothing: its programs stay in this process, its file holds a name.

For tests of what is around it.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch

from exportable_cache.backends.base import LoweredFile, ProgramDescription, Runner
from exportable_cache.backends.options import TargetOptions
from exportable_cache.cache.attention.functions import ATTENTION
from exportable_cache.cache.attention.implementation import attention_of
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec

FILE = "program.fake"
ENTRY = (__name__, (), None)

_PROGRAMS: dict[str, Program] = {}


class FakeRunner:
    """The program's module, its logits off by `spoil`."""

    def __init__(self, program: Program, description: ProgramDescription, spoil: float) -> None:
        self.methods = description.methods
        self._program = program
        self._spoil = spoil

    @torch.no_grad()
    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor:
        with attention_of(self._program.model, ATTENTION):
            logits = self._program.modules[method](*inputs)
        logits[..., -1] += self._spoil
        return logits


@dataclass(frozen=True)
class FakeOptions(TargetOptions):
    """
    Attributes:
        fail: Raise after half of the file is written.
        sleep: Seconds to sleep then, announced on stdout.
        spoil: Added to one logit.
    """

    target: ClassVar[str] = "fake"

    fail: bool = False
    sleep: float = 0
    spoil: float = 0.0


class FakeBackend:
    """Programs stay in this process."""

    name = "fake"
    packages = ("torch",)
    max_batch_size = None
    machine_code = ""
    options = FakeOptions

    def program_spec(self, asked: ProgramSpec, options: FakeOptions) -> ProgramSpec:
        return replace(asked, attention=ATTENTION)

    def lower(self, program: Program, folder: Path, options: FakeOptions) -> list[LoweredFile]:
        # Tests export models of one class with several configs, and one model with several capacities.
        config = hashlib.sha256(program.model.config.to_json_string().encode()).hexdigest()[:12]
        kind = type(program.model).__name__
        name = f"{kind} {config} {program.batch_size} {program.cache.max_length} {options.spoil}"
        _PROGRAMS[name] = program
        (folder / FILE).write_text(name[:3])
        if options.fail:
            raise RuntimeError("the lowering failed")
        if options.sleep:
            print(f"sleeping in {folder}", flush=True)
            time.sleep(options.sleep)
        (folder / FILE).write_text(name)
        return [LoweredFile(FILE, "the name of a program")]

    def open(self, folder: Path, description: ProgramDescription) -> Runner:
        name = (folder / FILE).read_text()
        return FakeRunner(_PROGRAMS[name], description, float(name.split()[-1]))


backend = FakeBackend()
