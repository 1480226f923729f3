"""The `tensorrt` target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from ...errors import InputError, UnsupportedModelError, VerificationError
from ...program.spec import Form
from ..base import LoweredFile, StandIn
from .attention import TENSORRT_ATTENTION
from .engine_io import EngineRecord, Input, Output, details_of, records_of
from .kv_cache import engine_layers
from .options import LEAST_BFLOAT16, TensorRTOptions

if TYPE_CHECKING:
    from ...program.program import Program
    from ...program.spec import ProgramSpec
    from ..base import ProgramDescription, Runner
    from .network import Network


class TensorRTBackend:
    """One TensorRT plan per method, including weights, built without a GPU."""

    name = "tensorrt"
    max_batch_size = None
    linear_schemes = ("8w", "4w")
    embedding_schemes = ("8w",)
    machine_code = "plans of TensorRT, which are code for a GPU"
    options = TensorRTOptions

    @property
    def packages(self) -> tuple[str, ...]:
        """TensorRT-RTX or regular TensorRT, as installed; plans of one do not load in the other."""
        return ("tensorrt-rtx",) if has_rtx() else ("tensorrt",)

    def program_spec(self, asked: ProgramSpec, options: TensorRTOptions) -> ProgramSpec:
        """See `Backend.program_spec`."""
        return engine_program_spec(asked)

    def lower(self, program: Program, folder: Path, options: TensorRTOptions) -> list[LoweredFile]:
        """Write one plan per method."""
        capabilities = options.capabilities
        check_dtype(program.model.dtype, capabilities)
        files = []
        for method, network in program_networks(program, options).items():
            plan = network.build_plan(capabilities)
            name = f"{method}.plan"
            (folder / name).write_bytes(plan)
            details = details_of(record_of(method, network, capabilities))
            files.append(LoweredFile(name, f"engine of {method}, weights", details))
        return files

    def open(self, folder: Path, description: ProgramDescription) -> Runner:
        """Open the plans on a GPU."""
        from .engine_runner import open_engines

        return open_engines(folder, description)

    def runs_here(self, description: ProgramDescription, options: TensorRTOptions) -> bool:
        """Return True if a GPU of this machine runs the plans."""
        from .engine_runner import runs_here

        return runs_here(record for _, record in records_of(description.details).values())

    def stand_in(self, program: Program, description: ProgramDescription, options: TensorRTOptions) -> StandIn:
        """Return the networks on the CPU."""
        return network_stand_in(description, program_networks(program, options))


def check_dtype(dtype: torch.dtype, capabilities: Sequence[int]) -> None:
    """Refuse a dtype that a compute capability lacks, before TensorRT builds for minutes and fails.

    Raises:
        InputError: If bfloat16 is to be built for a capability before `LEAST_BFLOAT16`.
    """
    lacking = ", ".join(str(capability) for capability in capabilities if capability < LEAST_BFLOAT16)
    if lacking and dtype == torch.bfloat16:
        raise InputError(
            f"dtype must be float16 or float32 for SM {lacking}, got bfloat16, which TensorRT builds for SM "
            f"{LEAST_BFLOAT16} and later; pass dtype='float16' (--dtype float16), or leave {lacking} out of sm"
        )


def engine_program_spec(asked: ProgramSpec) -> ProgramSpec:
    """Return the spec of a program for engines."""
    return replace(
        asked,
        attention=TENSORRT_ATTENTION,
        form=Form.EXPLICIT,
        # Batched products, because TensorRT has no grouped expert kernels.
        experts="batched_mm",
        adapt=engine_layers,
    )


def engine_networks(program: Program, options: TensorRTOptions, in_place: bool = True) -> dict[str, Network]:
    """Trace and convert every method.

    Args:
        program: Program to convert.
        options: Options of the target, of which `opt_length` is used.
        in_place: Update caches in place; otherwise they are copied to outputs.

    Raises:
        InputError: If `opt_length` is outside the prefill's range.
        UnsupportedModelError: If a method cannot be converted.
    """
    from .engine_io import engine_io_of
    from .network import build_network

    opt_length = options.opt_length
    networks = {}
    for name, method in program.methods.items():
        if not method.is_step or method.kv_read_len is not None:
            raise UnsupportedModelError(
                f"method {name!r} of {type(program.model).__name__} is not supported: TensorRT programs have prefill "
                "and decode over the whole cache only; export for another target"
            )
        expected = opt_length if method.min_length != method.max_length else None
        if expected is not None and not method.min_length <= expected <= method.max_length:
            raise InputError(
                f"opt_length must be {method.min_length} to {method.max_length} for method {name!r}, got {expected}; "
                "change it, or pass a longer prefill_chunk"
            )
        networks[name] = build_network(program.export(name), engine_io_of(program, name, expected), in_place=in_place)
    return networks


def program_networks(program: Program, options: TensorRTOptions, in_place: bool = True) -> dict[str, Network]:
    """Call `engine_networks` once per program and arguments, because tracing and converting take most of an export.

    Verification reads the networks that the plans were built from.
    """
    made = _networks.setdefault(program, {})
    arguments = (options.opt_length, in_place)
    if arguments not in made:
        made[arguments] = engine_networks(program, options, in_place)
    return made[arguments]


#: Networks by program, then by the other arguments of `engine_networks`.
_networks: WeakKeyDictionary[Program, dict[tuple[int | None, bool], dict[str, Network]]] = WeakKeyDictionary()


def network_stand_in(description: ProgramDescription, networks: Mapping[str, Network]) -> StandIn:
    """Return networks made from the model, after checking that each plan was built from them.

    Raises:
        VerificationError: If a plan was built from another network.
    """
    from .evaluator.evaluator import NetworkRunner

    records = {method: record for method, (_, record) in records_of(description.details).items()}
    for method, network in networks.items():
        if method not in records or records[method].network != network.digest:
            raise VerificationError(
                f"the network of {method!r} made from this model differs from the plan's: the weights, or the versions "
                "of torch, transformers or torch_tensorrt, differ; verify with the exported model, or on a GPU"
            )
    built_for = next(iter(records.values())).built_for
    return StandIn(
        NetworkRunner(description.methods, networks), f"built for {built_for}; network verified on CPU; not executed"
    )


def record_of(method: str, network: Network, capabilities: tuple[int, ...]) -> EngineRecord:
    """Return the manifest's record of an engine."""
    from .plain_layers import TORCH_DTYPES

    definition = network.definition
    outputs = [definition.get_output(index) for index in range(definition.num_outputs)]
    return EngineRecord(
        method=method,
        inputs=[
            Input(
                name=spec.name,
                dtype=str(spec.dtype).removeprefix("torch."),
                min_shape=list(spec.min_shape),
                opt_shape=list(spec.opt_shape),
                max_shape=list(spec.max_shape),
            )
            for spec in network.inputs
        ],
        outputs=[
            Output(
                name=tensor.name,
                dtype=str(TORCH_DTYPES[tensor.dtype]).removeprefix("torch."),
                shape=list(tensor.shape),
            )
            for tensor in outputs
        ],
        aliases=network.aliases,
        capabilities=list(capabilities),
        layers=network.layer_counts,
        network=network.digest,
        builder=builder_version(),
    )


def has_rtx() -> bool:
    """Return True if torch-tensorrt-rtx is installed."""
    try:
        metadata.version("torch-tensorrt-rtx")
    except metadata.PackageNotFoundError:
        return False
    return True


def builder_version() -> str:
    """Return package and version, such as `tensorrt-rtx 1.5.0.114`."""
    name = "tensorrt-rtx" if has_rtx() else "tensorrt"
    return f"{name} {metadata.version(name)}"


backend = TensorRTBackend()
