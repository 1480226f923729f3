"""What a target provides: `lower` a program to files, and `open` the files as something that runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from ..cache.layers import layer_from

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ..cache.layers import CacheLayer
    from ..generation.sampling import Sampler
    from ..program.methods import ProgramMethod
    from ..program.program import Program
    from ..program.spec import Form, Logits, ProgramSpec
    from .options import TargetOptions

#: Default size limit in megabytes of a folder of compiled graphs: some hundred graphs.
GRAPH_CACHE_MB = 1024


@dataclass(frozen=True)
class LoweredFile:
    """A file that `lower` wrote.

    Attributes:
        name: Path inside the folder.
        holds: What it is, for people: "both methods, weights, cache".
        details: What the target must know of it later and cannot read from it: JSON, kept in the manifest.
    """

    name: str
    holds: str
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StandIn:
    """What verification runs instead of a program that this machine cannot execute.

    Attributes:
        runner: Computes what the program was made from, step by step.
        remark: What that says of the program, and what not: "built for SM 80; network verified on CPU; not executed".
    """

    runner: Runner
    remark: str


class Runner(Protocol):
    """An opened program. It trusts its caller: ranges, dtypes and room are checked by the session.

    What only some can do are protocols of their own: `HasState`, `ChoosesInGraph`, `HasDevice`.
    """

    @property
    def methods(self) -> Mapping[str, ProgramMethod]:
        """By name."""
        ...

    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """One call.

        Args:
            method: Name of one of `methods`.
            *inputs: The tensors that the method takes, in the order of `ProgramMethod.inputs`: for text these are
                input_ids int64 [batch, length] and input_pos int64 [batch], the position of each row's first token; 0
                starts anew, an earlier one takes tokens back.

        Returns:
            What the method gives, safe to keep: of a step logits [batch, vocab], of others all of
            `ProgramMethod.outputs`.
        """
        ...


@runtime_checkable
class HasState(Protocol):
    """A runner that gives out its cache: sessions save, load, fork and copy rows through it."""

    @property
    def state(self) -> Mapping[str, torch.Tensor]:
        """The cache tensors by name (`layers.0.keys`), rows first: steps change them, and so may others between steps,
        in place.

        Ask anew after every step: programs that pass their cache along have other tensors then.
        """
        ...


@runtime_checkable
class ChoosesInGraph(Protocol):
    """A runner whose decode steps can choose the next tokens themselves."""

    def run_and_choose(self, method: str, chooser: Sampler, *inputs: torch.Tensor, steps: int = 1) -> torch.Tensor:
        """Decode steps, each of which feeds what the one before has chosen: int64 [batch, steps].

        Args:
            method: Name of a method of one token.
            chooser: How to choose.
            *inputs: Of the first step, see `Runner.run`.
            steps: How many.
        """
        ...


@runtime_checkable
class WaitsForGraphs(Protocol):
    """A runner whose graphs may be compiled while steps go on without them."""

    @property
    def pending_graphs(self) -> int:
        """Graphs that are being compiled."""
        ...

    def waiting(self) -> AbstractContextManager[None]:
        """A block in which each step waits for its graph."""
        ...

    def graph_of(self, method: str) -> str:
        """The same for methods that one graph serves."""
        ...


@runtime_checkable
class HasDevice(Protocol):
    """A runner whose inputs are expected elsewhere than on the CPU."""

    device: torch.device


def state_of(runner: Runner) -> Mapping[str, torch.Tensor] | None:
    """The cache tensors of a runner that gives them out, None of others."""
    return runner.state if isinstance(runner, HasState) else None


class Backend(Protocol):
    """A target."""

    #: Name of the target.
    name: str
    #: Packages whose versions decide whether a bundle can be opened.
    packages: tuple[str, ...]
    #: Most rows a program can have, or None for any number.
    max_batch_size: int | None
    #: Schemes of `quantization_spec.Quantization` that it has kernels for.
    linear_schemes: tuple[str, ...]
    embedding_schemes: tuple[str, ...]

    #: What its files hold that runs without any check, such as "machine code"; "" where they hold data only.
    machine_code: str
    #: Its options.
    options: type[TargetOptions]
    # Whether its programs may have sums over processes inside is `sums_over_ranks`; those without the name do not.

    def program_spec(self, asked: ProgramSpec, options: TargetOptions) -> ProgramSpec:
        """What this target makes of the program that is asked for: attention, form of state, methods.

        Args:
            asked: With the chunk of a prompt and the modalities; the rest is the target's.
            options: Of the target.
        """
        ...

    def lower(self, program: Program, folder: Path, options: TargetOptions) -> list[LoweredFile]:
        """Write the program's files into `folder`."""
        ...

    def open(self, folder: Path, description: ProgramDescription) -> Runner:
        """Open what `lower` wrote."""
        ...


