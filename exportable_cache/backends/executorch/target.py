"""The `executorch` target."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from executorch.exir import ExecutorchProgramManager

from ...cache.attention.functions import MATMUL_ATTENTION
from ...errors import BundleError, ExportableCacheError, InputError, UnsupportedModelError
from ...program.program import Form, Program
from ...program.tracing import told_by
from ..base import LoweredFile, ProgramDescription, Runner, StandIn, flag
from ..registry import backend_for
from .delegates import BACKEND_IDS, ELSEWHERE, check_cache, check_methods, delegated_calls, elsewhere_remark
from .fused import EXECUTORCH_ATTENTION, fuse_layers, one_method_suffices
from .kernels import check_kernels
from .llm_runner import runner_metadata
from .lower import lower_programs
from .runner import ExecutorchRunner
from .tied import write_pte

FILE = "program.pte"
_METHODS = ("auto", "forward", "split", "both")

#: Options by delegate.
DELEGATES = {
    "xnnpack": ("llm_runner", "methods"),
    "vulkan": (),
    "coreml": (),
    "tensorrt": ("sm", "opt_length"),
}


class ExecutorchBackend:
    """Programs for the ExecuTorch runtime, with XNNPACK as delegate, or another one.

    Options:
        delegate: `xnnpack` (default); `vulkan` and `coreml`, see `delegates`; or `tensorrt`: then
            every method is one TensorRT plan, the cache is an input and an output of it, and the options of target `tensorrt`
            are taken, too.
        methods: `forward`: one method `forward(input_ids [1, S], input_pos [1])` for any S from 1 to the longest chunk, the one
            that ExecuTorch's own `TextLLMRunner` calls. `split`: `prefill` and `decode`; each packs the weights for itself in
            memory, unless the C++ runtime shares them. `both`. By default `forward`, or `split` for models with rings that
            the fused operators cannot serve, which write in place only where the length is known to be one.
        llm_runner: Insist on `forward` and on the constant methods that the runner reads.
    """

    name = "executorch"
    packages = ("executorch",)
    # ExecuTorch 1.4.1 writes in place at one 1-D index, the same for all rows; rows of their own length would be copied.
    max_batch_size = 1
    # 8-bit weights without 8-bit activations have a kernel here that was 4 times slower than float32 for one token, and 80 times
    # for 32.
    linear_schemes = ("8da4w", "8da8w")
    embedding_schemes = ("8w", "4w")

    def program_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        delegate = options.get("delegate", "xnnpack")
        if delegate not in tuple(DELEGATES):
            raise InputError(f"delegate is {delegate!r}; it must be one of {', '.join(DELEGATES)}")
        known = DELEGATES[delegate]
        unknown = sorted(set(options) - {"delegate", *known})
        if unknown:
            raise InputError(
                f"target 'executorch' with delegate {delegate!r} has no option {unknown[0]!r}; it knows {', '.join(('delegate', *known))}"
            )
        if delegate == "tensorrt":
            return backend_for("tensorrt").program_options(_without_delegate(options))
        if delegate in ELSEWHERE:
            # Without the fused operators, which would cut the delegate's graph at every layer.
            return {"attention": MATMUL_ATTENTION, "form": Form.RESIDENT, "experts": "batched_mm"}
        methods = options.get("methods", "auto")
        if methods not in _METHODS:
            raise InputError(f"methods is {methods!r}; it must be one of {', '.join(_METHODS)}")
        if methods == "split" and flag(options, "llm_runner"):
            raise InputError(
                "methods is 'split', but the llm_runner calls 'forward'; pass methods='both', or leave one of the two out"
            )
        auto = methods == "auto"
        return {
            "attention": EXECUTORCH_ATTENTION,
            "form": Form.RESIDENT,
            # The grouped expert kernels have no ExecuTorch counterpart; batched products do.
            "experts": "batched_mm",
            "adapt": fuse_layers,
            "forward": flag(options, "llm_runner") or (one_method_suffices if auto else methods != "split"),
            "split": (lambda cache: not one_method_suffices(cache)) if auto else methods != "forward",
        }

    def lower(self, program: Program, folder: Path, options: Mapping[str, Any]) -> list[LoweredFile]:
        if options.get("delegate") == "tensorrt":
            from .tensorrt_delegate import lower_to_plans

            return lower_to_plans(program, folder, FILE, options)
        delegate = options.get("delegate", "xnnpack")
        check_methods(delegate, program)
        lowered = _lowered(program, delegate, flag(options, "llm_runner"))
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

    def runs_here(self, description: ProgramDescription, options: Mapping[str, Any]) -> bool:
        # No Python runtime of ExecuTorch has the other delegates here.
        delegate = options.get("delegate", "xnnpack")
        return delegate not in ELSEWHERE and delegate != "tensorrt"

    def stand_in(self, program: Program, description: ProgramDescription, options: Mapping[str, Any]) -> StandIn:
        """The networks of TensorRT plans, on the CPU; for other delegates the XNNPACK lowering of the program."""
        delegate = options.get("delegate", "xnnpack")
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


def _without_delegate(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "delegate"}
