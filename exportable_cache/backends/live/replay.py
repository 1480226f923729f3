"""Record the calls of a compiled step, and replay them from C++ without Python between them.

Inductor generates Python code that calls kernels, with the addresses of tensors, and operators. Between two calls the
weights have replaced the interpreter's data in the CPU caches, so Python is slow there. Like a captured CUDA graph, a
step over the same weights, the same cache and the same number of slots calls the same functions with the same
addresses. One step records them, with the memory that they use, and one call of C++ runs all of them from then on.

Steps that do anything else run from Python.
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
from .graphs import BoundTensors
from .ops import NATIVE_OPERATORS

#: Maximum bytes of an input that changes in each step, such as tokens, positions and slots.
_MOST_BYTES = 1 << 16
#: Equal to `kMaxArguments` in recording.h.
_MOST_ARGUMENTS = 32
#: `EXPORTABLE_CACHE_STEPS=python` disables replay.
VARIABLE = "EXPORTABLE_CACHE_STEPS"

Run = Callable[[Sequence[Any]], tuple[Any, ...]]


class ReplayedSteps:
    """Runs the steps of one graph: from Python until two have the same shapes, then from a recording.

    Args:
        bound: The tensors that the graph looks up itself.
    """

    def __init__(self, bound: BoundTensors) -> None:
        self._bound = bound
        self._recording: Recording | None = None
        self._is_recordable = os.environ.get(VARIABLE, "") != "python"
        self._sizes: list[Any] = []
        # Indices of inputs that change between steps, and weak references to the last value of each input.
        self._changing: set[int] = set()
        self._last: list[Any] = []

    def __call__(self, run: Run, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Run a step.

        Args:
            run: The graph, called from Python.
            inputs: Inputs of the graph.
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
            self._changing |= {index for index, last in enumerate(self._last) if last() is not inputs[index]}
        self._last = [weakref.ref(one) if isinstance(one, torch.Tensor) else lambda one=one: one for one in inputs]
        return self._recorded(run, inputs) if is_again else run(inputs)

    def _recorded(self, run: Run, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Run a step and record it if that is possible."""
        library = next((one.code.library for one in NATIVE_OPERATORS if one.code.library is not None), None)
        changing = {index: inputs[index] for index in self._changing if isinstance(inputs[index], torch.Tensor)}
        # Wrapper subclasses such as torchao's weights have no address.
        have_addresses = not any(private.is_wrapper(one) for one in (*inputs, *self._bound.tensors()))
        are_short = all(one.is_contiguous() and one.nbytes <= _MOST_BYTES for one in changing.values())
        if library is None or not have_addresses or not are_short:
            self._is_recordable = False
            return run(inputs)
        recording = Recording(library, inputs, changing, self._bound)
        results = recording.record(run)
        if recording.is_whole:
            self._recording = recording
        else:
            self._is_recordable = False
            recording.write_back(changing)
        return results


