"""Run plans on a GPU without torch: TensorRT's Python module, cuda-bindings, and numpy for host memory."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module, util
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import BundleError, DeviceMemoryError
from .engine_io import LOGITS, STATE_IN, STATE_OUT, EngineRecord, bind, check_computes, check_fits, load_error

#: TensorRT's module by the package that built a plan, see `EngineRecord.builder`.
MODULES = {"tensorrt-rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}
_CUDA = "cuda.bindings.runtime"
#: Status of a call without a driver, or with one that is older than the bindings.
_OLD_DRIVER = 35
_OUT_OF_MEMORY = 2
#: Name of the input with the slot of the row's adapter, see `models.lora.ADAPTERS`.
_ADAPTERS = "adapters"

#: numpy's dtypes; bfloat16 has none and is moved as integers.
_DTYPES = {
    "float32": "f4",
    "float16": "f2",
    "bfloat16": "u2",
    "int64": "i8",
    "int32": "i4",
    "int8": "i1",
    "uint8": "u1",
}
#: dtypes by their name in TensorRT.
_ENGINE_DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT64": "int64",
    "INT32": "int32",
    "INT8": "int8",
    "UINT8": "uint8",
}


def missing_package(builder: str) -> str | None:
    """Return the name of the package that is missing to run a plan without torch, or None.

    Args:
        builder: See `EngineRecord.builder`.
    """
    package = builder.partition(" ")[0]
    for name, module in (("cuda-bindings", _CUDA), (package, MODULES.get(package, package))):
        try:
            found = util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return name
    return None


class CudaError(BundleError):
    """A call of CUDA's runtime that failed."""


class Cuda:
    """CUDA's runtime with exceptions, and the memory that was allocated through it.

    Args:
        runtime: Module `cuda.bindings.runtime`.

    Raises:
        CudaError: If there is no GPU, or the driver is older than the bindings.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._freed: list[tuple[str, Any]] = []
        status, count = runtime.cudaGetDeviceCount()
        if int(status) == _OLD_DRIVER:
            installed, needed = (_version(self.call(f"cuda{kind}GetVersion")) for kind in ("Driver", "Runtime"))
            if installed == "0.0":
                raise CudaError(f"the CUDA driver must support CUDA {needed}, got none; install NVIDIA's driver")
            raise CudaError(
                f"the CUDA driver must support CUDA {needed} of the installed cuda-bindings, got {installed}; update "
                f"the driver, or pip install 'cuda-bindings<={installed}'"
            )
        if int(status) or not count:
            raise CudaError(f"a TensorRT program needs an NVIDIA GPU, and CUDA finds none ({self._text(status)})")
        major, minor = (
            self.call(
                "cudaDeviceGetAttribute", getattr(runtime.cudaDeviceAttr, f"cudaDevAttrComputeCapability{part}"), 0
            )
            for part in ("Major", "Minor")
        )
        #: Compute capability, 89 for SM 8.9.
        self.capability = 10 * int(major) + int(minor)
        self.stream = self.kept("cudaStreamDestroy", self.call("cudaStreamCreate"))

    def call(self, name: str, *arguments: Any) -> Any:
        """Return the results of a function of the runtime: None, one value, or a tuple.

        Raises:
            DeviceMemoryError: If there is too little memory.
            CudaError: If it fails for another reason.
        """
        status, *found = getattr(self._runtime, name)(*arguments)
        if int(status) == _OUT_OF_MEMORY:
            raise DeviceMemoryError(
                f"{name} found too little memory on the GPU; end other programs there, or export with a smaller "
                "max_cache_len or with quantize"
            )
        if int(status):
            raise CudaError(f"{name} failed: {self._text(status)}")
        return found[0] if len(found) == 1 else tuple(found) or None

    def constant(self, enum: str, name: str) -> Any:
        """Return a member of one of the runtime's enums."""
        return getattr(getattr(self._runtime, enum), name)

    def allocate(self, size: int) -> int:
        """Return the address of zeroed memory on the device."""
        address = int(self.kept("cudaFree", self.call("cudaMalloc", max(size, 1))))
        self.call("cudaMemsetAsync", address, 0, max(size, 1), self.stream)
        return address

    def host_array(self, shape: Sequence[int], dtype: str) -> np.ndarray:
        """Return an array in host memory that the GPU copies from and to without the processor."""
        kind = np.dtype(_DTYPES[dtype])
        size = max(math.prod(shape) * kind.itemsize, 1)
        address = int(self.kept("cudaFreeHost", self.call("cudaMallocHost", size)))
        memory = (ctypes.c_char * size).from_address(address)
        return np.frombuffer(memoryview(memory), kind, math.prod(shape)).reshape(shape)

    def copy(self, target: int, source: int, size: int, kind: str) -> None:
        """Enqueue a copy; `kind` is such as `HostToDevice`."""
        self.call(
            "cudaMemcpyAsync", target, source, size, self.constant("cudaMemcpyKind", f"cudaMemcpy{kind}"), self.stream
        )

    def wait(self) -> None:
        """Wait for all that was enqueued."""
        self.call("cudaStreamSynchronize", self.stream)

    def kept(self, destroy: str, thing: Any) -> Any:
        """Return a resource that `close` releases."""
        self._freed.append((destroy, thing))
        return thing

    def close(self) -> None:
        """Release everything; a second call does nothing."""
        while self._freed:
            destroy, thing = self._freed.pop()
            # A driver that has ended, or an earlier error of the device, must not hide what ended the session.
            with suppress(BundleError, DeviceMemoryError):
                self.call(destroy, thing)

    def _text(self, status: Any) -> str:
        _, text = self._runtime.cudaGetErrorString(status)
        return text.decode(errors="replace") if isinstance(text, bytes) else str(text)


