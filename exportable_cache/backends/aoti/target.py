"""The `aoti` target: every method compiled ahead of time, over one set of weights and one cache."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...cache.attention.functions import ATTENTION
from ...errors import InputError
from ...program.program import Form, Program
from ..base import LoweredFile, ProgramDescription, Runner
from .package import compile_methods, write_constants
from .runner import AotiRunner

CODE = "program.pt2"
CONSTANTS = "constants.pt"


class AotiBackend:
    """Programs as AOTInductor packages: shared libraries that need torch's libraries, but no Python.

    Options:
        buckets: Read lengths that get methods of their own, see `methods.methods_for`. Each is compiled by itself: it adds
            about as much export time as the first, and code to the file, but no weights.
        score_length: Add a method that gives logits after each of up to this many tokens, for speculative decoding.
    """

    name = "aoti"
    packages = ("torch",)
    max_batch_size = None

    def program_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        unknown = sorted(set(options) - {"buckets", "score_length"})
        if unknown:
            raise InputError(f"target 'aoti' has no option {unknown[0]!r}; it knows buckets and score_length")
        return {
            "attention": ATTENTION,
            "form": Form.RESIDENT,
            "buckets": options.get("buckets", ()),
            "score_length": options.get("score_length", 0),
        }

    def lower(self, program: Program, folder: Path, options: Mapping[str, Any]) -> list[LoweredFile]:
        exported = {name: program.export(name) for name in program.methods}
        names = compile_methods(folder / CODE, exported)
        write_constants(folder / CONSTANTS, program, exported, names)
        return [
            LoweredFile(CODE, f"machine code of methods {', '.join(exported)}"),
            LoweredFile(CONSTANTS, "weights; shapes of the cache"),
        ]

    def open(self, folder: Path, description: ProgramDescription) -> Runner:
        return AotiRunner(folder / CODE, folder / CONSTANTS, description)
