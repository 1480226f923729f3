"""The `pt2` target: lowering is tracing; running is torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...cache.attention.functions import ATTENTION
from ...errors import InputError
from ...program.program import Form, Program
from ..base import LoweredFile, ProgramDescription, Runner, flag
from .archive import read_archive, write_archive
from .runner import ExplicitRunner, ResidentRunner

FILE = "program.pt2"


class Pt2Backend:
    """Programs as torch.export graphs.

    Options:
        form: `resident` (default: the cache is inside, updated in place) or `explicit` (the cache is an input and an
            output, in its pytree form, for runtimes that pass state along).
        strict: Trace through TorchDynamo.
        buckets: Read lengths that get methods of their own, so that a step costs what the filled part of the cache costs.
            See `methods.methods_for`; each method adds its graph to the file, not its weights.
        score_length: Add a method that gives logits after each of up to this many tokens, for speculative decoding.
    """

    name = "pt2"
    packages = ("torch",)
    max_batch_size = None
    # torch.export keeps 4-bit weights in 8 bits each: no smaller, so not offered.
    linear_schemes = ("8w", "8da8w")
    embedding_schemes = ("8w",)

    def program_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        unknown = sorted(set(options) - {"form", "strict", "buckets", "score_length"})
        if unknown:
            raise InputError(
                f"target 'pt2' has no option {unknown[0]!r}; it knows form, strict, buckets and score_length"
            )
        form = options.get("form", Form.RESIDENT)
        if form not in tuple(Form):
            raise InputError(f"form is {form!r}; it must be one of {', '.join(member.value for member in Form)}")
        flag(options, "strict")
        return {
            "attention": ATTENTION,
            "form": Form(form),
            "buckets": options.get("buckets", ()),
            "score_length": options.get("score_length", 0),
        }

    def lower(self, program: Program, folder: Path, options: Mapping[str, Any]) -> list[LoweredFile]:
        exported = {name: program.export(name, strict=flag(options, "strict")) for name in program.methods}
        write_archive(folder / FILE, exported)
        return [LoweredFile(FILE, f"methods {', '.join(exported)}, weights")]

    def open(self, folder: Path, description: ProgramDescription) -> Runner:
        programs = read_archive(folder / FILE)
        runner = ResidentRunner if description.form is Form.RESIDENT else ExplicitRunner
        return runner(programs, description)