@runtime_checkable
class RunsElsewhere(Protocol):
    """A backend whose programs may be for another machine than the one they are lowered and verified on."""

    def runs_here(self, description: ProgramDescription, options: TargetOptions) -> bool:
        """Whether this machine can run the program that is described.

        Args:
            options: Of the target, as given at export.
        """
        ...

    def stand_in(self, program: Program, description: ProgramDescription, options: TargetOptions) -> StandIn:
        """What to verify in place of a program that this machine cannot run.

        Args:
            program: What was lowered, or one made anew from the model and the manifest.
            description: Of what was lowered.
            options: Of the target, as given at export.

        Raises:
            VerificationError: If `program` is not what the files were made from.
        """
        ...


@dataclass(frozen=True)
class ProgramDescription:
    """What a runner must know of a program that is on disk; part of a bundle's manifest.

    Attributes:
        methods: By name.
        form: Where the state lives.
        logits: Which logits come back.
        batch_size: Rows.
        layers: Per layer: config, and per state tensor shape and dtype name.
        details: Of each file, see `LoweredFile`.
    """

    methods: dict[str, ProgramMethod]
    form: Form
    logits: Logits
    batch_size: int
    layers: list[dict[str, Any]] = field(default_factory=list)
    details: dict[str, dict[str, Any]] = field(default_factory=dict)


def empty_layers(description: ProgramDescription) -> list[CacheLayer]:
    """The layers of a program on disk, zeroed."""
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
    """What a target makes of the dtype of weights.

    `TargetDtypes(torch.float32)` exports every checkpoint in float32, `TargetDtypes()` each as it is stored.

    Attributes:
        best: Chosen where no dtype was asked for; None for the one the weights are stored in.
        refused: Dtypes that cannot be had, and why.
        keeps_exact: Whether weights of linear layers and tables are stored in the type that has them without loss,
            whatever is computed in.
    """

    best: torch.dtype | None = None
    refused: Mapping[torch.dtype, str] = field(default_factory=dict)
    keeps_exact: bool = False

    def preferred(self, stored: torch.dtype) -> torch.dtype:
        """The dtype for weights that are stored in `stored`."""
        return stored if self.best is None else self.best


# torch has kernels of its own for every floating dtype, and GPUs have units for 16-bit ones: half the bytes, and
# nothing rounded twice.
_AS_STORED = TargetDtypes()
# XNNPACK computes float32 on every processor. Its float16 is emulated where the processor has no such units, and what
# it leaves to the runtime there is slower still.
_XNNPACK = TargetDtypes(
    torch.float32,
    {
        torch.bfloat16: (
            "XNNPACK has no bfloat16 kernels, and with those of the runtime itself, which would take their place, "
            "attention gives wrong numbers and nan"
        )
    },
)
_NATIVE_LINEARS = replace(_XNNPACK, keeps_exact=True)


def target_dtypes(target: str, options: Mapping[str, Any]) -> TargetDtypes:
    """Of a target with the options given; unknown targets take weights as they are stored.

    Args:
        options: Of the target: ExecuTorch's delegate `tensorrt` computes what target `tensorrt` does. Programs for its
            other delegates are verified through XNNPACK.
    """
    if target == "executorch" and options.get("delegate") != "tensorrt":
        return _NATIVE_LINEARS if (options.get("linears") or options.get("kernels")) == "native" else _XNNPACK
    return _AS_STORED
