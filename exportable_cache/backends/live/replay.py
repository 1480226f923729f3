"""A compiled step without Python between its operators: its calls are recorded once, and run again.

What Inductor generates is a list of calls in Python: kernels over the addresses of tensors, and operators. Weights pass
through the caches between two of them, so that the interpreter finds nothing there when it is its turn. A step over the
same weights, the same cache and as many slots calls the same functions with the same addresses, as a CUDA graph does;
so they are noted in one step, with the memory that they use, and one call of C++ runs all of those to come.

Steps in which anything else happens are called from Python as before.
"""

from __future__ import annotations

import ctypes
import operator
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...common.compat import torch_loading as private
from ...common.compat.torch import is_watched
from .graphs import OwnTensors
from .ops import OWN_OPERATORS

#: Bytes of an input that a step is handed anew each time: tokens, positions, slots.
_MOST_BYTES = 1 << 16
#: Of `kMostArguments` in recording.h.
_MOST_ARGUMENTS = 32
#: `EXPORTABLE_CACHE_STEPS=python` has every step called from Python.
VARIABLE = "EXPORTABLE_CACHE_STEPS"

Run = Callable[[Sequence[Any]], tuple[Any, ...]]


class RecordedSteps:
    """Steps of one graph, from Python until one is as the one before, and then from its recording.

    Args:
        own: What the graph takes beside its inputs.
    """

    def __init__(self, own: OwnTensors) -> None:
        self._own = own
        self._recording: Recording | None = None
        self._is_recordable = os.environ.get(VARIABLE, "") != "python"
        self._sizes: list[Any] = []
        # What has another object in each step, by its place; of the others, that of the last one.
        self._moving: set[int] = set()
        self._last: list[Any] = []

    def __call__(self, run: Run, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """What a step gives.

        Args:
            run: The graph, from Python.
            inputs: Of the graph.
        """
        if not self._is_recordable or is_watched():
            return run(inputs)
        if self._recording is not None:
            if self._recording.serves(inputs):
                return self._recording.replay(inputs)
            self._recording = None
        sizes = [tuple(one.shape) if isinstance(one, torch.Tensor) else one for one in inputs]
        is_again, self._sizes = sizes == self._sizes, sizes
        if len(self._last) == len(inputs):
            self._moving |= {place for place, last in enumerate(self._last) if last() is not inputs[place]}
        self._last = [weakref.ref(one) if isinstance(one, torch.Tensor) else lambda one=one: one for one in inputs]
        return self._recorded(run, inputs) if is_again else run(inputs)

    def _recorded(self, run: Run, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """A step that is recorded, if it can be."""
        library = next((one.code.library for one in OWN_OPERATORS if one.code.library is not None), None)
        moving = {place: inputs[place] for place in self._moving if isinstance(inputs[place], torch.Tensor)}
        # Tensors made of others, as torchao's weights, have no address.
        have_addresses = not any(private.is_wrapper(one) for one in (*inputs, *self._own.tensors()))
        are_short = all(one.is_contiguous() and one.nbytes <= _MOST_BYTES for one in moving.values())
        if library is None or not have_addresses or not are_short:
            self._is_recordable = False
            return run(inputs)
        recording = Recording(library, inputs, moving, self._own)
        results = recording.record(run)
        if recording.is_whole:
            self._recording = recording
        else:
            self._is_recordable = False
            recording.write_back(moving)
        return results


class Recording:
    """The calls of one step.

    Args:
        library: Which keeps them.
        inputs: Of the graph.
        moving: Those that are other tensors in each step, by their places.
        own: What the graph takes besides.

    Attributes:
        moving: Their copies, which the calls read.
        is_whole: Whether all that the step did is among the calls.
    """

    def __init__(
        self, library: ctypes.CDLL, inputs: Sequence[Any], moving: dict[int, torch.Tensor], own: OwnTensors
    ) -> None:
        self.moving = {place: tensor.clone() for place, tensor in moving.items()}
        self._inputs = [self.moving.get(place, one) for place, one in enumerate(inputs)]
        fixed = [place for place in range(len(inputs)) if place not in moving]
        self._fixed = [(place, inputs[place]) for place in fixed if not isinstance(inputs[place], torch.Tensor)]
        self._places = [place for place in fixed if isinstance(inputs[place], torch.Tensor)]
        self._tensors = [inputs[place] for place in self._places]
        self._own = own
        self._owned = own.tensors()
        self._of_others = [*self._tensors, *self._owned]
        self._addresses = list(map(torch.Tensor.data_ptr, self._of_others))
        self._library = library
        self._calls = ctypes.c_void_p(library.exportable_cache_recording())
        weakref.finalize(self, library.exportable_cache_end, self._calls)
        # Whatever they read and write, so that nobody else gets that memory.
        self._kept: list[Any] = []
        self._results: list[tuple[int | None, Any]] = []
        self.is_whole = True

    def record(self, run: Run) -> tuple[Any, ...]:
        """Run a step from Python and note what it calls."""
        libraries = [one.code.library for one in OWN_OPERATORS if one.code.library is not None]
        try:
            for library in libraries:
                library.exportable_cache_note(self._calls)
            with private.calls_recorded(self._on_kernel, self._on_operator):
                results = run(self._inputs)
        finally:
            for library in libraries:
                library.exportable_cache_note(None)
        self.is_whole &= self._library.exportable_cache_is_whole(self._calls)
        known = {id(one): place for place, one in enumerate(self._inputs) if isinstance(one, torch.Tensor)}
        inputs = {_memory(one) for one in (*self._inputs, *self._owned)}
        for result in results:
            place = known.get(id(result))
            self._results.append((place, result))
            self.is_whole &= place is not None or result is None or _memory(result) not in inputs
        return self._given(self._inputs) if self.is_whole else results

    def write_back(self, moving: dict[int, torch.Tensor]) -> None:
        """What the step wrote to its copies of those that move, in these themselves."""
        for place, tensor in moving.items():
            tensor.copy_(self.moving[place])

    def serves(self, inputs: Sequence[Any]) -> bool:
        """Whether a step with these is the one that was recorded, but for the values of what moves."""
        # A loop in Python over hundreds of tensors would take as long as all that is around it.
        return (
            len(inputs) == len(self._inputs)
            and all(map(operator.is_, map(inputs.__getitem__, self._places), self._tensors))
            and self.is_in_place()
            and all(inputs[place] == one for place, one in self._fixed)
            and all(
                inputs[place].shape == one.shape and inputs[place].dtype == one.dtype
                for place, one in self.moving.items()
            )
            and self._own.are(self._owned)
        )

    def replay(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Its results."""
        self._run(inputs)
        return self._given(inputs)

    def is_in_place(self) -> bool:
        """Whether what the calls read and write of the model and the cache is where it was."""
        return list(map(torch.Tensor.data_ptr, self._of_others)) == self._addresses

    def _run(self, inputs: Sequence[Any]) -> None:
        for place, tensor in self.moving.items():
            tensor.copy_(inputs[place])
        if not self._library.exportable_cache_run(self._calls):
            raise RuntimeError(f"a recorded step failed; {VARIABLE}=python has steps called from Python")

    def _given(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        # The next step writes to the same memory.
        return tuple(
            inputs[place] if place is not None else result.clone() if isinstance(result, torch.Tensor) else result
            for place, result in self._results
        )

    def _on_kernel(self, kernel: private.GeneratedKernel | None, arguments: tuple[Any, ...]) -> None:
        if not self._keeps(arguments):
            return
        if kernel is None or len(arguments) != len(kernel.kinds) or len(arguments) > _MOST_ARGUMENTS:
            self.is_whole = False
            return
        values = []
        moving = {_memory(tensor) for tensor in self.moving.values()}
        for kind, argument in zip(kernel.kinds, arguments):
            if kind.endswith("*") and isinstance(argument, torch.Tensor):
                values.append(argument.data_ptr())
                # What a step writes to one that moves would be in the copy.
                self.is_whole &= kind.startswith("const ") or _memory(argument) not in moving
            elif kind in ("const int64_t", "int64_t") and isinstance(argument, int):
                values.append(argument)
            else:
                self.is_whole = False
                return
        self._library.exportable_cache_add(
            self._calls, ctypes.c_void_p(kernel.address), (ctypes.c_int64 * len(values))(*values), len(values)
        )

    def _on_operator(self, operator: Any, arguments: tuple[Any, ...], result: Any) -> None:
        if self._keeps((arguments, result)):
            self.is_whole = operator.is_view or any(one.has(operator) for one in OWN_OPERATORS)

    def _keeps(self, used: tuple[Any, ...]) -> bool:
        """Keep what a call uses, unless something before it cannot be noted: all that passes between the layers of a
        prompt would be a session's peak of memory.
        """
        if self.is_whole:
            self._kept += used
        else:
            self._kept.clear()
        return self.is_whole


def _memory(value: Any) -> int | None:
    """The same for tensors that share memory."""
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else None
