"""The `executorch` target."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...cache.attention import ATTENTION, MATMUL_ATTENTION
from ...errors import BundleError
from ...program.spec import Form
from ..base import LoweredFile, StandIn, check_decoder
from ..registry import backend_for
from .attention import layouts  # noqa: F401  layouts of layers, by which bundles describe them
from .options import LINEAR_SCHEMES, ExecutorchOptions
from .runner import ExecutorchRunner
from .static.runner import PLAN, TABLES, open_static

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...models.cache_factory import ExportableCache
    from ...program.program import Program
    from ...program.spec import ProgramSpec
    from ..base import ProgramDescription, Runner
    from .delegates.table import Delegate

FILE = "program.pte"


class ExecutorchBackend:
    """Programs for the ExecuTorch runtime, for XNNPACK or another delegate."""

    name = "executorch"
    packages = ("executorch",)
    # For delegates other than XNNPACK, see `ExecutorchOptions.max_batch_size`.
    max_batch_size = 1
    holds_adapters = True
    linear_schemes = LINEAR_SCHEMES
    kept_weights = "8da4w"
    embedding_schemes = ("8w", "4w")

    machine_code = ""
    options = ExecutorchOptions

    def program_spec(self, asked: ProgramSpec, options: ExecutorchOptions) -> ProgramSpec:
        """See `Backend.program_spec`."""
        from ...models.experts import register_experts, register_quantized_experts
        from .attention.fused import EXECUTORCH_ATTENTION, fuse_layers, one_method_suffices
        from .native.operators import check_native_kernels

        if options.delegate == "tensorrt":
            return backend_for("tensorrt").program_spec(asked, options)
        # Batched products, because ExecuTorch has no kernels for experts.
        experts = register_quantized_experts() if options.expert_schemes else "batched_mm"
        asked = replace(asked, form=Form.RESIDENT, experts=experts)
        if options.form == "static":
            # The graphs are traced by `static_programs`; of this one the methods and layers are used.
            return replace(asked, attention=MATMUL_ATTENTION, fixed_chunk=True)
        if options.delegate != "xnnpack":
            # No fused operators, because they would split the delegate's graph at every layer.
            return delegate_program_spec(asked, options.facts)
        if options.kernels == "native" or options.native_linears:
            check_native_kernels()
        if options.native_linears:
            asked = replace(asked, experts=register_experts())
        methods, auto = options.methods, options.methods == "auto"
        return replace(
            asked,
            score_length=options.score_length,
            shift=options.shift,
            attention=EXECUTORCH_ATTENTION,
            adapt=partial(fuse_layers, native=options.kernels == "native"),
            forward=options.llm_runner or (one_method_suffices if auto else methods != "split"),
            split=(lambda cache: not one_method_suffices(cache)) if auto else methods != "forward",
        )

    def lower(self, program: Program, folder: Path, options: ExecutorchOptions) -> list[LoweredFile]:
        """Write one `.pte`."""
        if options.delegate == "tensorrt":
            from .lowering.tensorrt import lower_to_plans

            return lower_to_plans(program, folder, FILE, options)
        if options.form == "static":
            from .static.lower import write_static

            return write_static(program, folder, FILE, options)
        from .lowering.lower import write_program

        written = write_program(
            program,
            folder / FILE,
            options.delegate,
            options.llm_runner,
            compute=options.compute if options.native_linears else None,
            allow_partial=options.allow_partial,
        )
        if options.delegate == "openvino":
            from .delegates.openvino import check_calls, trial_of

            check_calls(folder / FILE, program.model, trial_of(program))
        return [LoweredFile(FILE, written)]

    def open(self, folder: Path, description: ProgramDescription) -> Runner:
        """Open a program in ExecuTorch's Python runtime."""
        if description.form is Form.EXPLICIT:
            raise BundleError(
                f"{FILE} contains TensorRT plans, which ExecuTorch runs only in C++ with torch-tensorrt's delegate and "
                "an NVIDIA GPU; check it here with: exportable-cache verify"
            )
        if PLAN in description.details.get(FILE, {}):
            return open_static(folder / FILE, folder / TABLES, description)
        return ExecutorchRunner(folder / FILE, description)

    def runs_here(self, description: ProgramDescription, options: ExecutorchOptions) -> bool:
        """Return True if the Python runtime executes the delegate."""
        facts = options.facts
        if facts.name == "mlx":
            from ...common.compat.executorch import available_backends

            return facts.backend_id in available_backends()
        return facts.verified == "executed"

    def stand_in(
        self, program: Program, description: ProgramDescription, options: ExecutorchOptions, folder: Path
    ) -> StandIn:
        """Return the delegate's graph on the CPU, or the XNNPACK lowering of the program for other delegates."""
        facts = options.facts
        if facts.name == "mlx":
            from .delegates.mlx_evaluator import REMARK, MLXEvaluator

            facts.check_installed(facts.evaluator)
            return StandIn(MLXEvaluator(folder / FILE, description), REMARK)
        if facts.name == "tosa":
            from .delegates import tosa

            facts.check_installed(facts.evaluator)
            graphs = tosa.ReferenceModel(folder / FILE, description)
            return StandIn(open_static(folder / FILE, folder / TABLES, description, graphs), tosa.REMARK)
        if facts.verified == "lowered":
            from .delegates.checks import not_executed_remark
            from .lowering.lower import write_program

            with tempfile.TemporaryDirectory() as temporary:
                path = Path(temporary) / FILE
                write_program(program, path)
                return StandIn(ExecutorchRunner(path, description), not_executed_remark(facts))
        from ..tensorrt.target import network_stand_in, program_networks
        from .lowering.tensorrt import takes_aliases

        return network_stand_in(description, program_networks(program, options, in_place=takes_aliases()))


def _decoder_cache(model: PreTrainedModel, cache: ExportableCache, delegate: str) -> ExportableCache:
    """Return the cache, after a check that the model is a decoder."""
    check_decoder(model, cache, f"delegate {delegate!r}", "delegate 'xnnpack'")
    return cache


def delegate_program_spec(asked: ProgramSpec, facts: Delegate) -> ProgramSpec:
    """Return the spec of a program for a delegate other than XNNPACK and TensorRT."""
    decoders = partial(_decoder_cache, delegate=facts.name)
    if facts.lengths == "forward":
        return replace(asked, attention=ATTENTION, forward=True, split=False, adapt=decoders)
    asked = replace(asked, attention=MATMUL_ATTENTION)
    if facts.lengths == "one":
        return asked
    return replace(asked, fixed_chunk=True, adapt=decoders)


backend = ExecutorchBackend()
