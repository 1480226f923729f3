"""The key of a compiled graph, and the model tensors that it reads without taking them as inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...common.compat.torch import module_tensors
from ...common.tensors import TensorSpec, kind_of_tensor
from ...generation.loop import Choice, ChoosingSteps

if TYPE_CHECKING:
    from torch import nn

    from ...models.cache_factory import ExportableCache
    from ...parallel.ranks import Ranks
    from ...program.methods import ProgramMethod


class OutdatedGraph(Exception):
    """A guard of a loaded graph fails."""

    def __init__(self) -> None:
        super().__init__("the model or torch's settings have changed since a graph was compiled")


#: Method name of a graph that chooses tokens and runs no model.
CHOICE = "choice"


class StepKey(NamedTuple):
    """A requested call.

    Attributes:
        method: Name of the method, or `CHOICE`.
        greedy, penalised: How the graph chooses tokens, see `Choice`; None if it returns logits.
        steps: Number of decode steps in the graph.
    """

    method: str
    greedy: bool | None = None
    penalised: bool | None = None
    steps: int = 1


class GraphKey(NamedTuple):
    """The key of a graph among those of one runner.

    Attributes:
        step: The call, with the name of the method that is compiled.
        is_shared: True if the graph serves several read lengths.
        ones: Dynamic sizes that are 1. They are part of the key because TorchDynamo specializes on 1.
    """

    step: StepKey
    is_shared: bool = False
    ones: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ChoiceMethod:
    """A choice of tokens, in the form of a method: all sizes are fixed, and settings are tensors."""

    greedy: bool
    penalised: bool
    name: str = "choice"
    is_step: bool = True
    inputs: tuple[TensorSpec, ...] = ()
    dynamic_sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Graph:
    """A call of a compiled graph.

    Attributes:
        method: The method that is compiled.
        module: The module that is compiled.
        key: The graph's key.
        arguments: The inputs, with dynamic sizes marked.
        requested: The call as it was requested: its method may be another one that `method` serves as well.
    """

    method: ProgramMethod | ChoiceMethod
    module: torch.nn.Module
    key: GraphKey
    arguments: list[torch.Tensor]
    requested: StepKey

    @property
    def name(self) -> str:
        """The graph's name among those of its method, equal in all processes."""
        step = self.key.step
        return f"{step.greedy} {step.penalised} {step.steps} {sorted(self.key.ones)}"


def choice_graph(choice: Choice, inputs: list[torch.Tensor]) -> Graph:
    """Return the graph of a choice without a step."""
    step = StepKey(CHOICE, choice.greedy, choice.penalised)
    return Graph(ChoiceMethod(choice.greedy, choice.penalised), choice, GraphKey(step), inputs, step)


def choosing(module: torch.nn.Module, step: StepKey, ranks: Ranks | None = None) -> torch.nn.Module:
    """Return a step followed by the choice of tokens that `step` asks for, which is rank 0's on all ranks."""
    if step.greedy is None or step.penalised is None:
        return module
    return ChoosingSteps(
        module, step.greedy, step.penalised, step.steps, None if ranks is None else ranks.of_first_in_graph
    )


# -- Bound tensors. TorchDynamo takes 0.1 s for the inputs of one layer, and each input has a guard, which costs time at
# load and in every step. Copies of a traced layer avoid both: the graph looks their tensors up in the model and the
# cache, and compares them with what it was compiled for.


class BoundTensor(NamedTuple):
    """A tensor of a layer that a graph looks up, described independently of the process.

    Attributes:
        module: Name of the module in the model, None for a tensor of the cache.
        layer: Index of the layer in the cache.
        name: Name of the tensor in the module or the cache layer.
        kind: See `kind_of_tensor`.
    """

    module: str | None
    layer: int
    name: str
    kind: tuple[str, ...]


_owners: ContextVar[tuple[nn.Module, ExportableCache]] = ContextVar("_owners")


@contextmanager
def binding_tensors(model: nn.Module, cache: ExportableCache) -> Iterator[None]:
    """Look up the tensors of graphs that are loaded in this block in `model` and `cache`."""
    token = _owners.set((model, cache))
    try:
        yield
    finally:
        _owners.reset(token)


class BoundTensors:
    """The bound tensors of one graph, in the model and cache of `binding_tensors`.

    Raises:
        OutdatedGraph: If a tensor is missing, or of another kind.
    """

    def __init__(self, specs: Sequence[BoundTensor]) -> None:
        self.specs = tuple(specs)
        self._found: list[tuple[dict[str, Any], str, tuple[Any, ...]]] = []
        if not self.specs:
            return
        model, cache = _owners.get()
        modules = dict(model.named_modules(remove_duplicate=False))
        for spec in self.specs:
            if spec.module is None:
                holder = vars(cache.layers[spec.layer])
            else:
                module = modules.get(spec.module)
                holders = () if module is None else module_tensors(module)
                holder = next((one for one in holders if spec.name in one), {})
            tensor = holder.get(spec.name)
            if not isinstance(tensor, torch.Tensor) or tuple(kind_of_tensor(tensor)) != spec.kind:
                raise OutdatedGraph
            self._found.append((holder, spec.name, _form(tensor)))

    def tensors(self) -> list[torch.Tensor]:
        """Return the current tensors.

        Raises:
            OutdatedGraph: If one has changed its class, dtype, shape or strides.
        """
        found = []
        for holder, name, form in self._found:
            tensor = holder.get(name)
            if tensor is None or _form(tensor) != form:
                raise OutdatedGraph
            found.append(tensor)
        return found


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return type(tensor), tensor.dtype, tensor.shape, tensor.stride()
