"""Graphs that a session's steps run: of a method, of one with the choice of tokens behind it, and of a choice alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...common.compat.torch import module_tensors
from ...common.method_io import TensorSpec
from ...common.tensors import kind_of_tensor
from ...generation.choosing_steps import Choice, ChoosingSteps

if TYPE_CHECKING:
    from torch import nn

    from ...models.cache_factory import ExportableCache
    from ...parallel.ranks import Ranks
    from ...program.methods import ProgramMethod


class OutdatedGraph(Exception):
    """A graph that was kept, and whose guards do not hold any more."""

    def __init__(self) -> None:
        super().__init__("the model or torch's settings have changed since a graph was compiled")


#: Stands for the name of a method where tokens are chosen by a graph of their own.
CHOICE = "choice"


@dataclass(frozen=True)
class ChoiceMethod:
    """A choice of tokens as the compiler takes a method: all sizes are fixed, and settings are tensors."""

    greedy: bool
    penalised: bool
    name: str = "choice"
    is_step: bool = True
    inputs: tuple[TensorSpec, ...] = ()
    dynamic_sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Graph:
    """A call as a compiled graph takes it.

    Attributes:
        method: Of the graph.
        module: What it is compiled from.
        key: Tells it from the runner's other graphs: also by which of the dynamic sizes are 1, as TorchDynamo has no
            graph for those and others in common.
        arguments: Marked.
        asked: Method, and how tokens are chosen inside the graph if they are.
    """

    method: ProgramMethod | ChoiceMethod
    module: torch.nn.Module
    key: tuple
    arguments: list[torch.Tensor]
    asked: tuple

    @property
    def is_shared(self) -> bool:
        """Whether it serves several read lengths."""
        return self.key[1]

    @property
    def name(self) -> str:
        """Of the graph, among those of its method, in any process."""
        return f"{self.key[2:-1]} {sorted(self.key[-1])}"


def choice_graph(choice: Choice, inputs: list[torch.Tensor]) -> Graph:
    """The graph of a choice by itself."""
    key = (CHOICE, False, choice.greedy, choice.penalised, frozenset[str]())
    asked = (CHOICE, choice.greedy, choice.penalised)
    return Graph(ChoiceMethod(choice.greedy, choice.penalised), choice, key, inputs, asked)


def choosing(module: torch.nn.Module, key: tuple, ranks: Ranks | None = None) -> torch.nn.Module:
    """A step with what a key says of the choice behind it, on which all ranks agree."""
    if len(key) == 1:
        return module
    greedy, penalised, steps = key[1:]
    return ChoosingSteps(module, greedy, penalised, steps, None if ranks is None else ranks.of_first_in_graph)


class OwnTensor(NamedTuple):
    """One of them, in any process.

    Attributes:
        module: Its name in the model, None where the cache has the tensor.
        layer: Its number in the cache.
        name: Of the tensor there.
        kind: See `kind_of_tensor`.
    """

    module: str | None
    layer: int
    name: str
    kind: tuple[str, ...]


_owners: ContextVar[tuple[nn.Module, ExportableCache]] = ContextVar("_owners")


@contextmanager
def owners_of_tensors(model: nn.Module, cache: ExportableCache) -> Iterator[None]:
    """A block in which graphs are loaded that run over these."""
    token = _owners.set((model, cache))
    try:
        yield
    finally:
        _owners.reset(token)


class OwnTensors:
    """Those of one graph, over the model and the cache of the block around.

    Raises:
        OutdatedGraph: If one is not there, or of another kind.
    """

    def __init__(self, places: Sequence[OwnTensor]) -> None:
        self.places = tuple(places)
        self._found: list[tuple[dict[str, Any], str, tuple[Any, ...]]] = []
        if not self.places:
            return
        model, cache = _owners.get()
        modules = dict(model.named_modules(remove_duplicate=False))
        for place in self.places:
            if place.module is None:
                holder = vars(cache.layers[place.layer])
            else:
                module = modules.get(place.module)
                holders = () if module is None else module_tensors(module)
                holder = next((one for one in holders if place.name in one), {})
            tensor = holder.get(place.name)
            if not isinstance(tensor, torch.Tensor) or tuple(kind_of_tensor(tensor)) != place.kind:
                raise OutdatedGraph
            self._found.append((holder, place.name, _form(tensor)))

    def tensors(self) -> list[torch.Tensor]:
        """As they are now.

        Raises:
            OutdatedGraph: If one is of another kind by now.
        """
        found = []
        for holder, name, form in self._found:
            tensor = holder.get(name)
            if tensor is None or _form(tensor) != form:
                raise OutdatedGraph
            found.append(tensor)
        return found

    def are(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether they are these objects, in the same form: not transposed, not cut."""
        return all(
            holder.get(name) is tensor and (tensor.shape, tensor.stride()) == form[2:]
            for (holder, name, form), tensor in zip(self._found, tensors, strict=True)
        )


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return type(tensor), tensor.dtype, tensor.shape, tensor.stride()
