"""The interfaces of a target: it lowers a program to files, and opens the files as a runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from ..cache.layers import layer_from
from ..errors import UnsupportedModelError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from transformers import PreTrainedModel

    from ..cache.layers import CacheLayer
    from ..generation.sampling import Sampler
    from ..models.cache_factory import ExportableCache
    from ..models.lora import LoraSlots
    from ..program.methods import ProgramMethod
    from ..program.program import Program
    from ..program.spec import Form, Logits, ProgramSpec
    from .options import TargetOptions

#: Default size limit in megabytes of a folder of compiled graphs: some hundred graphs.
GRAPH_CACHE_MB = 1024


def check_decoder(model: PreTrainedModel, cache: ExportableCache, where: str, instead: str) -> None:
    """Check that a model keeps no encoder's output in its cache.

    Args:
        model: The model.
        cache: Its cache.
        where: What takes decoders alone, for the message.
        instead: What to export for.

    Raises:
        UnsupportedModelError: If it does.
    """
    from ..models.cache_factory import ExportableEncoderDecoderCache

    if isinstance(cache, ExportableEncoderDecoderCache):
        raise UnsupportedModelError(
            f"{type(model).__name__} keeps an encoder's output, which {where} does not support yet; export for "
            f"{instead}"
        )


@dataclass(frozen=True)
class LoweredFile:
    """A file that `lower` wrote.

    Attributes:
        name: Path inside the folder.
        holds: Content of the file, for people: "both methods, weights, cache".
        details: JSON for the manifest, which the target needs later and cannot read from the file.
    """

    name: str
    holds: str
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StandIn:
    """A substitute that verification runs for a program that this machine cannot execute.

    Attributes:
        runner: A runner of what the program was made from.
        remark: What the verification covers, such as "built for SM 80; network verified on CPU; not executed".
    """

    runner: Runner
    remark: str


class Runner(Protocol):
    """An opened program. It does not check ranges, dtypes and free slots; the session does.

    Optional abilities are separate protocols, such as `HasState`, `ChoosesInGraph` and `HasDevice`.
    """

    @property
    def methods(self) -> Mapping[str, ProgramMethod]:
        """The methods by name."""
        ...

    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run a method.

        Args:
            method: Name of one of `methods`.
            *inputs: Tensors in the order of `ProgramMethod.inputs`. For text these are input_ids int64 [batch, length]
                and input_pos int64 [batch], the position of each row's first token. Position 0 starts a new sequence,
                and an earlier position than the last takes tokens back.

        Returns:
            Logits [batch, vocab] for a step, and all of `ProgramMethod.outputs` for other methods. The tensors stay
            valid after later calls.
        """
        ...


@runtime_checkable
class HasState(Protocol):
    """A runner that exposes its cache, so that sessions can save, load, fork and copy rows."""

    @property
    def state(self) -> Mapping[str, torch.Tensor]:
        """The cache tensors by name (`layers.0.keys`), rows first. Steps and callers change them in place.

        Read this again after every step, because programs with an explicit cache return new tensors.
        """
        ...


@runtime_checkable
class GivesTensors(Protocol):
    """A runner that gives out the tensors of its cache in the layout of its target, so that sessions can save them."""

    def state_tensor(self, name: str) -> torch.Tensor | None:
        """Return a tensor of the cache by name (`layers.0.keys`), which callers may change; None without it."""
        ...


@runtime_checkable
class ChoosesInGraph(Protocol):
    """A runner whose decode steps can choose the next tokens in the graph."""

    def run_and_choose(self, method: str, chooser: Sampler, *inputs: torch.Tensor, steps: int = 1) -> torch.Tensor:
        """Run decode steps that each feed the token chosen by the one before: int64 [batch, steps].

        Args:
            method: Name of a method of one token.
            chooser: Sampler that chooses the tokens.
            *inputs: Inputs of the first step, see `Runner.run`.
            steps: Number of steps.
        """
        ...


@runtime_checkable
class MakesShift(Protocol):
    """A runner over a live model, which makes the method `shift` when it is first needed."""

    def make_shift(self) -> None:
        """Add the method `shift`.

        Raises:
            UnsupportedModelError, InputError: If the model or its cache cannot be shifted, see `shift_module`.
        """
        ...


