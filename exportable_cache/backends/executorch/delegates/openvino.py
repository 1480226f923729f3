"""The delegate OpenVINO, for Intel's processors."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executorch.exir.backend.compile_spec_schema import CompileSpec
from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassResult

from ....common.compat.executorch import exact_openvino, openvino_partitioner
from ....errors import UnsupportedModelError
from .passes import (
    infinite_bounds_to_none,
    keep_state_outside,
    logic_to_bits,
    numbers_to_tensors,
    remainders_to_divisions,
)

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from transformers import PreTrainedModel

    from ....program.program import Program

#: Number of single tokens in the trial, which lead past a short window.
_STEPS = 40
_CHILD = """
import json, sys
from pathlib import Path
import torch
from exportable_cache.common.compat.executorch import exact_openvino, load_program

path, calls = json.load(sys.stdin)
program = load_program(Path(path))
with exact_openvino():
    methods = {name: program.load_method(name) for name, _ in calls}
for name, inputs in calls:
    print(name, flush=True)
    methods[name]([torch.full(shape, value, dtype=getattr(torch, dtype)) for shape, value, dtype in inputs])
"""


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


def rewrites() -> tuple[Callable[[ExportedProgram], ExportedProgram], ...]:
    """Return passes over exported programs."""
    return (logic_to_bits,)


def passes() -> list[Callable[[GraphModule], PassResult]]:
    """Return passes over edge programs, before they are partitioned."""
    return [infinite_bounds_to_none, numbers_to_tensors, remainders_to_divisions]


#: Shape, value of every element, and name of the dtype of an input.
Filled = tuple[list[int], int, str]


def trial_of(program: Program) -> list[tuple[str, list[Filled]]]:
    """Return calls that feed a prompt and single tokens to a program, by method."""
    most, position = program.cache.max_length or _STEPS, 0
    calls: list[tuple[str, list[Filled]]] = []
    for name in ("prefill", "prefill", *["decode"] * _STEPS):
        method = program.methods.get(name)
        if method is not None and position + method.max_length <= most:
            longest = {size: most for size, (_, most) in method.ranges.items()}
            sizes = {"batch": 1, "length": method.max_length, **longest}
            calls.append(
                (
                    name,
                    [
                        (list(spec.sizes(sizes)), position if spec.name == "input_pos" else 0, spec.dtype)
                        for spec in method.inputs
                    ],
                )
            )
            position += method.max_length
    return calls


def check_calls(path: Path, model: PreTrainedModel, calls: Sequence[tuple[str, list[Filled]]]) -> None:
    """Make calls in another process, because OpenVINO crashes on some programs (2025.4.1).

    Args:
        path: The `.pte`.
        model: The model that it was made from.
        calls: Methods and their inputs.

    Raises:
        UnsupportedModelError: If the process ends, or a call fails.
    """
    done = subprocess.run(
        [sys.executable, "-c", _CHILD],
        input=json.dumps([str(path), list(calls)]),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        named = {name for name, _ in calls}
        name = next((line for line in reversed(done.stdout.splitlines()) if line in named), "")
        code = -done.returncode
        crash = f"ends with {signal.Signals(code).name}" if code > 0 else (done.stderr.strip() or "no reason")[-200:]
        raise UnsupportedModelError(
            f"OpenVINO cannot run method {name!r} of {type(model).__name__}: {crash}; export for delegate 'xnnpack'"
        )
