"""The `tensorrt` target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ...errors import InputError, UnsupportedModelError, VerificationError
from ...models.lora import WRITE_ADAPTER
from ...program.methods import DRAFT, SHIFT
from ...program.spec import Form
from ..base import LoweredFile, StandIn
from .engine_io import EngineRecord, Input, Output, details_of, records_of
from .experts import register_slot_experts
from .kv_cache import TENSORRT_ATTENTION, engine_layers, keeps_tokens_alone
from .options import MACHINE_CODE, TF32_REMARK, TensorRTOptions

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from ...program.program import Program
    from ...program.spec import ProgramSpec
    from ..base import ProgramDescription, Runner
    from .network import Network


#: File name of a plan that several methods share.
SHARED_PLAN = "engine.plan"


class TensorRTBackend:
    """One TensorRT plan for all methods, or one for each, including weights, built without a GPU."""

    name = "tensorrt"
    max_batch_size = None
    linear_schemes = ("8w", "4w", "fp8", "nvfp4", "keep")
    kept_weights = "symmetric"
    embedding_schemes = ("8w",)
    expert_schemes = ("8w", "4w", "fp8", "nvfp4")
    holds_adapters = True
    machine_code = MACHINE_CODE
    options = TensorRTOptions

    @property
    def packages(self) -> tuple[str, ...]:
        """TensorRT-RTX or regular TensorRT, as installed; plans of one do not load in the other."""
        return ("tensorrt-rtx",) if has_rtx() else ("tensorrt",)

    def program_spec(self, asked: ProgramSpec, options: TensorRTOptions) -> ProgramSpec:
        """See `Backend.program_spec`."""
        # `forward` also returns the logits of several tokens, so that all methods can share its graph.
        return replace(engine_program_spec(asked), score_length=options.score_length, forward=options.score_length > 0)

    def lower(self, program: Program, folder: Path, options: TensorRTOptions) -> list[LoweredFile]:
        """Write one plan per method."""
        capabilities = options.capabilities
        options.check_dtype(program.model.dtype)
        networks = program_networks(program, options)
        files = []
        for methods in methods_by_engine(networks):
            network, shares = networks[methods[0]], len(methods) > 1
            name = SHARED_PLAN if shares else f"{methods[0]}.plan"
            profiles = [networks[method].inputs for method in methods]
            plan = network.build_plan(capabilities, profiles)
            (folder / name).write_bytes(plan)
            records = [
                record_of(method, networks[method], capabilities, index if shares else None)
                for index, method in enumerate(methods)
            ]
            files.append(LoweredFile(name, f"engine of {' and '.join(methods)}, weights", details_of(*records)))
        return files

    def open(self, folder: Path, description: ProgramDescription) -> Runner:
        """Open the plans on a GPU."""
        from .engine_runner import open_engines

        return open_engines(folder, description)

    def runs_here(self, description: ProgramDescription, options: TensorRTOptions) -> bool:
        """Return True if a GPU of this machine runs the plans."""
        from .engine_runner import runs_here

        return runs_here(record for _, record in records_of(description.details).values())

    def stand_in(
        self, program: Program, description: ProgramDescription, options: TensorRTOptions, folder: Path
    ) -> StandIn:
        """Return the networks on the CPU."""
        return network_stand_in(description, program_networks(program, options))


def engine_program_spec(asked: ProgramSpec) -> ProgramSpec:
    """Return the spec of a program for engines."""
    return replace(
        asked,
        attention=TENSORRT_ATTENTION,
        form=Form.EXPLICIT,
        # Batched products, because TensorRT has no grouped expert kernels.
        experts=register_slot_experts(),
        adapt=engine_layers,
        adapts_items=True,
        # A plan's weights are constant, so adapters come in at an address.
        lora_inputs=bool(asked.lora_slots),
    )


def engine_networks(program: Program, options: TensorRTOptions, in_place: bool = True) -> dict[str, Network]:
    """Trace and convert every method, or one for all of them if they can share an engine.

    Methods that share an engine have the same `Network`, with the inputs of their range of lengths.

    Args:
        program: Program to convert.
        options: Options of the target, of which `opt_length` and `engines` are used.
        in_place: Update caches in place; otherwise they are copied to outputs.

    Raises:
        InputError: If `opt_length` is outside the prefill's range.
        UnsupportedModelError: If a method cannot be converted.
    """
    from .engine_io import engine_io_of
    from .network import build_network
    from .simplify import JoinedWeights

    opt_length, usual = options.opt_length, {}
    for name, method in program.methods.items():
        if name == WRITE_ADAPTER:
            continue
        if name in (SHIFT.name, DRAFT.name) or method.kv_read_len is not None:
            raise UnsupportedModelError(
                f"method {name!r} of {type(program.model).__name__} is not supported: TensorRT programs have prefill "
                "and decode over the whole cache, and encoders; export for another target"
            )
        expected = opt_length if method.is_step and method.min_length != method.max_length else None
        if method.scored_tokens:
            expected = method.scored_tokens
        if expected is not None and not method.min_length <= expected <= method.max_length:
            raise InputError(
                f"opt_length must be {method.min_length} to {method.max_length} for method {name!r}, got {expected}; "
                "change it, or pass a longer prefill_chunk"
            )
        usual[name] = expected
    networks: dict[str, Network] = {}
    exported = {}
    # Options of plans inside a `.pte` have no `engines`, because each of its methods has a plan.
    if in_place and getattr(options, "engines", "separate") == "shared" and _can_share(program):
        whole = next(name for name in (_FORWARD, _PREFILL_EMBEDS, _PREFILL) if name in program.methods)
        exported[whole] = program.export(whole)
        # Raised by `export` if the model's code needs longer prompts, so that one token cannot go through it.
        if program.methods[whole].min_length <= _FEWEST:
            steps = {name: length for name, length in usual.items() if program.methods[name].is_step}
            networks = _shared_network(program, exported[whole], whole, steps)
    joined = JoinedWeights()
    for name, expected in usual.items():
        if name in networks:
            continue
        traced = exported.pop(name, None) or program.export(name)
        signature = engine_io_of(program, name, expected)
        networks[name] = build_network(traced, signature, in_place=in_place, joined=joined)
    return networks


_DECODE, _PREFILL, _FORWARD, _PREFILL_EMBEDS = "decode", "prefill", "forward", "prefill_embeds"
#: Fewest new tokens of a prefill whose graph also computes a single token.
_FEWEST = 2


def _can_share(program: Program) -> bool:
    """Return True if the graph of a prompt also computes single tokens as fast: layers keep keys and values alone.

    Convolutions and recurrent states have a scan over the prompt, which for one token takes longer than a step. The
    graph of embeddings also serves methods of token ids, which another engine embeds, see `engine_inputs`.
    """
    names = {name: method.input_names for name, method in program.methods.items() if method.is_step}
    embeds = names.pop(_PREFILL_EMBEDS, None)
    fits = names.keys() - ({_FORWARD} if embeds is None else set()) == {_PREFILL, _DECODE}
    return fits and len(set(names.values())) == 1 and all(keeps_tokens_alone(layer) for layer in program.cache.layers)


def _shared_network(
    program: Program, exported: ExportedProgram, name: str, usual: Mapping[str, int | None]
) -> dict[str, Network]:
    """Return one network under the names of all methods, with the inputs of each.

    Args:
        program: The program.
        exported: The method whose graph serves all of them.
        name: Its name.
        usual: New tokens that TensorRT should expect of each method; None for the most.
    """
    from .engine_io import engine_io_of
    from .network import build_network

    signatures = {name: engine_io_of(program, name, expected) for name, expected in usual.items()}
    most = signatures[name]
    whole = build_network(exported, replace(most, lengths=(1, *most.lengths[1:])))
    return {
        method: replace(whole, inputs=tuple(spec.for_lengths(one.lengths) for spec in whole.inputs))
        for method, one in signatures.items()
    }


def methods_by_engine(networks: Mapping[str, Network]) -> list[list[str]]:
    """Return the methods of each engine."""
    found: dict[int, list[str]] = {}
    for method, network in networks.items():
        found.setdefault(id(network.definition), []).append(method)
    return list(found.values())


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
    first = next(iter(records.values()))
    remark = f"built for {first.built_for}; network verified on CPU; not executed"
    if first.products == "tf32":
        remark += f"; {TF32_REMARK}"
    return StandIn(NetworkRunner(description.methods, networks), remark)


def record_of(method: str, network: Network, capabilities: tuple[int, ...], profile: int | None = None) -> EngineRecord:
    """Return the manifest's record of a method's engine."""
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
                # Of the logits of several tokens, the most.
                shape=[
                    network.scored_tokens if size == -1 and network.scored_tokens else size
                    for size in network.results.get(tensor.name, tensor.shape)
                ],
            )
            for tensor in outputs
        ],
        aliases=network.aliases,
        capabilities=list(capabilities),
        layers=network.layer_counts,
        network=network.digest,
        builder=builder_version(),
        profile=profile,
        products="tf32" if has_rtx() and network.multiplies_float32 else None,
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