class CudaEngines:
    """Engines of all methods over one cache on the device; see `EngineRunner`, which does the same with torch.

    A step of fixed length is captured as a CUDA graph on its second run, with the copies of its inputs and logits.

    Args:
        folder: Folder of the plans.
        records: File name and record of each method's engine.
        cuda: CUDA's runtime.
        tensorrt: TensorRT's module.

    Raises:
        BundleError: If a plan cannot be loaded here.
        DeviceMemoryError: If the GPU has too little memory.
    """

    def __init__(
        self, folder: Path, records: Mapping[str, tuple[str, EngineRecord]], cuda: Cuda, tensorrt: Any
    ) -> None:
        self._cuda = cuda
        self._steps: dict[str, _Step] = {}
        first = next(iter(records.values()))[1]
        for _, record in records.values():
            _check_names(record)
            _check_sizes(record, first)
        cache = {tensor.name: _bytes(tensor.max_shape, tensor.dtype) for tensor in (*first.state, *first.lora)}
        plans = {file: (folder / file).stat().st_size for file, _ in records.values()}
        check_fits(sum(plans.values()), sum(cache.values()), *cuda.call("cudaMemGetInfo"))
        self._log = _log_of(tensorrt)
        runtime = tensorrt.Runtime(self._log)
        engines: dict[str, Any] = {}
        contexts = {
            method: self._load(folder, file, record, runtime, engines) for method, (file, record) in records.items()
        }
        self._state = {name: cuda.allocate(size) for name, size in cache.items()}
        #: Slots for adapters: address, dtype and bytes of one slot.
        self._slots = [
            (self._state[tensor.name], tensor.dtype, _bytes(tensor.max_shape[1:], tensor.dtype))
            for tensor in first.lora
        ]
        for method, (_, record) in records.items():
            self._steps[method] = _Step(cuda, record, contexts[method], self._state, self._log.errors)
        cuda.wait()

    def run(self, method: str, tokens: Sequence[int], position: int) -> np.ndarray:
        """Run one step of one row and return its logits, float32 [rows, vocab], a copy: of the last token or tokens.

        Args:
            method: Name of a method.
            tokens: Token ids, as many as the method takes.
            position: Position of the first one.
        """
        return self._steps[method].run(tokens, position)

    def write_adapter(self, slot: int, arrays: Sequence[np.ndarray]) -> None:
        """Write an adapter into a slot.

        Args:
            slot: Index of the slot.
            arrays: float32 [inputs, rank] and [rank, outputs] of each layer, in the order of the engine's inputs.
        """
        for (address, dtype, size), array in zip(self._slots, arrays, strict=True):
            stored = np.ascontiguousarray(_stored(array, dtype))
            if stored.nbytes != size:
                raise BundleError(f"a slot must take {size} bytes, got {stored.nbytes}; export the model again")
            self._cuda.copy(address + slot * size, stored.ctypes.data, size, "HostToDevice")
            # The array is released after the copy.
            self._cuda.wait()

    def use_slot(self, slot: int) -> None:
        """Run the next steps with the adapter in a slot; 0 for the model itself."""
        for step in self._steps.values():
            step.use_slot(slot)

    def close(self) -> None:
        """Release the GPU's memory; a second call does nothing."""
        # Before the memory that they are bound to.
        self._steps.clear()
        self._cuda.close()

    def _load(self, folder: Path, file: str, record: EngineRecord, runtime: Any, engines: dict[str, Any]) -> Any:
        """Return an execution context of a plan, whose weights are loaded once."""
        check_computes(self._cuda.capability, record)
        self._log.errors.clear()
        if file not in engines:
            engines[file] = runtime.deserialize_cuda_engine((folder / file).read_bytes())
        context = engines[file] and engines[file].create_execution_context()
        if context and record.profile is not None:
            if not context.set_optimization_profile_async(record.profile, int(self._cuda.stream)):
                context = None
            self._cuda.wait()
        if not context:
            raise load_error(self._cuda.capability, file, record, self._log.errors)
        return context


