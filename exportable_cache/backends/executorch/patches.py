"""Functions of ExecuTorch's exporter that are replaced: each gives the same program, sooner."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...common.compat.executorch import without_submodules
from ...common.patch import Patch
from ...errors import UnsupportedModelError
from .idle_passes import is_transpose, is_view, mixes_dtypes, reads_another_order, takes_symbol_as_tensor, unless_idle

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node

log = logging.getLogger(__name__)


def _once(original: Callable[[ExportedProgram], ExportedProgram]) -> Callable[[ExportedProgram], ExportedProgram]:
    """For the program's own graph, which the original goes over again for every graph inside it."""

    def remove(program: ExportedProgram) -> ExportedProgram:
        original(without_submodules(program))
        return program

    return remove


def _idle(file: str, name: str, has_work: Callable[[Node], bool], digest: str) -> Patch:
    return Patch(
        f"executorch.exir.passes.{file}",
        f"{name}.call",
        unless_idle(has_work),
        "it runs every operator of a program again, whether it finds what it looks for or not",
        digests=(digest,),
        source=name,
        package="executorch",
        url=f"https://github.com/pytorch/executorch/blob/v1.4.1/exir/passes/{file}.py",
    )


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
    _idle("normalize_transpose_pass", "NormalizeTransposePass", is_transpose, "912bf0029f61ec18"),
    _idle(
        "replace_broken_ops_with_function_ops_pass",
        "ReplaceBrokenOpsWithFunctionalOpsPass",
        is_view,
        "0e84e744baf1bfa8",
    ),
    _idle("sym_to_tensor_pass", "SymToTensorPass", takes_symbol_as_tensor, "6da3bdcf53b35a48"),
    _idle("remove_mixed_type_operators", "RemoveMixedTypeOperators", mixes_dtypes, "984d68821522d093"),
    _idle("legalize_portable_dim_order_pass", "LegalizePortableDimOrderPass", reads_another_order, "43565f5a825c2a26"),
)


def patch_exporter() -> None:
    """Apply them; where the original changed, it is left as it is."""
    for patch in PATCHES:
        try:
            patch.apply()
        except UnsupportedModelError as error:
            log.info("%s", error)
