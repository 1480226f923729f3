"""Inputs, outputs and state of an engine, and the record of an engine in the manifest.

The record is needed because a plan shows none of this without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...common.progress import bytes_text
from ...errors import BundleError, DeviceMemoryError, UnsupportedModelError
from .options import HOPPER, describe_capabilities, loads_on, remedy_for

if TYPE_CHECKING:
    import torch
    from torch.fx import GraphModule

    from ...program.methods import ProgramMethod
    from ...program.program import Program


#: Prefixes of state before a step, such as `cache.layers.0.keys`, and after it, such as `next.layers.0.keys`.
STATE_IN, STATE_OUT = "cache.", "next."
#: Prefix of the slots' tensors for adapters, such as `lora.0` and `lora.1` of the first layer.
LORA_IN = "lora."
LOGITS, NEXT_POS = "logits", "next_pos"
#: Name of a step's input with embeddings instead of token ids.
EMBEDS = "inputs_embeds"

_LENGTH = ".cumulative_length"


@dataclass(frozen=True)
class InputSpec:
    """Name of a network input, and its shapes for the fewest, the expected and the most new tokens."""

    name: str
    dtype: torch.dtype
    min_shape: tuple[int, ...]
    opt_shape: tuple[int, ...]
    max_shape: tuple[int, ...]

    @property
    def is_dynamic(self) -> bool:
        """True if the shape depends on the number of new tokens."""
        return self.min_shape != self.max_shape

    def for_lengths(self, lengths: tuple[int, int, int]) -> InputSpec:
        """Return the shapes for other fewest, expected and most new tokens, in the same network."""
        dims = list(zip(self.min_shape, self.max_shape, strict=True))
        shapes = (tuple(least if least == most else length for least, most in dims) for length in lengths)
        return InputSpec(self.name, self.dtype, *shapes)


@dataclass(frozen=True)
class EngineIO:
    """Names and sizes of one method's tensors.

    Attributes:
        inputs: Inputs of the method, in order: `input_ids`, `input_pos`.
        state: Names of all state tensors in the order of the cache's pytree, lengths included.
        lengths: Fewest, expected and most new tokens.
        scored_tokens: See `ProgramMethod.scored_tokens`.
        empty: Names of empty state tensors, such as rotated keys of a model without rotation.
        lora: Names of the slots' tensors for adapters.
        results: Largest shape of each output by its name, for a method that is not a step and has no state.
        shapes: Shapes of the inputs by name, with the names of sizes.
        ranges: Least, expected and largest of each named size except "length".
    """

    inputs: tuple[str, ...]
    state: tuple[str, ...]
    lengths: tuple[int, int, int]
    empty: frozenset[str] = frozenset()
    scored_tokens: int = 0
    lora: tuple[str, ...] = ()
    results: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)
    ranges: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)

    @property
    def kept_state(self) -> tuple[str, ...]:
        """State tensors that are inputs and outputs of the engine.

        Lengths are not, because they are an input of the method, and neither are empty ones, which TensorRT does not
        support.
        """
        return tuple(name for name in self.state if not name.endswith(_LENGTH) and name not in self.empty)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of all outputs, in order: logits, the next position, the next state; or the results."""
        if self.results:
            return tuple(self.results)
        return (LOGITS, NEXT_POS, *(STATE_OUT + name for name in self.kept_state))

    def bind(self, graph: GraphModule) -> tuple[tuple[InputSpec, ...], tuple[str, ...]]:
        """Remove lengths, empty state, and outputs of unchanged state from a lowered graph, in place.

        As inputs, lengths are never read, and as outputs all of them are equal. A step of a decoder leaves the keys and
        values of cross-attention unchanged.

        Returns:
            The remaining inputs and the names of the remaining outputs, in order.

        Raises:
            UnsupportedModelError: If the graph reads a length or an empty tensor.
        """
        # Imported here, because runners without torch read records, too.
        from ...common.compat.torch import reset_signature

        outputs, unchanged = self.outputs, set[str]()
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        names = (*self.inputs, *(STATE_IN + name for name in self.state), *self.lora)
        taken = dict(zip(names, placeholders, strict=True))
        if not self.results:
            output = next(node for node in graph.graph.nodes if node.op == "output")
            given = dict(zip((LOGITS, *self.state), output.args[0], strict=True))
            position = given[next(name for name in self.state if name.endswith(_LENGTH))]
            results = {LOGITS: given[LOGITS], NEXT_POS: position}
            results |= {STATE_OUT + name: given[name] for name in self.kept_state}
            unchanged = {name for name in self.kept_state if given[name] is taken[STATE_IN + name]}
            outputs = tuple(name for name in outputs if name.removeprefix(STATE_OUT) not in unchanged)
            output.args = (tuple(results[name] for name in outputs),)
            output.meta.pop("val", None)
        graph.graph.eliminate_dead_code()
        kept, specs = {STATE_IN + name for name in self.kept_state}.union(self.inputs, self.lora), []
        for name, node in taken.items():
            # TensorRT does not keep inputs that nothing reads.
            if name in kept and (node.users or name.removeprefix(STATE_IN) not in unchanged):
                specs.append(self._spec(name, node.meta["val"]))
                continue
            if node.users:
                raise UnsupportedModelError(
                    f"the program reads {name} instead of input_pos; export for another target"
                    if name.endswith(_LENGTH)
                    else f"the program reads {name}, which is empty; export for another target"
                )
            graph.graph.erase_node(node)
        reset_signature(graph.graph)
        graph.recompile()
        return tuple(specs), outputs

    def _spec(self, name: str, traced: torch.Tensor) -> InputSpec:
        named: Sequence[int | str] = self.shapes.get(name, traced.shape)
        ranges = [
            (size,) * 3 if isinstance(size, int) else self.ranges.get(str(label), self.lengths)
            for label, size in zip(named, traced.shape, strict=True)
        ]
        least, expected, most = (tuple(one[index] for one in ranges) for index in range(3))
        return InputSpec(name, traced.dtype, least, expected, most)


