"""Graphs that a session's steps run: of a method, of one with the choice of tokens behind it, and of a choice alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ...common.method_io import TensorSpec
from ...generation.choosing_steps import Choice, ChoosingSteps

if TYPE_CHECKING:
    from ...models.parallel.ranks import Ranks
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
