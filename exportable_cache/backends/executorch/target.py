"""The `executorch` target."""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

from executorch.exir import ExecutorchProgramManager

from ...cache.attention.functions import MATMUL_ATTENTION
from ...errors import BundleError, ExportableCacheError, UnsupportedModelError
from ...program.program import Program
from ...program.spec import Form, ProgramSpec
from ...program.tracing import told_by
from ..base import LoweredFile, ProgramDescription, Runner, StandIn
from ..registry import backend_for
from .delegates import BACKEND_IDS, ELSEWHERE, check_cache, check_methods, delegated_calls, elsewhere_remark
from .fused import EXECUTORCH_ATTENTION, fuse_layers, one_method_suffices
from .kernels import check_kernels
from .llm_runner import runner_metadata
from .lower import lower_programs
from .options import ExecutorchOptions
from .runner import ExecutorchRunner
from .tied import write_pte

FILE = "program.pte"


class ExecutorchBackend:
    """Programs for the ExecuTorch runtime, with XNNPACK as delegate, or another one."""

    name = "executorch"
    packages = ("executorch",)
    # ExecuTorch 1.4.1 writes in place at one 1-D index, the same for all rows; rows of their own length would be copied.
    max_batch_size = 1
    # 8-bit weights without 8-bit activations have a kernel here that was 4 times slower than float32 for one token, and 80 times
    # for 32.
    linear_schemes = ("8da4w", "8da8w")
    embedding_schemes = ("8w", "4w")

    options = ExecutorchOptions

    def program_spec(self, asked: ProgramSpec, options: ExecutorchOptions) -> ProgramSpec:
        if options.delegate == "tensorrt":
            return backend_for("tensorrt").program_spec(asked, options)
        # The grouped expert kernels have no ExecuTorch counterpart; batched products do.
        asked = replace(asked, form=Form.RESIDENT, experts="batched_mm")
        if options.delegate in ELSEWHERE:
            # Without the fused operators, which would cut the delegate's graph at every layer.
            return replace(asked, attention=MATMUL_ATTENTION)
        methods, auto = options.methods, options.methods == "auto"
        return replace(
            asked,
            attention=EXECUTORCH_ATTENTION,
            adapt=fuse_layers,
            forward=options.llm_runner or (one_method_suffices if auto else methods != "split"),
            split=(lambda cache: not one_method_suffices(cache)) if auto else methods != "forward",
        )

    def lower(self, program: Program, folder: Path, options: ExecutorchOptions) -> list[LoweredFile]:
        if options.delegate == "tensorrt":
            from .tensorrt_delegate import lower_to_plans

            return lower_to_plans(program, folder, FILE, options)
        delegate = options.delegate
        check_methods(delegate, program)
        lowered = _lowered(program, delegate, options.llm_runner)
        holds = f"methods {', '.join(program.methods)}, weights, one cache"
        if delegate != "xnnpack":
            check_cache(delegate, program, lowered)
            calls = ", ".join(f"{count} in {name}" for name, count in delegated_calls(lowered).items())
            holds += f"; calls of {BACKEND_IDS[delegate]}: {calls}"
        write_pte(lowered, folder / FILE)
        return [LoweredFile(FILE, holds)]

    def open(self, folder: Path, description: ProgramDescription) -> Runner:
        if description.form is Form.EXPLICIT:
            raise BundleError(
                f"the methods of {FILE} are TensorRT plans, which ExecuTorch runs through the delegate of regular torch-tensorrt, "
                "in C++ on a machine with an NVIDIA GPU; check it here with: exportable-cache verify"
            )
        return ExecutorchRunner(folder / FILE, description)

    def runs_here(self, description: ProgramDescription, options: ExecutorchOptions) -> bool:
        # No Python runtime of ExecuTorch has the other delegates here.
        return options.delegate not in ELSEWHERE and options.delegate != "tensorrt"

    def stand_in(self, program: Program, description: ProgramDescription, options: ExecutorchOptions) -> StandIn:
        """The networks of TensorRT plans, on the CPU; for other delegates the XNNPACK lowering of the program."""
        delegate = options.delegate
        if delegate in ELSEWHERE:
            with tempfile.TemporaryDirectory() as temporary:
                path = Path(temporary) / FILE
                write_pte(_lowered(program, "xnnpack", False), path)
                return StandIn(ExecutorchRunner(path, description), elsewhere_remark(delegate))
        from ..tensorrt.target import network_stand_in, program_networks

        return network_stand_in(description, program_networks(program, options, in_place=False))


def _lowered(program: Program, delegate: str, for_llm_runner: bool) -> ExecutorchProgramManager:
    with warnings.catch_warnings():
        # Deprecations inside executorch's own operators and passes, hundreds per export, none of the caller's making.
        warnings.simplefilter("ignore", FutureWarning)
        exported = {name: program.export(name) for name in program.methods}
        metadata = runner_metadata(program, required=for_llm_runner) if "forward" in exported else None
        try:
            lowered = lower_programs(exported, metadata, delegate)
        except ExportableCacheError:
            raise
        except Exception as error:  # passes and compilers of ExecuTorch, each with errors of its own
            raise UnsupportedModelError(
                f"{type(program.model).__name__} cannot be lowered for ExecuTorch ({told_by(error)}); "
                "export it for target 'pt2' instead"
            ) from error
    check_kernels(lowered)
    return lowered


backend = ExecutorchBackend()
