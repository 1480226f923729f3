"""An engine on the CPU: a network behind TensorRT's way of binding, addresses instead of tensors.

For tests of the runtime.
"""

from __future__ import annotations

import ctypes
import math
from types import SimpleNamespace

import torch

from exportable_cache.backends.tensorrt.engine_io import EngineRecord
from exportable_cache.backends.tensorrt.engine_runner import EngineRunner
from exportable_cache.backends.tensorrt.evaluator import NetworkEvaluator
from exportable_cache.backends.tensorrt.network import Network
from exportable_cache.backends.tensorrt.target import methods_by_engine, record_of
from exportable_cache.program.program import Program


class CpuContext:
    """What is used of `IExecutionContext`, over the evaluator: reads inputs where they are bound and writes outputs
    there.

    As in an engine, an update of a cache writes the new tokens where the output is bound, and leaves the rest to the
    input being there.
    """

    def __init__(self, network: Network) -> None:
        self.evaluator = NetworkEvaluator(network.definition, network.constants)
        self.engine = SimpleNamespace(get_aliased_input_tensor=self.evaluator.aliases.get)
        self.runs = 0
        self._addresses: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._results: dict[str, tuple[int, ...]] = {}

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._addresses[name] = address
        return name in self.evaluator.inputs or name in self.evaluator.outputs

    def get_tensor_address(self, name: str) -> int:
        return self._addresses[name]

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._shapes[name] = shape
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self._results[name]

    def execute_async_v3(self, stream_handle: int) -> bool:
        self.runs += 1
        inputs = {
            name: _tensor_at(self._addresses[name], self._shapes.get(name, spec.shape), spec.dtype)
            for name, spec in self.evaluator.inputs.items()
        }
        for name, result in self.evaluator.run(inputs).items():
            self._results[name] = tuple(result.shape)
            bound = _tensor_at(self._addresses[name], tuple(result.shape), result.dtype)
            source = self.evaluator.aliases.get(name)
            if source is None:
                bound.copy_(result)
            else:
                written = result != inputs[source]
                bound[written] = result[written]
        return True


def cpu_engine_runner(
    program: Program, networks: dict[str, Network], records: dict[str, EngineRecord] | None = None
) -> EngineRunner:
    """The runner of a bundle on a GPU, over engines on the CPU; with records of the networks' own unless others are
    given.
    """
    records = records or records_by_method(networks)
    contexts = {name: CpuContext(network) for name, network in networks.items()}
    return EngineRunner(program.methods, records, contexts, torch.device("cpu"))


def records_by_method(networks: dict[str, Network]) -> dict[str, EngineRecord]:
    """The manifest's record of each method, as an export makes them."""
    return {
        method: record_of(method, networks[method], (), index if len(methods) > 1 else None)
        for methods in methods_by_engine(networks)
        for index, method in enumerate(methods)
    }


def _tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    buffer = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype).reshape(shape)
