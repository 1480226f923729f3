"""Runner of a program whose parts run in several processes, with their communication around a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..common.compat.torch_distributed import name_group, separate_group
from ..errors import BundleError
from ..parallel.ranks import is_of_communication

if TYPE_CHECKING:
    import torch

    from ..parallel.ranks import Ranks
    from ..program.methods import ProgramMethod
    from .base import Runner


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
