"""The `executorch` target."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...cache.attention import MATMUL_ATTENTION
from ...errors import BundleError
from ...program.spec import Form
from ..base import LoweredFile, StandIn
from ..registry import backend_for
from .attention import fused_kernels, rows_kernel  # noqa: F401  layouts of layers, by which bundles describe them
from .options import ELSEWHERE, ExecutorchOptions
from .runner import ExecutorchRunner

if TYPE_CHECKING:
    from ...program.program import Program
    from ...program.spec import ProgramSpec
    from ..base import ProgramDescription, Runner

FILE = "program.pte"


class ExecutorchBackend:
    """Programs for the ExecuTorch runtime, with XNNPACK as delegate, or another one."""

    name = "executorch"
    packages = ("executorch",)
    # Of a delegate other than XNNPACK, see `ExecutorchOptions.max_batch_size`.
    max_batch_size = 1
    # 8-bit weights without 8-bit activations have a kernel here that was 4 times slower than float32 for one token, and
    # 80 times for 32.
    linear_schemes = ("8da4w", "8da8w")
    embedding_schemes = ("8w", "4w")

    machine_code = ""
    options = ExecutorchOptions

    def program_spec(self, asked: ProgramSpec, options: ExecutorchOptions) -> ProgramSpec:
        from .attention.fused import EXECUTORCH_ATTENTION, fuse_layers, one_method_suffices
        from .native.operators import check_native_kernels

        if options.delegate == "tensorrt":
            return backend_for("tensorrt").program_spec(asked, options)
        # The grouped expert kernels have no ExecuTorch counterpart; batched products do.
        asked = replace(asked, form=Form.RESIDENT, experts="batched_mm")
        if options.delegate in ELSEWHERE:
            # Without the fused operators, which would cut the delegate's graph at every layer.
            return replace(asked, attention=MATMUL_ATTENTION)
        if options.kernels == "native" or options.native_linears:
            check_native_kernels()
        methods, auto = options.methods, options.methods == "auto"
        return replace(
            asked,
            score_length=options.score_length,
            attention=EXECUTORCH_ATTENTION,
            adapt=partial(fuse_layers, own=options.kernels == "native"),
            forward=options.llm_runner or (one_method_suffices if auto else methods != "split"),
            split=(lambda cache: not one_method_suffices(cache)) if auto else methods != "forward",
        )

    def lower(self, program: Program, folder: Path, options: ExecutorchOptions) -> list[LoweredFile]:
        if options.delegate == "tensorrt":
            from .lowering.tensorrt import lower_to_plans

            return lower_to_plans(program, folder, FILE, options)
        from .lowering.lower import write_program

        own = options.native_linears
        return [LoweredFile(FILE, write_program(program, folder / FILE, options.delegate, options.llm_runner, own))]

    def open(self, folder: Path, description: ProgramDescription) -> Runner:
        if description.form is Form.EXPLICIT:
            raise BundleError(
                f"the methods of {FILE} are TensorRT plans, which ExecuTorch runs through the delegate of regular "
                "torch-tensorrt, in C++ on a machine with an NVIDIA GPU; check it here with: exportable-cache verify"
            )
        return ExecutorchRunner(folder / FILE, description)

    def runs_here(self, description: ProgramDescription, options: ExecutorchOptions) -> bool:
        # No Python runtime of ExecuTorch has the other delegates here.
        return options.delegate not in ELSEWHERE and options.delegate != "tensorrt"

    def stand_in(self, program: Program, description: ProgramDescription, options: ExecutorchOptions) -> StandIn:
        """The networks of TensorRT plans, on the CPU; for other delegates the XNNPACK lowering of the program."""
        delegate = options.delegate
        if delegate in ELSEWHERE:
            from .lowering.delegates import elsewhere_remark
            from .lowering.lower import write_program

            with tempfile.TemporaryDirectory() as temporary:
                path = Path(temporary) / FILE
                write_program(program, path)
                return StandIn(ExecutorchRunner(path, description), elsewhere_remark(delegate))
        from ..tensorrt.target import network_stand_in, program_networks

        return network_stand_in(description, program_networks(program, options, in_place=False))


backend = ExecutorchBackend()
