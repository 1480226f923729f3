"""Compiled steps as CUDA graphs: a step is one launch, without the guards of torch.compile.

Torch's own form (`mode="reduce-overhead"`) evaluates the guards of every tensor of the model before each replay. Here a
replay compares the modules and the addresses of the tensors, because caches never move, and everything that changes
between steps is an input.
"""

from __future__ import annotations

import logging
import operator
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ...common.compat.torch import module_children, module_tensors, tracing_errors, tree_map

log = logging.getLogger(__name__)

Call = Callable[..., Any]
#: Shape, strides and dtype of each input, and whether it was made in inference mode.
Form = tuple[tuple[Any, ...], ...]
#: Held while a step is captured, because CUDA captures one at a time.
_CAPTURING = threading.Lock()


class CudaGraphs:
    """The CUDA graphs of one runner.

    A step runs normally when it is first called, because kernels are then compiled. It is captured at the second call,
    and later calls replay it. All graphs share a memory pool, which is safe because results are copied before another
    graph is replayed.

    Args:
        model: The model, whose modules and tensors are the same in each replay.
        device: The device of all inputs.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._device = device
        modules = list(model.modules())
        found = [
            (holder, name)
            for module in modules
            for holder in module_tensors(module)
            for name, value in holder.items()
            if isinstance(value, torch.Tensor)
        ]
        self._tensors = len(found)
        found += [
            (children, name) for module in modules for children in (module_children(module),) for name in children
        ]
        self._holders, self._names = [holder for holder, _ in found], [name for _, name in found]
        #: The tensors and modules, and the addresses of the tensors, that the graphs were captured with.
        self._parts: list[Any] = []
        self._addresses: list[int] = []
        self._called: dict[Hashable, tuple[Call, Form]] = {}
        self._captured: dict[Hashable, _CapturedStep] = {}
        self._pool: Any = None
        self._stream: Any = None
        self._is_off = False

    def replay(self, key: Hashable, inputs: Sequence[torch.Tensor]) -> Any:
        """Replay a step and return its results, None if it is not captured for these inputs."""
        step = self._captured.get(key)
        if step is None or not step.takes(inputs):
            return None
        if not self._is_same_model():
            self.clear()
            return None
        with torch.cuda.device(self._device):
            return step.replay(inputs)

    def run(self, key: Hashable, call: Call, inputs: Sequence[torch.Tensor]) -> Any:
        """Run a compiled step normally, or capture and replay it if it has run before over inputs of this form."""
        parts = self._current_parts()
        if self._is_off or parts is None or any(tensor.device != self._device for tensor in inputs):
            return call(*inputs)
        if not self._is_same_model():
            self.clear()
            self._parts, self._addresses = parts, self._current_addresses(parts)
        form = tuple((tuple(one.shape), one.stride(), one.dtype, one.is_inference()) for one in inputs)
        if self._called.get(key) != (call, form):
            result = call(*inputs)
            self._called[key] = call, form
            return result
        try:
            self._captured[key] = step = self._capture(call, inputs)
        except RuntimeError as error:
            if isinstance(error, tracing_errors()):
                raise
            self._is_off = True
            self.clear()
            log.warning("steps cannot be captured as CUDA graphs, and are launched kernel by kernel: %s", error)
            return call(*inputs)
        with torch.cuda.device(self._device):
            return step.replay(inputs)

    def clear(self) -> None:
        """Delete all graphs, with their memory."""
        self._called.clear()
        self._captured.clear()
        self._parts, self._addresses = [], []
        self._pool = None

    def _capture(self, call: Call, inputs: Sequence[torch.Tensor]) -> _CapturedStep:
        with _CAPTURING, torch.cuda.device(self._device):
            if self._stream is None:
                # Torch's own stream for captures is on the device that was current at the first one.
                self._stream = torch.cuda.Stream(self._device)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            return _CapturedStep(call, inputs, self._pool, self._stream)

    def _is_same_model(self) -> bool:
        # In C, because a step of 1B parameters has hundreds of tensors and takes a millisecond.
        parts = self._current_parts()
        if parts is None or len(parts) != len(self._parts) or not all(map(operator.is_, parts, self._parts)):
            return False
        return self._current_addresses(parts) == self._addresses

    def _current_parts(self) -> list[Any] | None:
        """Return the model's tensors, followed by its modules; None if one was deleted."""
        try:
            return list(map(dict.__getitem__, self._holders, self._names))
        except KeyError:
            return None

    def _current_addresses(self, parts: list[Any]) -> list[int]:
        return list(map(torch.Tensor.data_ptr, parts[: self._tensors]))


class _CapturedStep:
    """A CUDA graph of one step, with the tensors that it reads and writes."""

    def __init__(self, call: Call, inputs: Sequence[torch.Tensor], pool: Any, stream: Any) -> None:
        self._inputs = [tensor.clone() for tensor in inputs]
        # Tensors of inference mode, which guards distinguish, can only be written in it.
        self._mode = torch.inference_mode if any(one.is_inference() for one in self._inputs) else nullcontext
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile, such as one that loads a graph.
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._results = call(*self._inputs)

    def takes(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Return True if inputs have the device, dtypes and sizes that were captured."""
        return len(inputs) == len(self._inputs) and all(
            one.shape == own.shape and one.dtype == own.dtype and one.device == own.device
            for one, own in zip(inputs, self._inputs, strict=True)
        )

    def replay(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Run the step, and return copies of its results, which the next replay overwrites."""
        with self._mode():
            for own, tensor in zip(self._inputs, inputs, strict=True):
                own.copy_(tensor)
        self._graph.replay()
        return tree_map(torch.Tensor.clone, self._results)
