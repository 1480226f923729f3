"""Opening a bundle for verification where the machine cannot run its program: what stands in for it, and what that
proves.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from ..backends import backend_for
from ..backends.base import RunsElsewhere, empty_layers
from ..common.progress import silent
from ..models.cache_factory import ExportableCache
from ..program.program import Program
from ..program.spec import ProgramSpec
from ..session.session import Session
from .rank_runner import RankProcesses
from .references import is_large

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from transformers import PreTrainedModel

    from ..backends.base import Runner
    from ..bundle.bundle import Bundle
    from ..bundle.manifest import Manifest
    from ..common.progress import Progress
    from ..program.methods import ProgramMethod


def session_to_verify(
    bundle: Bundle, model: PreTrainedModel, program: Program | None = None, *, progress: Progress = silent
) -> tuple[Session, str]:
    """A session over a bundle's program, or over what stands in for it where this machine cannot run it.

    Args:
        model: What the bundle was made from.
        program: What was lowered, if it is at hand; made anew from the model and the manifest otherwise.

    Returns:
        The session, to be closed afterwards, and what verifying it says of the program where that goes without saying
        no longer.

    Raises:
        VerificationError: If the program is not the one that the bundle's files were made from.
    """
    manifest = bundle.manifest
    backend = backend_for(manifest.target)
    description, options = manifest.description(), backend.options.parse(manifest.options)
    if isinstance(backend, RunsElsewhere) and not backend.runs_here(description, options):
        progress(f"reading the {manifest.target} program", 0, None)
        stand_in = backend.stand_in(program or program_of(manifest, model), description, options)
        return Session.from_bundle(bundle, stand_in.runner), stand_in.remark
    if manifest.ranks is not None:
        size = manifest.ranks.size
        progress(f"opening the {manifest.target} program in {size} processes", 0, None)
        return Session.from_bundle(bundle, RankProcesses(bundle)), ""
    progress(f"opening the {manifest.target} program", 0, None)
    # Of a large model the reference comes first: the memory that it needs is given back before the program takes its
    # own. Other runners have more to ask for than steps.
    later = OpenedLater(bundle) if manifest.target == "executorch" and is_large(model) else None
    return Session.from_bundle(bundle, later), ""


class OpenedLater:
    """The runner of a bundle, opened by the first step."""

    def __init__(self, bundle: Bundle) -> None:
        self.methods: Mapping[str, ProgramMethod] = bundle.manifest.description().methods
        self._open = bundle.open_runner

    @cached_property
    def _runner(self) -> Runner:
        return self._open()[0]

    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        return self._runner.run(method, *inputs)


def program_of(manifest: Manifest, model: PreTrainedModel) -> Program:
    """The program that a manifest describes, made anew from its model; its layers are already in the
    target's layout.
    """
    methods = manifest.program.methods
    anywhere = [
        method
        for method in methods.values()
        if method.is_step and method.kv_read_len is None and not method.only_scores
    ]
    backend = backend_for(manifest.target)
    spec = backend.program_spec(
        ProgramSpec(max(method.max_length for method in anywhere)), backend.options.parse(manifest.options)
    )
    spec = replace(spec, forward="forward" in methods, split="decode" in methods)
    return Program(model, ExportableCache(empty_layers(manifest.description())), spec)