def engine_io_of(program: Program, method: str, opt_length: int | None = None) -> EngineIO:
    """Return the inputs and outputs of one method.

    Args:
        program: Program of the method.
        method: Name of the method.
        opt_length: New tokens that TensorRT should expect, within the method's range; the most by default.
    """
    described = program.methods[method]
    lengths = (described.min_length, opt_length or described.max_length, described.max_length)
    shapes = {spec.name: spec.shape for spec in described.inputs}
    ranges = {name: (least, most, most) for name, (least, most) in described.ranges.items()}
    if not described.is_step:
        sizes = {"batch": program.batch_size, "length": described.max_length}
        sizes |= {name: most for name, (_, most) in described.ranges.items()}
        results = {spec.name: tuple(spec.sizes(sizes)) for spec in described.outputs}
        return EngineIO(described.input_names, (), lengths, results=results, shapes=shapes, ranges=ranges)
    state = dict(program.cache.named_state())
    empty = frozenset(name for name, tensor in state.items() if tensor.numel() == 0)
    count = 0 if program.lora is None else 2 * len(program.lora.targets)
    lora = tuple(f"{LORA_IN}{index}" for index in range(count))
    return EngineIO(
        described.input_names,
        tuple(state),
        lengths,
        empty,
        described.scored_tokens,
        lora,
        shapes=shapes,
        ranges=ranges,
    )


