"""Steps of one answer behind its first: those that are recorded go straight to their recording.

TorchDynamo asks in each step whether the model is still what it has compiled: its modules, their settings, which
attention is registered under a name. That is a thousand objects, which weights have driven out of the caches since the
step before. Nobody changes them while an answer is being made, so they are asked about in the first step that an answer
takes by a graph, and whenever a step is not from a recording: at the latest when a row is 128 tokens longer. Where
tensors lie is compared in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from ...common.compat.torch import is_watched
from ...generation.answer import answer_of_step

if TYPE_CHECKING:
    from .replay import Recording

#: What a graph was called with, what it gave, and what it is recorded as.
Seen = tuple[Sequence[Any], tuple[Any, ...], "Recording | None"]

_seen: ContextVar[list[Seen] | None] = ContextVar("_seen", default=None)


def graph_ran(inputs: Sequence[Any], outputs: tuple[Any, ...], recording: Recording | None) -> None:
    """Told by a graph of each of its calls."""
    if (seen := _seen.get()) is not None:
        seen.append((inputs, outputs, recording))


class FollowedStep:
    """A compiled step that checks its guards once for each answer, while it is from a recording.

    Args:
        call: What TorchDynamo has made, or what was loaded: it checks them each time.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._of: object | None = None
        self._straight: _Straight | None = None

    def __call__(self, arguments: Sequence[torch.Tensor], lends: bool = False) -> Any:
        """What the step gives.

        Args:
            arguments: Of the step.
            lends: Whether the caller has done with the results before the next step, which may overwrite them.
        """
        answer = answer_of_step()
        if self._straight is not None and answer is not None and self._of is answer and not is_watched():
            if self._straight.serves(arguments):
                return self._straight(arguments, lends)
        self._of = self._straight = None
        seen: list[Seen] = []
        token = _seen.set(seen)
        try:
            result = self._call(*arguments)
        finally:
            _seen.reset(token)
        if answer is not None and len(seen) == 1:
            self._straight = _straight(*seen[0], arguments, result)
            self._of = answer
        return result


def followed(call: Callable[..., Any] | None) -> FollowedStep | None:
    """The same for a step that may be there."""
    return None if call is None else FollowedStep(call)


class _Straight:
    """A recording, by the arguments of the step whose graph was recorded.

    Args:
        recording: Of the graph.
        moved: Arguments that are other tensors in each step, by their places among the graph's inputs.
        kept: Arguments that are the graph's in each step.
        arguments: Of a step.
        results: Places of what the step gives among what the graph gives; one number where that is a tensor by itself.
    """

    def __init__(
        self,
        recording: Recording,
        moved: dict[int, int],
        kept: Sequence[int],
        arguments: Sequence[torch.Tensor],
        results: int | Sequence[int],
    ) -> None:
        self._recording, self._moved, self._results = recording, moved, results
        self._kept = [(index, arguments[index]) for index in kept]
        self._forms = [_form(one) for one in arguments]

    def serves(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Whether a step with these is the recorded one, but for the values of what moves."""
        return (
            [_form(one) for one in arguments] == self._forms
            and all(arguments[index] is one for index, one in self._kept)
            and self._recording.is_in_place()
        )

    def __call__(self, arguments: Sequence[torch.Tensor], lends: bool) -> Any:
        given = self._recording.follow({place: arguments[index] for place, index in self._moved.items()})
        if isinstance(self._results, int):
            return given[self._results] if lends else given[self._results].clone()
        return tuple(given[place] if lends else given[place].clone() for place in self._results)


def _straight(
    inputs: Sequence[Any],
    outputs: tuple[Any, ...],
    recording: Recording | None,
    arguments: Sequence[torch.Tensor],
    result: Any,
) -> _Straight | None:
    """The recording by the step's arguments; None if it does more than its graph does, or there is none."""
    if recording is None:
        return None
    places = {_memory(one): place for place, one in enumerate(inputs) if isinstance(one, torch.Tensor)}
    moved: dict[int, int] = {}
    kept = []
    for index, argument in enumerate(arguments):
        place = places.get(_memory(argument))
        if place in recording.moving:
            moved[place] = index
        elif place is not None:
            kept.append(index)
    made = {id(outputs[place]): place for place in recording.made}
    try:
        results = made[id(result)] if isinstance(result, torch.Tensor) else tuple(made[id(one)] for one in result)
    except (KeyError, TypeError):
        return None
    # What moves and is no argument is something that the model itself has replaced meanwhile.
    return _Straight(recording, moved, kept, arguments, results) if moved.keys() == recording.moving.keys() else None


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.numel() or id(tensor)


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device
