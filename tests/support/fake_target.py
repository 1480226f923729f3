"""A target that lowers nothing: its programs stay in this process, its file holds a name. For tests of what is around it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from exportable_cache.backends import LoweredFile, Runner
from exportable_cache.backends.base import ProgramDescription
from exportable_cache.cache.attention.functions import ATTENTION
from exportable_cache.cache.attention.implementation import attention_of
from exportable_cache.errors import InputError
from exportable_cache.program.program import Program

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


class FakeBackend:
    """
    Options:
        spoil: Added to one logit.
        fail: Raise after half of the file is written.
        sleep: Seconds to sleep then, announced on stdout.
    """

    name = "fake"
    packages = ("torch",)
    max_batch_size = None

    def program_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        unknown = sorted(set(options) - {"spoil", "fail", "sleep"})
        if unknown:
            raise InputError(f"target 'fake' has no option {unknown[0]!r}; it knows fail, sleep and spoil")
        return {"attention": ATTENTION}

    def lower(self, program: Program, folder: Path, options: Mapping[str, Any]) -> list[LoweredFile]:
        name = f"{type(program.model).__name__} {program.batch_size} {options.get('spoil', 0.0)}"
        _PROGRAMS[name] = program
        (folder / FILE).write_text(name[:3])
        if options.get("fail"):
            raise RuntimeError("the lowering failed")
        if options.get("sleep"):
            print(f"sleeping in {folder}", flush=True)
            time.sleep(options["sleep"])
        (folder / FILE).write_text(name)
        return [LoweredFile(FILE, "the name of a program")]

    def open(self, folder: Path, description: ProgramDescription) -> Runner:
        name = (folder / FILE).read_text()
        return FakeRunner(_PROGRAMS[name], description, float(name.split()[-1]))


backend = FakeBackend()
