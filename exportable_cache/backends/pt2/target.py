"""The `pt2` target: its options; programs are traced by torch.export and run by torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from ...cache.attention import ATTENTION
from ...cache.policies import CrossPolicy
from ...common.compat.torch import tree_flatten, tree_unflatten
from ...common.settings import setting
from ...errors import BundleError, first_line
from ...models.lora import LORA_TENSORS
from ...program.spec import Form, ProgramSpec
from ..base import LoweredFile, empty_layers
from ..options import TargetOptions
from .archive import read_archive, write_archive

if TYPE_CHECKING:
    from ...program.program import Program
    from ..base import ProgramDescription, Runner
    from .archive import StoredProgram


@dataclass(frozen=True)
class Pt2Options(TargetOptions):
    """Options of target `pt2`.

    Attributes:
        form: `resident` (the default: the program contains the cache and updates it in place) or `explicit` (the cache
            is an input and an output).
        strict: Trace through TorchDynamo.
        buckets: Read lengths with a separate method, so that short sequences take less time, see `ProgramSpec`. Each
            adds its graph to the file, but no weights.
        score_length: If not 0, add a method that returns logits after each of up to this many tokens, for speculative
            decoding.
        shift: Add the method `shift`, which drops old tokens of a full cache, see `Session.shift`.
    """

    target: ClassVar[str] = "pt2"

    form: Form | str = Form.RESIDENT
    strict: bool = setting(False, "Trace through TorchDynamo.", kind=bool)
    buckets: Sequence[int] = ()
    score_length: int = 0
    shift: bool = setting(False, "Add a method that drops old tokens when the cache is full.", kind=bool)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.program_spec(ProgramSpec())

    def program_spec(self, asked: ProgramSpec) -> ProgramSpec:
        """Return the program for these options."""
        return replace(asked, form=self.form, buckets=self.buckets, score_length=self.score_length, shift=self.shift)


class StoredRunner:
    """Runs the programs of a file and checks their outputs, because the file may not match its manifest.

    Raises:
        BundleError: If a method of the description is not in the file.
    """

    def __init__(self, programs: Mapping[str, StoredProgram], description: ProgramDescription) -> None:
        missing = description.methods.keys() - programs.keys()
        if missing:
            raise BundleError(
                f"the manifest names the methods {', '.join(sorted(missing))}, which the program's file does not have; "
                "export the model again"
            )
        self.methods, self._rows = description.methods, description.batch_size
        self._modules = {name: programs[name].module for name in description.methods}

    def call(self, method: str, inputs: tuple) -> tuple[torch.Tensor, ...]:
        """Return the outputs of a method.

        Raises:
            BundleError: If the method fails, or a step does not return logits.
        """
        try:
            outputs = self._modules[method](*inputs)
        except (
            ArithmeticError,
            AssertionError,
            AttributeError,
            LookupError,
            MemoryError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise BundleError(
                f"method {method!r} of the program failed, {type(error).__name__}: {first_line(error)[:200]}; "
                "export the model again"
            ) from error
        if self.methods[method].is_step:
            self._check_step(method, outputs)
        return outputs

    def _check_step(self, method: str, outputs: tuple) -> None:
        first = outputs[0] if outputs else None
        if not isinstance(first, torch.Tensor):
            raise BundleError(f"method {method!r} of the program returns no logits; export the model again")
        if not first.is_floating_point() or first.ndim not in (2, 3) or first.shape[0] != self._rows:
            raise BundleError(
                f"method {method!r} of the program must return logits of {self._rows} rows, got {first.dtype} "
                f"{list(first.shape)}; export the model again"
            )


class ResidentRunner(StoredRunner):
    """Runs programs that contain their cache, which all methods share.

    Raises:
        BundleError: If the cache in the file does not match the description.
    """

    def __init__(self, programs: Mapping[str, StoredProgram], description: ProgramDescription) -> None:
        super().__init__(programs, description)
        held = {name: tensor for method in self.methods for name, tensor in programs[method].state.items()}
        self.state: Mapping[str, torch.Tensor] = {
            f"layers.{index}.{name}": _checked(held[f"layers_{index}_{name}"], f"layers.{index}.{name}", declared)
            for index, layer in enumerate(description.layers)
            for name, declared in layer["tensors"].items()
            if f"layers_{index}_{name}" in held
        }

    @torch.no_grad()
    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run a method, see `Runner.run`."""
        outputs = self.call(method, inputs)
        return outputs[0] if self.methods[method].is_step else outputs


