"""Compiled steps as CUDA graphs: a step is one launch, without the guards of torch.compile.

Torch's own form (`mode="reduce-overhead"`) evaluates the guards of every tensor of the model before each replay. Here a
replay compares their addresses, because caches never move, and everything that changes between steps is an input.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from ...common.compat.torch import module_tensors, tracing_errors, tree_map

log = logging.getLogger(__name__)

Call = Callable[..., Any]


class CudaGraphs:
    """The CUDA graphs of one runner.

    A step runs normally when it is first called, because kernels are then compiled and tuned. It is captured at the
    second call, and later calls replay it. All graphs share a memory pool, which is safe because results are copied
    before another graph is replayed.

    Args:
        model: The model, whose tensors are at the same addresses in each replay.
        device: The device of all inputs.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._device = device
        found = [
            (holder, name)
            for module in model.modules()
            for holder in module_tensors(module)
            for name, value in holder.items()
            if isinstance(value, torch.Tensor)
        ]
        self._holders, self._names = [holder for holder, _ in found], [name for _, name in found]
        self._addresses: list[int] = []
        self._called: set[Hashable] = set()
        self._captured: dict[Hashable, _CapturedStep] = {}
        self._pool: Any = None
        self._is_off = False

    def replay(self, key: Hashable, inputs: Sequence[torch.Tensor]) -> Any:
        """Replay a step and return its results, None if it is not captured for these inputs."""
        step = self._captured.get(key)
        if step is None or not step.takes(inputs):
            return None
        if self._addresses != self._current_addresses():
            self.clear()
            return None
        return step.replay(inputs)

    def run(self, key: Hashable, call: Call, inputs: Sequence[torch.Tensor]) -> Any:
        """Run a compiled step normally, or capture and replay it if it has run before."""
        if self._is_off or any(tensor.device != self._device for tensor in inputs):
            return call(*inputs)
        addresses = self._current_addresses()
        if addresses != self._addresses:
            self.clear()
            self._addresses = addresses
        if key not in self._called:
            result = call(*inputs)
            self._called.add(key)
            return result
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            step = _CapturedStep(call, inputs, self._pool)
        except RuntimeError as error:
            if isinstance(error, (torch.OutOfMemoryError, *tracing_errors())):
                raise
            self._is_off = True
            log.warning("steps cannot be captured as CUDA graphs, and are launched kernel by kernel: %s", error)
            return call(*inputs)
        self._captured[key] = step
        return step.replay(inputs)

    def clear(self) -> None:
        """Delete all graphs, with their memory."""
        self._called.clear()
        self._captured.clear()
        self._pool = None

    def _current_addresses(self) -> list[int]:
        # In C, because a step of 1B parameters has hundreds of tensors and takes a millisecond.
        try:
            return list(map(torch.Tensor.data_ptr, map(dict.__getitem__, self._holders, self._names)))
        except (KeyError, TypeError):  # deleted, or None
            return []


class _CapturedStep:
    """A CUDA graph of one step, with the tensors that it reads and writes."""

    def __init__(self, call: Call, inputs: Sequence[torch.Tensor], pool: Any) -> None:
        self._inputs = [tensor.clone() for tensor in inputs]
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile: a graph that is loaded, or another session.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._results = call(*self._inputs)

    def takes(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Return True if inputs have the device, dtypes and sizes that were captured."""
        return len(inputs) == len(self._inputs) and all(
            one.shape == own.shape and one.dtype == own.dtype and one.device == own.device
            for one, own in zip(inputs, self._inputs, strict=True)
        )

    def replay(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Run the step, and return copies of its results, which the next replay overwrites."""
        for own, tensor in zip(self._inputs, inputs, strict=True):
            own.copy_(tensor)
        self._graph.replay()
        return tree_map(torch.Tensor.clone, self._results)
