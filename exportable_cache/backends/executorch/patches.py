"""Functions of ExecuTorch's exporter that are replaced: each gives the same program, sooner."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...common.compat.executorch import without_submodules
from ...errors import UnsupportedModelError
from ...models.patches.patch import Patch

if TYPE_CHECKING:
    from torch.export import ExportedProgram

log = logging.getLogger(__name__)


def _once(original: Callable[[ExportedProgram], ExportedProgram]) -> Callable[[ExportedProgram], ExportedProgram]:
    """For the program's own graph, which the original goes over again for every graph inside it."""

    def remove(program: ExportedProgram) -> ExportedProgram:
        original(without_submodules(program))
        return program

    return remove


PATCHES = (
    Patch(
        "executorch.exir.program._program",
        "unsafe_remove_auto_functionalized_pass",
        _once,
        "it takes the square of the time: two branches a layer, and the whole graph for each",
        digests=("1d9a9a7259e920bd",),
        package="executorch",
        url="https://github.com/pytorch/pytorch/blob/v2.13.0/torch/export/_remove_auto_functionalized_pass.py",
    ),
)


def patch_exporter() -> None:
    """Apply them; where the original changed, it is left as it is."""
    for patch in PATCHES:
        try:
            patch.apply()
        except UnsupportedModelError as error:
            log.info("%s", error)