def engine_inputs(
    methods: Mapping[str, ProgramMethod],
    method: str,
    names: Sequence[str],
    inputs: Sequence[torch.Tensor],
    embed: Callable[[torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    """Return the inputs of a method's engine, which may be that of a method that takes embeddings.

    Args:
        methods: Methods of the program.
        method: Name of the method.
        names: Names of the engine's inputs without state, in order.
        inputs: Inputs of the method.
        embed: Function from ids to embeddings, the method `embed`.
    """
    specs = methods[method].inputs
    given = dict(zip((spec.name for spec in specs), inputs, strict=True))
    if EMBEDS not in names or EMBEDS in given:
        return [given[name] for name in names]
    import torch

    from ...program.inputs.multimodal import IMAGE_IDS
    from ...program.methods import POSITIONS, ROPE_DELTAS

    ids = given["input_ids"]
    given[EMBEDS] = embed(ids)
    given[IMAGE_IDS.name] = torch.full_like(ids, -1)
    whole = next(one for one in methods.values() if one.is_step and not one.takes_ids)
    axes = next((spec.shape[0] for spec in whole.inputs if spec.name == POSITIONS), 0)
    if axes:
        # All axes of text are equal.
        first = given["input_pos"] + given[ROPE_DELTAS.name]
        positions = first[:, None] + torch.arange(ids.shape[1], device=ids.device)
        given[POSITIONS] = positions.expand(int(axes), *positions.shape)
    return [given[name] for name in names]


#: Field of a file's details that lists its engines.
ENGINES = "engines"


#: Name of a dtype that TensorRT and torch share, because runners look it up by its name.
_Dtype = Annotated[str, Field(pattern=r"^(bool|int8|uint8|int32|int64|float16|bfloat16|float32)$")]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Input(_Entry):
    """A network input with its optimization profile: the three shapes are equal if it is static."""

    name: str
    dtype: _Dtype
    min_shape: list[int]
    opt_shape: list[int]
    max_shape: list[int]


class Output(_Entry):
    """A network output; -1 is a size that is known at run time only.

    Logits have three dimensions if they are of several tokens, and the second one is the most.
    """

    name: str
    dtype: _Dtype
    shape: list[int]


class EngineRecord(_Entry):
    """Record of one engine.

    Attributes:
        method: Method that the engine runs.
        inputs: Inputs, bound by name.
        outputs: Outputs, bound by name.
        products: "tf32" if the GPU multiplies float32 with the 10 bits of TF32, as TensorRT-RTX 1.5 does with its flag
            cleared, too; None if products keep the bits of their dtype, and in older bundles.
        profile: Index of the optimization profile whose shapes `inputs` has, if methods share an engine; None in an
            engine of one method.
        aliases: Names of inputs by the output that shares their memory: both are bound to one address.
        capabilities: Compute capabilities it was built for, such as 80; empty for TensorRT's portable default.
        layers: Number of network layers by kind.
        network: sha256 of what the plan was built from, see `Network.digest`.
        builder: TensorRT package and version.
    """

    method: str
    inputs: list[Input]
    outputs: list[Output]
    aliases: dict[str, str]
    capabilities: list[int]
    layers: dict[str, int]
    network: str
    builder: str
    profile: int | None = None
    products: str | None = None

    @property
    def built_for(self) -> str:
        """Compute capabilities as text, such as `SM 80, 86`."""
        return describe_capabilities(self.capabilities)

    @property
    def state(self) -> list[Input]:
        """Inputs that hold the cache."""
        return [tensor for tensor in self.inputs if tensor.name.startswith(STATE_IN)]

    @property
    def lora(self) -> list[Input]:
        """Inputs that hold the slots for adapters, in the order of `write_adapter`."""
        return [tensor for tensor in self.inputs if tensor.name.startswith(LORA_IN)]


def details_of(*records: EngineRecord) -> dict[str, Any]:
    """Return the manifest's details of a file that contains these engines."""
    return {ENGINES: [record.model_dump() for record in records]}


def check_computes(here: int, record: EngineRecord) -> None:
    """Refuse a plan that a GPU loads and computes wrongly: without 80 for Hopper, as those of float8 are.

    An H200 gave not-a-number for all logits of such a plan (docs/gpu.md).

    Raises:
        BundleError: With both sides.
    """
    if here == HOPPER and not loads_on(here, record.capabilities):
        raise BundleError(
            f"the engine of {record.method!r} must be built portably or for SM 80 to run on SM {HOPPER}, got one for "
            f"{record.built_for}, which computes not-a-number there; {remedy_for(here)}, in another scheme than fp8"
        )


def check_fits(plans: int, cache: int, free: int, total: int) -> None:
    """Check that plans and cache fit into the free memory of a GPU, because TensorRT names no sizes if they do not.

    Args:
        plans: Bytes of the plans.
        cache: Bytes of the cache and of slots for adapters.
        free: Free bytes on the GPU.
        total: All bytes of the GPU.

    Raises:
        DeviceMemoryError: With both sides.
    """
    if plans + cache > free:
        raise DeviceMemoryError(
            f"the GPU must have {bytes_text(plans + cache)} free ({bytes_text(plans)} of plans, {bytes_text(cache)} of "
            f"cache), got {bytes_text(free)} of {bytes_text(total)}; end other programs there, or export with a "
            "smaller max_cache_len or with quantize"
        )


def bind(context: Any, record: EngineRecord, inputs: Sequence[Input], addresses: Mapping[str, int]) -> None:
    """Set the addresses of an engine's tensors, and the largest shapes of its inputs if its shapes are open.

    Args:
        context: Execution context of TensorRT.
        record: Record of the engine.
        inputs: Inputs of the method, which are not state.
        addresses: Address of each tensor, by name.

    Raises:
        BundleError: If the engine lacks a tensor.
    """
    if record.profile is not None:
        # The network's shapes are open, also those of a method whose inputs have one shape.
        for given in inputs:
            context.set_input_shape(given.name, tuple(given.max_shape))
    for name, address in addresses.items():
        if not context.set_tensor_address(name, address):
            raise BundleError(f"the engine of {record.method!r} has no tensor {name!r}; export the model again")


def load_error(here: int, file: str, record: EngineRecord, reasons: Sequence[str]) -> BundleError:
    """Return the error for a plan that TensorRT does not load, with both versions and both capabilities.

    Args:
        here: Compute capability of the GPU, such as 89.
        file: Name of the plan.
        record: Record of one of its engines.
        reasons: What TensorRT logged.
    """
    package, _, version = record.builder.partition(" ")
    installed, remedy = _installed(package), remedy_for(here)
    if installed != version:
        remedy = f"pip install {package}=={version}, or {remedy}"
    return BundleError(
        f"{package} {installed} cannot load {file}, which {record.builder} built for {record.built_for}, on this GPU "
        f"of SM {here}: {'; '.join(reasons) or 'no reason given'}; {remedy}"
    )


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(unknown version)"


def records_of(details: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, EngineRecord]]:
    """Return the file name and record of each method's engine.

    Args:
        details: Details by file name, as `details_of` made them; files without engines are skipped.

    Raises:
        BundleError: If an entry does not describe an engine.
    """
    records = {}
    for file, fields in details.items():
        for entry in fields.get(ENGINES, []):
            try:
                record = EngineRecord.model_validate(entry)
            except ValidationError as error:
                where = ".".join(str(part) for part in error.errors()[0]["loc"])
                raise BundleError(
                    f"the manifest's entry of the engine in {file} is invalid: {where}; export the model again"
                ) from error
            records[record.method] = (file, record)
    return records