class _Step:
    """One method's engine with every tensor bound by name, see `EngineStep`."""

    def __init__(
        self, cuda: Cuda, record: EngineRecord, context: Any, state: Mapping[str, int], errors: list[str]
    ) -> None:
        self._cuda, self._context, self._method, self._errors = cuda, context, record.method, errors
        self._graph: Any = None
        self._runs = 0
        inputs = [tensor for tensor in record.inputs if tensor.name not in state]
        #: Host and device memory of the largest shape; shorter inputs fill the front.
        self._host = {tensor.name: cuda.host_array(tensor.max_shape, tensor.dtype) for tensor in inputs}
        self._device = {name: cuda.allocate(array.nbytes) for name, array in self._host.items()}
        if _ADAPTERS in self._host:
            self._host[_ADAPTERS][0] = 0
        self._dynamic = [tensor.name for tensor in inputs if tensor.min_shape != tensor.max_shape]
        bound = {**state, **self._device}
        #: Copies after a step: (target, source, bytes).
        self._copies = []
        for output in record.outputs:
            source = record.aliases.get(output.name)
            size = _bytes(output.shape, output.dtype)
            bound[output.name] = state[source] if source is not None else cuda.allocate(size)
            if output.name.startswith(STATE_OUT) and source is None:
                target = state[STATE_IN + output.name.removeprefix(STATE_OUT)]
                self._copies.append((target, bound[output.name], size))
            if output.name == LOGITS:
                self._logits = cuda.host_array(output.shape, output.dtype)
                self._is_bfloat16 = output.dtype == "bfloat16"
        self._logits_address = bound[LOGITS]
        bind(context, record, inputs, bound)
        _check_engine(record, context)

    def use_slot(self, slot: int) -> None:
        """See `CudaEngines.use_slot`."""
        self._host[_ADAPTERS][0] = slot

    def run(self, tokens: Sequence[int], position: int) -> np.ndarray:
        """See `CudaEngines.run`."""
        ids = self._host["input_ids"]
        if len(tokens) > ids.size:
            raise BundleError(
                f"the engine of {self._method!r} must take {len(tokens)} tokens, as the manifest says, got at most "
                f"{ids.size}; export the model again"
            )
        ids.reshape(-1)[: len(tokens)] = tokens
        self._host["input_pos"][0] = position
        if "input_ids" in self._dynamic:
            self._context.set_input_shape("input_ids", (1, len(tokens)))
        self._runs += 1
        if self._graph is None and not self._dynamic and self._runs > 1:
            self._graph = self._captured()
        if self._graph is not None:
            self._cuda.call("cudaGraphLaunch", self._graph, self._cuda.stream)
        else:
            # The first run is not captured, because it initializes the engine.
            self._enqueue(len(tokens))
        self._cuda.wait()
        # Fewer tokens than have logits fill the front.
        logits = self._logits.reshape(-1, self._logits.shape[-1])[: len(tokens)]
        if self._is_bfloat16:
            return (logits.astype(np.uint32) << 16).view(np.float32)
        return logits.astype(np.float32)

    def _captured(self) -> Any:
        cuda = self._cuda
        mode = cuda.constant("cudaStreamCaptureMode", "cudaStreamCaptureModeThreadLocal")
        cuda.call("cudaStreamBeginCapture", cuda.stream, mode)
        try:
            self._enqueue(1)
        finally:
            graph = cuda.call("cudaStreamEndCapture", cuda.stream)
        cuda.kept("cudaGraphDestroy", graph)
        return cuda.kept("cudaGraphExecDestroy", cuda.call("cudaGraphInstantiate", graph, 0))

    def _enqueue(self, length: int) -> None:
        cuda = self._cuda
        for name, array in self._host.items():
            size = length * array.itemsize if name in self._dynamic else array.nbytes
            cuda.copy(self._device[name], array.ctypes.data, size, "HostToDevice")
        self._errors.clear()
        if not self._context.execute_async_v3(int(cuda.stream)):
            raise BundleError(
                f"TensorRT could not run method {self._method!r}: {'; '.join(self._errors) or 'no reason given'}"
            )
        for target, source, size in self._copies:
            cuda.copy(target, source, size, "DeviceToDevice")
        cuda.copy(self._logits.ctypes.data, self._logits_address, self._logits.nbytes, "DeviceToHost")


