"""The delegate TOSA: what Arm's compilers for Ethos-U and for GPUs with ML extensions begin with.

No runtime executes it. Arm's reference model, in the package `tosa-tools`, computes what the file contains.
"""

from __future__ import annotations

import logging
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ....common.compat.executorch import deserialized_file
from ....errors import VerificationError, first_line
from .mlx_evaluator import only_call, readable

if TYPE_CHECKING:
    from ...base import ProgramDescription

REMARK = "the TOSA graph in the file was computed by Arm's reference model; no device executed it"
#: Version and profile of the programs: floats.
_SPECIFICATION = "TOSA-1.0+FP"


def partitioner() -> Any:
    """Return the partitioner of the delegate."""
    from executorch.backends.arm.tosa.compile_spec import TosaCompileSpec
    from executorch.backends.arm.tosa.partitioner import TOSAPartitioner

    # Its passes warn of each operator that they simplify.
    logging.getLogger("executorch.backends.arm").setLevel(logging.ERROR)
    return TOSAPartitioner(TosaCompileSpec(_SPECIFICATION))


class ReferenceModel:
    """Runs the graphs of a `.pte` whose methods are one call of the delegate each, in Arm's reference model.

    Args:
        path: The `.pte`.
        description: What it contains.

    Raises:
        BundleError: If the file cannot be read.
        VerificationError: If a part of it is outside the delegate.
    """

    def __init__(self, path: Path, description: ProgramDescription) -> None:
        self._model = import_module("tosa_reference_model")
        with readable(path.name):
            program = deserialized_file(path.read_bytes()).program
            plans = {plan.name: plan for plan in program.execution_plan}
            payloads = program.backend_delegate_data
            self._calls = {name: only_call(plans[name]) for name in description.methods}
            self._outputs = {name: _outputs(plans[name]) for name in description.methods}
            self._graphs = {
                name: payloads[plans[name].delegates[0].processed.index].data for name in description.methods
            }

    def outputs(self, method: str, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See `static.runner.Graphs`.

        Raises:
            VerificationError: If the reference model refuses the graph.
        """
        given = [inputs[index].contiguous().numpy() for index in self._calls[method]]
        try:
            found, status = self._model.run(self._graphs[method], given, verbosity="LOW")
        except Exception as error:  # a binding of C++, whose errors have no common class
            raise VerificationError(f"Arm's reference model fails in method {method!r}: {first_line(error)}") from error
        if status != self._model.GraphStatus.TOSA_VALID:
            raise VerificationError(f"Arm's reference model refuses method {method!r}: {status}")
        return tuple(torch.from_numpy(found[index]) for index in self._outputs[method])


def _outputs(plan: Any) -> list[int]:
    """Return the index of the delegate's output for each output of the method."""
    arguments = plan.chains[0].instructions[0].instr_args.args
    given = [one for one in arguments if one not in plan.inputs]
    return [given.index(one) for one in plan.outputs]
