"""CUDA's runtime and TensorRT's on the CPU, for tests of the runner without torch.

Device memory is host memory. What is enqueued runs when the stream is waited for, so that a missing wait shows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from exportable_cache.backends.tensorrt.cuda_engines import Cuda
from exportable_cache.backends.tensorrt.engine_io import LOGITS
from exportable_cache.backends.tensorrt.network import Network

from .cpu_engine import CpuContext

_KINDS = ("HostToDevice", "DeviceToHost", "DeviceToDevice")


class CpuCuda:
    """A substitute for the module `cuda.bindings.runtime`, with one GPU and one stream.

    Attributes:
        allocated: Memory by address.
        launches: Number of graphs that were launched.
        failing: Status by the name of a function that is to fail.
    """

    def __init__(self, free: int = 1 << 30, capability: tuple[int, int] = (8, 9), driver: int = 13010) -> None:
        self.allocated: dict[int, Any] = {}
        self.launches = 0
        self.failing: dict[str, int] = {}
        self._memory = free, 2 * free
        self._capability, self._driver = capability, driver
        self._work: list[Callable[[], object]] = []
        self._captured: list[Callable[[], object]] | None = None
        self.cudaMemcpyKind = SimpleNamespace(**{f"cudaMemcpy{kind}": kind for kind in _KINDS})
        self.cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)
        self.cudaDeviceAttr = SimpleNamespace(cudaDevAttrComputeCapabilityMajor=0, cudaDevAttrComputeCapabilityMinor=1)

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("cuda") or not callable(found):
            return found

        def call(*arguments: Any) -> tuple[Any, ...]:
            status = self.failing.get(name, 0)
            return (status, None) if status else (0, *found(*arguments))

        return call

    def cudaGetDeviceCount(self) -> tuple[int]:
        return (1,)

    def cudaDeviceGetAttribute(self, attribute: int, device: int) -> tuple[int]:
        return (self._capability[attribute],)

    def cudaDriverGetVersion(self) -> tuple[int]:
        return (self._driver,)

    def cudaRuntimeGetVersion(self) -> tuple[int]:
        return (13000,)

    def cudaGetErrorString(self, status: int) -> tuple[bytes]:
        return (f"status {status}".encode(),)

    def cudaMemGetInfo(self) -> tuple[int, int]:
        return self._memory

    def cudaMalloc(self, size: int) -> tuple[int]:
        memory = (ctypes.c_char * size)(*[b"\x7f"] * min(size, 64))
        self.allocated[ctypes.addressof(memory)] = memory
        return (ctypes.addressof(memory),)

    cudaMallocHost = cudaMalloc

    def cudaFree(self, address: int) -> tuple[()]:
        del self.allocated[address]
        return ()

    cudaFreeHost = cudaFree

    def cudaStreamCreate(self) -> tuple[int]:
        return (7,)

    def cudaStreamDestroy(self, stream: int) -> tuple[()]:
        return ()

    def cudaMemsetAsync(self, address: int, value: int, size: int, stream: int) -> tuple[()]:
        self.enqueue(lambda: ctypes.memset(address, value, size), stream)
        return ()

    def cudaMemcpyAsync(self, target: int, source: int, size: int, kind: str, stream: int) -> tuple[()]:
        assert kind in _KINDS
        self.enqueue(lambda: ctypes.memmove(target, source, size), stream)
        return ()

    def cudaStreamSynchronize(self, stream: int) -> tuple[()]:
        assert stream == 7 and self._captured is None
        while self._work:
            self._work.pop(0)()
        return ()

    def cudaStreamBeginCapture(self, stream: int, mode: int) -> tuple[()]:
        assert self._captured is None
        self._captured = []
        return ()

    def cudaStreamEndCapture(self, stream: int) -> tuple[Any]:
        captured, self._captured = self._captured, None
        return (captured,)

    def cudaGraphInstantiate(self, graph: Any, flags: int) -> tuple[Any]:
        return (graph,)

    def cudaGraphLaunch(self, graph: Any, stream: int) -> tuple[()]:
        self.launches += 1
        self._work += graph
        return ()

    def cudaGraphDestroy(self, graph: Any) -> tuple[()]:
        return ()

    cudaGraphExecDestroy = cudaGraphDestroy

    def enqueue(self, work: Callable[[], object], stream: int) -> None:
        """Add work to the stream, or to the graph that is being captured."""
        assert stream == 7
        (self._work if self._captured is None else self._captured).append(work)


class CpuTensorRT:
    """A substitute for TensorRT's module, whose plans are the networks that they were built from.

    Args:
        networks: The network of each profile.
        cuda: The runtime whose stream runs the engines.
        refused: What TensorRT logs when it refuses every plan; None if it loads them.
    """

    def __init__(self, networks: list[Network], cuda: CpuCuda, refused: str | None = None) -> None:
        class Logger:
            Severity = SimpleNamespace(ERROR=1)

            def __init__(self) -> None: ...

        self.ILogger = Logger
        self._networks, self._cuda, self._refused = networks, cuda, refused

    def Runtime(self, log: Any) -> Any:
        def load(plan: bytes) -> Any:
            assert isinstance(plan, bytes)
            if self._refused is not None:
                log.log(1, self._refused)
                log.log(3, "only information")
                return None
            return SimpleNamespace(create_execution_context=lambda: _Context(self._networks, self._cuda))

        return SimpleNamespace(deserialize_cuda_engine=load)


class _Context:
    def __init__(self, networks: list[Network], cuda: CpuCuda) -> None:
        self._networks, self._cuda = networks, cuda
        self._context = CpuContext(networks[0])
        definition = networks[0].definition
        tensors = [definition.get_input(index) for index in range(definition.num_inputs)]
        tensors += [definition.get_output(index) for index in range(definition.num_outputs)]
        self._sizes = {tensor.name: tuple(tensor.shape) for tensor in tensors}
        self._scored = networks[0].scored_tokens
        self.engine = SimpleNamespace(
            get_tensor_dtype={tensor.name: tensor.dtype for tensor in tensors}.__getitem__,
        )
        self.set_tensor_address = self._context.set_tensor_address

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        assert stream == 7
        return profile < len(self._networks)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        return self._context.set_input_shape(name, shape)

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        """Return the sizes for the inputs that are set, as TensorRT does."""
        tokens = self._context._shapes.get("input_ids", self._sizes["input_ids"])[-1]
        known = min(tokens, self._scored) if name == LOGITS and self._scored else tokens
        return self._context._shapes.get(name) or tuple(known if size == -1 else size for size in self._sizes[name])

    def execute_async_v3(self, stream: int) -> bool:
        shapes = dict(self._context._shapes)

        def execute() -> None:
            self._context._shapes = shapes
            self._context.execute_async_v3(stream)

        self._cuda.enqueue(execute, stream)
        return True


def closed(runtime: CpuCuda, cuda: Cuda) -> bool:
    """Return True if everything that was allocated is released, after a second close too."""
    with suppress(AssertionError):
        cuda.close()
    return not runtime.allocated