class Recording:
    """The recorded calls of one step.

    Args:
        library: The library that stores the calls.
        inputs: Inputs of the graph.
        changing: Inputs that are other tensors in each step, by index.
        bound: The tensors that the graph looks up itself.

    Attributes:
        changing: Copies of the changing inputs, which the calls read.
        is_whole: True if everything that the step did is recorded.
    """

    def __init__(
        self, library: ctypes.CDLL, inputs: Sequence[Any], changing: dict[int, torch.Tensor], bound: BoundTensors
    ) -> None:
        self.changing = {index: tensor.clone() for index, tensor in changing.items()}
        self._inputs = [self.changing.get(index, one) for index, one in enumerate(inputs)]
        fixed = [index for index in range(len(inputs)) if index not in changing]
        self._fixed = [(index, inputs[index]) for index in fixed if not isinstance(inputs[index], torch.Tensor)]
        self._indices = [index for index in fixed if isinstance(inputs[index], torch.Tensor)]
        self._tensors = [inputs[index] for index in self._indices]
        self._bound = bound
        self._bound_values = bound.tensors()
        self._outside = [*self._tensors, *self._bound_values]
        self._addresses = list(map(torch.Tensor.data_ptr, self._outside))
        self._library = library
        self._calls = ctypes.c_void_p(library.exportable_cache_recording())
        weakref.finalize(self, library.exportable_cache_end, self._calls)
        # Tensors that the calls read and write, kept alive so that their memory is not reused.
        self._kept: list[Any] = []
        self._results: list[tuple[int | None, Any]] = []
        self.is_whole = True

    def record(self, run: Run) -> tuple[Any, ...]:
        """Run a step from Python and record its calls."""
        libraries = [one.code.library for one in NATIVE_OPERATORS if one.code.library is not None]
        try:
            for library in libraries:
                library.exportable_cache_note(self._calls)
            with private.calls_recorded(self._on_kernel, self._on_operator):
                results = run(self._inputs)
        finally:
            for library in libraries:
                library.exportable_cache_note(None)
        self.is_whole &= self._library.exportable_cache_is_whole(self._calls)
        known = {id(one): index for index, one in enumerate(self._inputs) if isinstance(one, torch.Tensor)}
        inputs = {_memory(one) for one in (*self._inputs, *self._bound_values)}
        for result in results:
            index = known.get(id(result))
            self._results.append((index, result))
            self.is_whole &= index is not None or result is None or _memory(result) not in inputs
        return self._outputs(self._inputs) if self.is_whole else results

    def write_back(self, changing: dict[int, torch.Tensor]) -> None:
        """Copy the changing inputs back, because the step may have written to its copies."""
        for index, tensor in changing.items():
            tensor.copy_(self.changing[index])

    def serves(self, inputs: Sequence[Any]) -> bool:
        """Return True if the recording is valid for these inputs. Only the values of changing inputs may differ."""
        # `map`, because a Python loop over hundreds of tensors would take as long as the rest of the step's overhead.
        return (
            len(inputs) == len(self._inputs)
            and all(map(operator.is_, map(inputs.__getitem__, self._indices), self._tensors))
            and self.is_in_place()
            and all(inputs[index] == one for index, one in self._fixed)
            and all(
                inputs[index].shape == one.shape and inputs[index].dtype == one.dtype
                for index, one in self.changing.items()
            )
            and self._bound.match(self._bound_values)
        )

    def replay(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Replay the recorded calls and return the graph's outputs."""
        self._run(inputs)
        return self._outputs(inputs)

    def is_in_place(self) -> bool:
        """Return True if the tensors of the model and the cache still have the recorded addresses."""
        return list(map(torch.Tensor.data_ptr, self._outside)) == self._addresses

    def _run(self, inputs: Sequence[Any]) -> None:
        for index, tensor in self.changing.items():
            tensor.copy_(inputs[index])
        if not self._library.exportable_cache_run(self._calls):
            raise RuntimeError(f"a replayed step failed; set {VARIABLE}=python to run steps without replay")

    def _outputs(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        # Copy the outputs, because the next step writes to the same memory.
        return tuple(
            inputs[index] if index is not None else result.clone() if isinstance(result, torch.Tensor) else result
            for index, result in self._results
        )

    def _on_kernel(self, kernel: private.GeneratedKernel | None, arguments: tuple[Any, ...]) -> None:
        if not self._keeps(arguments):
            return
        if kernel is None or len(arguments) != len(kernel.kinds) or len(arguments) > _MOST_ARGUMENTS:
            self.is_whole = False
            return
        values = []
        changing = {_memory(tensor) for tensor in self.changing.values()}
        for kind, argument in zip(kernel.kinds, arguments):
            if kind.endswith("*") and isinstance(argument, torch.Tensor):
                values.append(argument.data_ptr())
                # A write to a changing input would only change its copy.
                self.is_whole &= kind.startswith("const ") or _memory(argument) not in changing
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
            self.is_whole = operator.is_view or any(one.has(operator) for one in NATIVE_OPERATORS)

    def _keeps(self, used: tuple[Any, ...]) -> bool:
        """Keep the tensors of a call alive while the step can be recorded, and return whether it can.

        Otherwise they are released, because keeping all activations of a prompt would raise the peak memory.
        """
        if self.is_whole:
            self._kept += used
        else:
            self._kept.clear()
        return self.is_whole


def _memory(value: Any) -> int | None:
    """Return the address of a tensor's storage, None for other values."""
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else None