@runtime_checkable
class WaitsForGraphs(Protocol):
    """A runner whose steps run eagerly while their graphs are being compiled."""

    @property
    def pending_graphs(self) -> int:
        """Number of graphs that are being compiled."""
        ...

    def waiting(self) -> AbstractContextManager[None]:
        """Make each step in this block wait for its graph."""
        ...

    def graph_of(self, method: str) -> str:
        """Return the graph name of `method`. Methods that share a graph return the same name."""
        ...


@runtime_checkable
class HasDevice(Protocol):
    """A runner whose inputs must be on a given device instead of the CPU."""

    device: torch.device


@runtime_checkable
class RoundsProducts(Protocol):
    """A runner that rounds the inputs of products to fewer bits than their dtype has."""

    #: Dtype with as many bits, which the tolerance of a verification follows; None if products keep all bits.
    products: torch.dtype | None


def products_of(runner: Runner) -> torch.dtype | None:
    """Return the dtype that a runner rounds the inputs of products to; None if they keep all bits."""
    return runner.products if isinstance(runner, RoundsProducts) else None


def state_of(runner: Runner) -> Mapping[str, torch.Tensor] | None:
    """Return the cache tensors of a runner that has `HasState`, None otherwise."""
    return runner.state if isinstance(runner, HasState) else None


class Backend(Protocol):
    """A target."""

    #: Name of the target.
    name: str
    #: Packages whose versions must match to open a bundle.
    packages: tuple[str, ...]
    #: Maximum batch size of a program, None without a limit.
    max_batch_size: int | None
    #: Schemes of `quantization_spec.Quantization` that the target has kernels for.
    linear_schemes: tuple[str, ...]
    embedding_schemes: tuple[str, ...]
    # A target with scheme "keep" has the attribute `kept_weights`, one of `KEPT_FORMS`; the default is "affine".
    # One that also takes the experts of mixtures in some of these schemes has `expert_schemes`.

    #: Unchecked code in its files, such as "machine code"; "" if they contain only data.
    machine_code: str
    #: Class of the target's options.
    options: type[TargetOptions]
    # A target whose programs may contain sums over processes has the attribute `sums_over_ranks`, and one whose
    # programs may have slots for adapters has `holds_adapters`.

    def program_spec(self, asked: ProgramSpec, options: TargetOptions) -> ProgramSpec:
        """Return the program that this target supports for a requested one.

        Args:
            asked: The requested program, of which the target sets attention, form of state and methods.
            options: Options of the target.
        """
        ...

    def lower(self, program: Program, folder: Path, options: TargetOptions) -> list[LoweredFile]:
        """Write the program's files to `folder`."""
        ...

    def open(self, folder: Path, description: ProgramDescription) -> Runner:
        """Open what `lower` wrote."""
        ...


@runtime_checkable
class RunsElsewhere(Protocol):
    """A backend whose programs may need another machine than the one that lowers and verifies them."""

    def runs_here(self, description: ProgramDescription, options: TargetOptions) -> bool:
        """Return True if this machine can run the described program.

        Args:
            description: The program.
            options: Options of the target, as given at export.
        """
        ...

    def stand_in(
        self, program: Program, description: ProgramDescription, options: TargetOptions, folder: Path
    ) -> StandIn:
        """Return what to verify instead of a program that this machine cannot run.

        Args:
            program: The lowered program, or one made again from the model and the manifest.
            description: Description of the lowered program.
            options: Options of the target, as given at export.
            folder: Folder with the program's files.

        Raises:
            VerificationError: If the files were not made from `program`.
        """
        ...


@dataclass(frozen=True)
class ProgramDescription:
    """Facts that a runner needs about a program on disk; part of a bundle's manifest.

    Attributes:
        methods: Methods by name.
        form: Where the state is.
        logits: Which logits are returned.
        batch_size: Number of rows.
        layers: For each layer its config, and the shape and dtype name of each state tensor.
        details: Details of each file, see `LoweredFile`.
        lora: Slots for adapters, if the program has any.
    """

    methods: dict[str, ProgramMethod]
    form: Form
    logits: Logits
    batch_size: int
    layers: list[dict[str, Any]] = field(default_factory=list)
    details: dict[str, dict[str, Any]] = field(default_factory=dict)
    lora: LoraSlots | None = None


