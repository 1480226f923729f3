"""The delegate OpenVINO, for Intel's processors."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from executorch.exir.backend.compile_spec_schema import CompileSpec
from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassResult

from ....common.compat.executorch import exact_openvino, openvino_partitioner
from .passes import numbers_to_tensors, remainders_to_divisions

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def partitioner() -> Any:
    """Return the partitioner of the delegate."""
    with exact_openvino():
        # It loads OpenVINO's part for processors, which asks once what they have.
        import_module("openvino").Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")

    class Partitioner(openvino_partitioner()):  # type: ignore[misc]
        """A partitioner without a line on stdout for each operator left out, and with no state among its constants."""

        def partition(self, exported_program: Any) -> Any:
            with contextlib.redirect_stdout(io.StringIO()):
                result = super().partition(exported_program)
            keep_state_outside(exported_program)
            return result

    return Partitioner([CompileSpec("device", b"CPU")])


def keep_state_outside(program: ExportedProgram) -> None:
    """Remove the buffers that a program writes from the constants of its partitions, in place.

    ExecuTorch (1.4.1, `tag_constant_data`) takes a buffer for written only if the new value is computed from it by a
    single operator. A ring's is a selection from old and new tokens, so the old ones would be zeros in each call.
    """
    signature = program.graph_signature
    written = set(signature.buffers_to_mutate.values())
    for node in program.graph.find_nodes(op="placeholder"):
        if signature.inputs_to_buffers.get(node.name) in written:
            node.meta.pop("delegation_tag", None)


def passes() -> list[Callable[[GraphModule], PassResult]]:
    """Return passes over edge programs, before they are partitioned."""
    return [numbers_to_tensors, remainders_to_divisions]