def open_cuda_engines(folder: Path, records: Mapping[str, tuple[str, EngineRecord]]) -> CudaEngines:
    """Load the plans of a bundle onto the first GPU, without torch.

    Raises:
        BundleError, DeviceMemoryError: See `Cuda` and `CudaEngines`.
    """
    package = next(iter(records.values()))[1].builder.partition(" ")[0]
    cuda = Cuda(import_module(_CUDA))
    try:
        return CudaEngines(folder, records, cuda, import_module(MODULES[package]))
    except BaseException:
        cuda.close()
        raise


def _log_of(tensorrt: Any) -> Any:
    """Return a logger of TensorRT that keeps errors and prints nothing."""

    class Log(tensorrt.ILogger):
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= tensorrt.ILogger.Severity.ERROR:
                self.errors.append(message)

    return Log()


def _check_names(record: EngineRecord) -> None:
    """Check that a record has the tensors of a text decoder, with sizes.

    Raises:
        BundleError: If it does not.
    """
    state = {tensor.name for tensor in record.state}
    given = [*(tensor.name for tensor in record.inputs), *(tensor.name for tensor in record.outputs)]
    lora = {tensor.name for tensor in record.lora}
    own = {tensor.name for tensor in record.inputs} - state - lora
    wanted = {"input_ids", "input_pos", *([_ADAPTERS] if lora else [])}
    outputs = {tensor.name for tensor in record.outputs}
    updated = {STATE_IN + name.removeprefix(STATE_OUT) for name in outputs if name.startswith(STATE_OUT)}
    sizes = [size for tensor in record.inputs for size in tensor.max_shape]
    sizes += [size for tensor in record.outputs for size in tensor.shape]
    for is_valid, constraint in (
        (own == wanted, f"the inputs {' and '.join(sorted(wanted))}, got {', '.join(sorted(own))}"),
        (LOGITS in outputs, f"an output {LOGITS}, got {', '.join(sorted(outputs))}"),
        (updated <= state and set(record.aliases.values()) <= state, "an input for each part of the cache"),
        (len(given) == len(set(given)), f"one tensor of each name, got {', '.join(given)}"),
        (min(sizes, default=0) > 0, f"static sizes above 0, got {min(sizes, default=0)}"),
    ):
        if not is_valid:
            raise BundleError(f"the engine of {record.method!r} must have {constraint}; export the model again")


