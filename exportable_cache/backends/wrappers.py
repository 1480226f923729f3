"""Runners around a runner: one of several states over shared graphs, and one of several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol, cast

from ..common.compat.torch_distributed import name_group, separate_group
from ..errors import BundleError
from ..parallel.ranks import is_of_communication
from .base import ChoosesInGraph, MakesShift, WaitsForGraphs

if TYPE_CHECKING:
    import torch

    from ..generation.sampling import Sampler
    from ..parallel.ranks import Ranks
    from ..program.methods import ProgramMethod
    from .base import Runner

    class SharedRunner(Runner, Protocol):
        """A runner that exposes its state and that forks share.

        Attributes:
            active: The fork whose cache is in the runner.
            open_forks: Number of forks that are not closed.
        """

        active: ForkedRunner
        open_forks: int

        @property
        def state(self) -> Mapping[str, torch.Tensor]:
            """See `HasState.state`."""
            ...


class ForkedRunner:
    """A state over a runner that several states share. Its cache is copied into the runner before it runs.

    Graphs hold the addresses of one cache, so two states cannot run at the same time. Switching states costs a copy of
    the cache; consecutive calls of one state cost one copy.

    Args:
        base: The shared runner, which must expose its `state`.
        saved: This fork's cache tensors by name, None if they are in the runner.
    """

    def __init__(self, base: Runner, saved: dict[str, torch.Tensor] | None = None) -> None:
        self.base = cast("SharedRunner", base)
        self._saved = saved
        self._is_open = True
        if saved is None:
            self.base.active = self
            self.base.open_forks = 0
        self.base.open_forks += 1

    @classmethod
    def of(cls, runner: Runner) -> tuple[ForkedRunner, ForkedRunner]:
        """Return `runner` as a fork, and a second fork that starts with a copy of its state."""
        kind = ForkedChoosingRunner if isinstance(runner, ChoosesInGraph) else ForkedRunner
        first = runner if isinstance(runner, ForkedRunner) else kind(runner)
        copied = {name: tensor.clone() for name, tensor in first.state.items()}
        return first, kind(first.base, copied)

    @property
    def methods(self) -> Mapping[str, ProgramMethod]:
        """The methods by name."""
        return self.base.methods

    @property
    def state(self) -> Mapping[str, torch.Tensor]:
        """The cache of this fork, which becomes the active one."""
        self.activate()
        return self.base.state

    def activate(self) -> None:
        """Save the active fork's cache, and copy this fork's into the runner."""
        other = self.base.active
        if other is not self:
            saved = self._saved
            assert saved is not None
            other._saved = {name: tensor.clone() for name, tensor in self.base.state.items()}
            for name, tensor in self.base.state.items():
                tensor.copy_(saved[name])
            self._saved = None
            self.base.active = self

    def make_shift(self) -> None:
        """See `MakesShift.make_shift`."""
        if isinstance(self.base, MakesShift):
            self.base.make_shift()

    @property
    def pending_graphs(self) -> int:
        """Number of graphs that are being compiled."""
        return self.base.pending_graphs if isinstance(self.base, WaitsForGraphs) else 0

    def waiting(self) -> AbstractContextManager[None]:
        """Make each step in this block wait for its graph."""
        return self.base.waiting() if isinstance(self.base, WaitsForGraphs) else nullcontext()

    def graph_of(self, method: str) -> str:
        """Return the graph name of `method`. Methods that share a graph return the same name."""
        return self.base.graph_of(method) if isinstance(self.base, WaitsForGraphs) else method

    def close(self) -> None:
        """Close this fork, and the runner with its last one. Calling it again has no effect."""
        if self._is_open:
            self._is_open = False
            self.base.open_forks -= 1
            if self.base.open_forks == 0 and hasattr(self.base, "close"):
                self.base.close()

    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run a method over this fork's cache, see `Runner.run`."""
        self.activate()
        return self.base.run(method, *inputs)


class ForkedChoosingRunner(ForkedRunner):
    """A fork of a runner whose decode steps can choose tokens in their graph."""

    def run_and_choose(self, method: str, chooser: Sampler, *inputs: torch.Tensor, steps: int = 1) -> torch.Tensor:
        """Run decode steps over this fork's cache, see `ChoosesInGraph.run_and_choose`."""
        self.activate()
        return cast("ChoosesInGraph", self.base).run_and_choose(method, chooser, *inputs, steps=steps)


class RankedRunner:
    """A runner of a rank's program, whose sums go over all ranks; its logits are rank 0's.

    Args:
        runner: Runner of this rank's files.
        ranks: All ranks, each of which has opened its own files.
    """

    def __init__(self, runner: Runner, ranks: Ranks) -> None:
        self._runner, self.ranks = runner, ranks
        # What Python sends goes over the other one: its thread needs the interpreter to drop a tensor that Python has,
        # and machine code holds the interpreter until the group of its sums has answered (torch 2.13).
        self._group = separate_group(ranks.group)

    @property
    def methods(self) -> Mapping[str, ProgramMethod]:
        """See `Runner.methods`."""
        return self._runner.methods

    @property
    def state(self) -> Mapping[str, torch.Tensor]:
        """This rank's heads of the cache."""
        return self._runner.state  # type: ignore[attr-defined]

    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """See `Runner.run`."""
        # The name is one for all programs of a process, and two bundles may be open over two groups.
        name_group(self._group)
        with self.ranks.watched():
            try:
                result = self._runner.run(method, *inputs)
            except BundleError as error:
                cause = error.__cause__
                if cause is not None and is_of_communication(cause):
                    raise cause from None
                raise
        return self.ranks.of_first(result) if self.methods[method].is_step else result  # type: ignore[arg-type]