def empty_layers(description: ProgramDescription) -> list[CacheLayer]:
    """Return the cache layers of a program on disk, filled with zeros."""
    return [
        layer_from(
            layer["config"],
            {
                name: torch.zeros(tensor["shape"], dtype=getattr(torch, tensor["dtype"]))
                for name, tensor in layer["tensors"].items()
            },
        )
        for layer in description.layers
    ]


@dataclass(frozen=True)
class TargetDtypes:
    """The dtypes that a target supports for weights.

    `TargetDtypes(torch.float32)` exports every checkpoint in float32, `TargetDtypes()` in its stored dtype.

    Attributes:
        best: Default dtype, None for the one that the weights are stored in.
        refused: Dtypes that are not supported, with the reason.
        keeps_exact: True if weights of linear layers and embeddings are stored in the smallest dtype that represents
            them exactly, independently of the dtype of the computation.
        rounded: Dtype that inputs of layers with weights of this dtype are rounded to; None to keep all their bits.
        quantized: Dtypes that programs with quantised weights can compute in, the best one first.
        remarks: What `export` says of a dtype that is supported.
    """

    best: torch.dtype | None = None
    refused: Mapping[torch.dtype, str] = field(default_factory=dict)
    keeps_exact: bool = False
    rounded: torch.dtype | None = None
    quantized: tuple[torch.dtype, ...] = (torch.float32,)
    remarks: Mapping[torch.dtype, str] = field(default_factory=dict)

    def preferred(self, stored: torch.dtype) -> torch.dtype:
        """Return the default dtype for weights that are stored in `stored`."""
        return stored if self.best is None else self.best


# torch has kernels for every floating dtype, and GPUs have 16-bit units: half the bytes, and no second rounding.
_AS_STORED = TargetDtypes()
# TensorRT dequantises weights to the dtype of the product.
_TENSORRT = TargetDtypes(
    quantized=(torch.float16, torch.bfloat16, torch.float32),
    remarks={
        torch.float16: (
            "float16 was outside the tolerance for larger models on the one GPU tried (H200), because TensorRT may add "
            "in 16 bits; bfloat16, which no GPU has run, and float32 (--dtype) do not"
        )
    },
)
# XNNPACK computes float32 on every processor. Without hardware support its float16 is emulated, and operators that are
# left to the runtime are slower still.
_XNNPACK = TargetDtypes(
    torch.float32,
    {
        torch.bfloat16: (
            "XNNPACK has no bfloat16 kernels, and with those of the runtime, which would be used instead, attention "
            "gives wrong numbers and nan"
        )
    },
)
# Core AI's runtime off Macs rounds more than half precision does, and verification refuses it.
_COREAI = TargetDtypes(torch.float32)
# GPUs have units of 16 bits, but only float32 was evaluated.
_MLX = TargetDtypes(torch.float32)
# The runtime's glue to OpenVINO takes floats of 32 bits only.
_OPENVINO = TargetDtypes(
    torch.float32, dict.fromkeys((torch.float16, torch.bfloat16), "ExecuTorch passes OpenVINO float32 only")
)
_NATIVE_LINEARS = replace(_XNNPACK, keeps_exact=True)
_ROUNDED_LINEARS = replace(_NATIVE_LINEARS, rounded=torch.bfloat16)


def target_dtypes(target: str, options: Mapping[str, Any]) -> TargetDtypes:
    """Return the dtypes of a target with the given options. Unknown targets keep the stored dtype.

    Args:
        target: Name of the target.
        options: Options of the target. ExecuTorch's delegate `tensorrt` computes like target `tensorrt`. Programs for
            Vulkan and Core ML are verified with XNNPACK.
    """
    delegates = {"tensorrt": _TENSORRT, "openvino": _OPENVINO, "mlx": _MLX, "tosa": _OPENVINO}
    if target == "executorch" and options.get("delegate") in delegates:
        return delegates[options["delegate"]]
    if target == "executorch":
        if (options.get("linears") or options.get("kernels")) != "native":
            return _XNNPACK
        return _ROUNDED_LINEARS if options.get("compute") == "bfloat16" else _NATIVE_LINEARS
    return {"tensorrt": _TENSORRT, "coreai": _COREAI}.get(target, _AS_STORED)
