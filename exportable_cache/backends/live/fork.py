"""Several states over one runner: its weights and compiled graphs are shared, its cache is swapped."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol, cast

from ..base import ChoosesInGraph, WaitsForGraphs

if TYPE_CHECKING:
    import torch

    from ...generation.sampling import Sampler
    from ...program.methods import ProgramMethod
    from ..base import Runner

    class SharedRunner(Runner, Protocol):
        """A runner that gives out its state and that forks share.

        Attributes:
            in_turn: The fork whose cache is in place.
            open_forks: Number of forks that are not closed.
        """

        in_turn: ForkedRunner
        open_forks: int

        @property
        def state(self) -> Mapping[str, torch.Tensor]: ...


class ForkedRunner:
    """A runner over another's graphs with a cache of its own, which is put in place when it is its turn.

    A graph knows its cache by address, so two states cannot be stepped on at once; a turn costs a copy of the cache,
    and turns taken in a row cost it once.

    Args:
        base: What runs; it must give out its `state`.
        parked: State by name, or None for the one that is in place now.
    """

    def __init__(self, base: Runner, parked: dict[str, torch.Tensor] | None = None) -> None:
        self.base = cast("SharedRunner", base)
        self._parked = parked
        self._is_open = True
        if parked is None:
            self.base.in_turn = self
            self.base.open_forks = 0
        self.base.open_forks += 1

    @classmethod
    def of(cls, runner: Runner) -> tuple[ForkedRunner, ForkedRunner]:
        """The runner as one of two, and a second one that starts with a copy of its state."""
        kind = ForkedChoosingRunner if isinstance(runner, ChoosesInGraph) else ForkedRunner
        first = runner if isinstance(runner, ForkedRunner) else kind(runner)
        copied = {name: tensor.clone() for name, tensor in first.state.items()}
        return first, kind(first.base, copied)

    @property
    def methods(self) -> Mapping[str, ProgramMethod]:
        return self.base.methods

    @property
    def state(self) -> Mapping[str, torch.Tensor]:
        """This fork's cache, in place."""
        self.take_turn()
        return self.base.state

    def take_turn(self) -> None:
        """Put this fork's cache in place, and park the one that was."""
        other = self.base.in_turn
        if other is not self:
            parked = self._parked
            assert parked is not None
            other._parked = {name: tensor.clone() for name, tensor in self.base.state.items()}
            for name, tensor in self.base.state.items():
                tensor.copy_(parked[name])
            self._parked = None
            self.base.in_turn = self

    @property
    def pending_graphs(self) -> int:
        """Graphs that are being compiled."""
        return self.base.pending_graphs if isinstance(self.base, WaitsForGraphs) else 0

    def waiting(self) -> AbstractContextManager[None]:
        """A block in which each step waits for its graph."""
        return self.base.waiting() if isinstance(self.base, WaitsForGraphs) else nullcontext()

    def graph_of(self, method: str) -> str:
        """The same for methods that one graph serves."""
        return self.base.graph_of(method) if isinstance(self.base, WaitsForGraphs) else method

    def close(self) -> None:
        """Close the runner with the last of its forks. A second call does nothing."""
        if self._is_open:
            self._is_open = False
            self.base.open_forks -= 1
            if self.base.open_forks == 0 and hasattr(self.base, "close"):
                self.base.close()

    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        self.take_turn()
        return self.base.run(method, *inputs)


class ForkedChoosingRunner(ForkedRunner):
    """A fork of a runner whose decode steps choose tokens inside their graph."""

    def run_and_choose(self, method: str, chooser: Sampler, *inputs: torch.Tensor, steps: int = 1) -> torch.Tensor:
        self.take_turn()
        return cast("ChoosesInGraph", self.base).run_and_choose(method, chooser, *inputs, steps=steps)