def _check_sizes(record: EngineRecord, first: EngineRecord) -> None:
    """Check that the sizes of a record fit each other, and those of the first record, whose cache all engines share.

    Raises:
        BundleError: If they do not.
    """
    inputs = {tensor.name: tensor for tensor in record.inputs}
    ids, position = inputs["input_ids"], inputs["input_pos"]
    adapters = [one for one in record.inputs if one.name == _ADAPTERS]
    cache, shared = (
        {one.name: (one.dtype, one.min_shape, one.max_shape) for one in (*each.state, *each.lora)}
        for each in (record, first)
    )
    logits, others = (next(one.shape for one in each.outputs if one.name == LOGITS) for each in (record, first))
    wrong = [
        output.name
        for output in record.outputs
        if (source := _source(record, output.name)) is not None
        and _bytes(output.shape, output.dtype) != _bytes(inputs[source].max_shape, inputs[source].dtype)
    ]
    for is_valid, constraint in (
        (cache == shared, f"the cache of {first.method!r}, got other names, dtypes or shapes"),
        (not wrong, f"outputs as large as the parts of the cache that they update, got {', '.join(wrong)}"),
        (
            len(ids.max_shape) == len(ids.min_shape) == 2 and ids.max_shape[0] == 1 and "int" in ids.dtype,
            f"input_ids of integers [1, tokens], got {ids.dtype} {ids.max_shape}",
        ),
        (
            position.min_shape == position.max_shape == [1] and "int" in position.dtype,
            f"input_pos of integers [1], got {position.dtype} {position.max_shape}",
        ),
        (
            all(one.min_shape == one.max_shape == [1] and "int" in one.dtype for one in adapters),
            f"{_ADAPTERS} of integers [1], got {', '.join(f'{one.dtype} {one.max_shape}' for one in adapters)}",
        ),
        (
            len(logits) in (2, 3) and logits[0] == 1 and logits[-1:] == others[-1:],
            f"logits [1, {', '.join(map(str, others[-1:]))}] or [1, tokens, ...], as {first.method!r}, got {logits}",
        ),
    ):
        if not is_valid:
            raise BundleError(f"the engine of {record.method!r} must have {constraint}; export the model again")


def _source(record: EngineRecord, output: str) -> str | None:
    """Return the name of the input that an output updates; None if it updates none."""
    own = STATE_IN + output.removeprefix(STATE_OUT) if output.startswith(STATE_OUT) else None
    return record.aliases.get(output, own)


def _check_engine(record: EngineRecord, context: Any) -> None:
    """Check that an engine has the shapes and dtypes of its record, because TensorRT writes past smaller memory.

    Raises:
        BundleError: If it has others.
    """
    engine: Any = getattr(context, "engine", None)
    if not hasattr(engine, "get_tensor_dtype") or not hasattr(context, "get_tensor_shape"):
        return
    most = next(one.max_shape[-1] for one in record.inputs if one.name == "input_ids")
    tensors: list[tuple[str, str, list[int]]] = [(one.name, one.dtype, one.max_shape) for one in record.inputs]
    for one in record.outputs:
        # A method that takes fewer tokens than have logits fills the front.
        rows = [min(one.shape[1], most)] if one.name == LOGITS and len(one.shape) == 3 else one.shape[1:2]
        tensors.append((one.name, one.dtype, [*one.shape[:1], *rows, *one.shape[2:]]))
    for name, kind, recorded in tensors:
        # Those of the inputs that are set, the longest of the method.
        shape = [int(size) for size in context.get_tensor_shape(name)]
        dtype = _ENGINE_DTYPES.get(engine.get_tensor_dtype(name).name, "an unknown dtype")
        same = len(shape) == len(recorded) and all(a in (-1, b) for a, b in zip(shape, recorded, strict=True))
        if not same or dtype != kind:
            raise BundleError(
                f"{name} of the engine of {record.method!r} must be {kind} {recorded}, as the manifest "
                f"says, got {dtype} {shape}; export the model again"
            )


def _stored(array: np.ndarray, dtype: str) -> np.ndarray:
    """Return float32 values in the dtype of a tensor on the device; bfloat16 as integers, rounded half to even."""
    if dtype != "bfloat16":
        return array.astype(_DTYPES[dtype])
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _bytes(shape: Sequence[int], dtype: str) -> int:
    if dtype not in _DTYPES:
        raise BundleError(f"the engine has a tensor of dtype {dtype}, and this release knows {', '.join(_DTYPES)}")
    return math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize


def _version(number: int) -> str:
    """Return CUDA's 13000 as text: 13.0."""
    return f"{number // 1000}.{number % 1000 // 10}"