def _checked(tensor: torch.Tensor, name: str, declared: Mapping) -> torch.Tensor:
    found = (list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    if found != (list(declared["shape"]), declared["dtype"]):
        raise BundleError(
            f"{name} is {found[1]} {found[0]} in the program's file and {declared['dtype']} {declared['shape']} in the "
            "manifest; export the model again"
        )
    return tensor


class ExplicitRunner(StoredRunner):
    """Runs programs that take the cache as an input and return it. This object holds the cache."""

    def __init__(self, programs: Mapping[str, StoredProgram], description: ProgramDescription) -> None:
        # Imported here because transformers takes longer to import than a bundle takes to open.
        from ...models.cache_factory import ExportableCache, ExportableEncoderDecoderCache

        super().__init__(programs, description)
        layers = empty_layers(description)
        has_encoder = any(isinstance(layer.policy, CrossPolicy) for layer in layers)
        self.cache = (ExportableEncoderDecoderCache if has_encoder else ExportableCache)(layers)

    @property
    def state(self) -> Mapping[str, torch.Tensor]:
        """The current cache tensors without the lengths, which are inputs."""
        return self.cache.stored_state()

    @torch.no_grad()
    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run a method, see `Runner.run`."""
        if not self.methods[method].is_step:
            return self.call(method, inputs)
        leaves, spec = tree_flatten(self.cache)
        logits, *written = self.call(method, (*inputs, *leaves))
        if len(written) != len(leaves):
            raise BundleError(
                f"method {method!r} must return {len(leaves)} cache tensors, got {len(written)}; export the model again"
            )
        self.cache = tree_unflatten(written, spec)
        return logits


FILE = "program.pt2"


class Pt2Backend:
    """Programs stored as torch.export graphs."""

    name = "pt2"
    packages = ("torch",)
    max_batch_size = None
    sums_over_ranks = True
    holds_adapters = True
    # No 4-bit schemes, because torch.export stores 4-bit weights in 8 bits each.
    linear_schemes = ("8w", "8da8w", "keep")
    embedding_schemes = ("8w",)

    machine_code = ""
    options = Pt2Options

    def program_spec(self, asked: ProgramSpec, options: Pt2Options) -> ProgramSpec:
        """Return the program for a requested one, see `Backend.program_spec`."""
        return replace(options.program_spec(asked), attention=ATTENTION, takes_lengths=True)

    def lower(self, program: Program, folder: Path, options: Pt2Options) -> list[LoweredFile]:
        """Write the program's files to `folder`."""
        exported = {name: program.export(name, strict=options.strict) for name in program.methods}
        longest = max(
            program.methods.values(),
            key=lambda one: (one.is_step, one.kv_read_len is None, not one.only_scores, one.max_length),
        )
        write_archive(folder / FILE, exported, longest.name)
        return [LoweredFile(FILE, f"methods {', '.join(exported)}, weights")]

    def open(self, folder: Path, description: ProgramDescription) -> Runner:
        """Open the files that `lower` wrote."""
        declared = {
            f"layers_{index}_{name}" for index, layer in enumerate(description.layers) for name in layer["tensors"]
        }
        if description.lora is not None:
            declared |= {f"model.{one.name}.{name}" for one in description.lora.targets for name in LORA_TENSORS}
        programs = read_archive(folder / FILE, declared)
        if description.form is Form.RESIDENT:
            return ResidentRunner(programs, description)
        return ExplicitRunner(programs, description)


backend = Pt2Backend()
