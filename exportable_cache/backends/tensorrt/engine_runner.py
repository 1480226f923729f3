"""Run plans on a GPU: all engines share one cache on the device, and fixed-length steps are captured as CUDA graphs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ...errors import BundleError, first_line
from ...models.lora import WRITE_ADAPTER, write_slot
from .engine_io import (
    LOGITS,
    STATE_IN,
    STATE_OUT,
    bind,
    check_computes,
    check_fits,
    engine_inputs,
    load_error,
    records_of,
)
from .options import loads_on

if TYPE_CHECKING:
    from ...program.methods import ProgramMethod
    from ..base import ProgramDescription
    from .engine_io import EngineRecord, Input, Output


class ExecutionContext(Protocol):
    """Subset of TensorRT's `IExecutionContext`."""

    def set_tensor_address(self, name: str, address: int) -> bool:
        """Bind a tensor."""

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        """Set the shape of a dynamic input."""

    def get_tensor_shape(self, name: str) -> Sequence[int]:
        """Return the shape of a tensor for the shapes of the inputs."""

    def execute_async_v3(self, stream_handle: int) -> bool:
        """Enqueue the engine on a CUDA stream."""


class EngineRunner:
    """Engines over one cache.

    An aliased output is bound to the address of its input, so a step writes one token in place and copies nothing.
    Other outputs (a ring after a prompt, every cache of a plan with scatters) have separate tensors, which are copied
    over the input after the step. Steps run on a separate stream. A method of fixed length is captured as a CUDA graph
    on its second run.

    Neither this class nor TensorRT checks that a write stays within the cache; the session does, before every step.

    Args:
        methods: Methods by name.
        records: Record of each method's engine.
        contexts: Execution context of each method's engine.
        device: Device of the engines.
    """

    def __init__(
        self,
        methods: Mapping[str, ProgramMethod],
        records: Mapping[str, EngineRecord],
        contexts: Mapping[str, ExecutionContext],
        device: torch.device,
    ) -> None:
        self.methods = methods
        self.device = device
        self.records = dict(records)
        #: See `RoundsProducts`: float16 has as many bits as TF32.
        self.products = torch.float16 if any(record.products == "tf32" for record in records.values()) else None
        self._contexts = contexts
        state, lora = _kept(self.records.values())
        self.state = {
            name: torch.zeros(tensor.max_shape, dtype=getattr(torch, tensor.dtype), device=device)
            for name, tensor in state.items()
        }
        #: Slots for adapters, which all engines read at one address.
        self.lora = {
            name: torch.zeros(tensor.max_shape, dtype=getattr(torch, tensor.dtype), device=device)
            for name, tensor in lora.items()
        }
        shared = {**self.state, **self.lora}
        self.steps = {}
        for name, record in self.records.items():
            has_fixed_inputs = all(tensor.min_shape == tensor.max_shape for tensor in record.inputs)
            self.steps[name] = EngineStep(record, contexts[name], shared, device, captured=has_fixed_inputs)
        for name, step in self.steps.items():
            step.scores = methods[name].scored_tokens > 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @torch.no_grad()
    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run one step and return logits [batch, vocab], return all outputs of another method, or write an adapter."""
        if method == WRITE_ADAPTER:
            # Steps wait for this stream.
            return write_slot(list(self.lora.values()), *inputs)
        step = self.steps[method]
        inputs = tuple(engine_inputs(self.methods, method, tuple(step.inputs), inputs, self._embedded))
        if self._stream is None:
            return step.run(inputs, None)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            outputs = step.run(inputs, self._stream)
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        return outputs

    def _embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of ids."""
        return self.run("embed", ids.to(self.device))[0]


class EngineStep:
    """One engine with every tensor bound by name.

    Args:
        record: Record of the engine.
        context: Execution context of the engine.
        state: Cache tensors and slots for adapters by input name, shared with the other engines.
        device: Device of the engine.
        captured: Replay the engine as a CUDA graph.
    """

    def __init__(
        self,
        record: EngineRecord,
        context: ExecutionContext,
        state: Mapping[str, torch.Tensor],
        device: torch.device,
        captured: bool,
    ) -> None:
        #: True if logits of several tokens are returned, [batch, tokens, vocab].
        self.scores = False
        self._context = context
        self._captures = captured
        self._runs = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        inputs = [tensor for tensor in record.inputs if tensor.name not in state]
        # Buffers of the largest shape; shorter inputs fill the front.
        self.inputs = {
            tensor.name: torch.zeros(tensor.max_shape, dtype=getattr(torch, tensor.dtype), device=device)
            for tensor in inputs
        }
        self.outputs = {
            tensor.name: state[record.aliases[tensor.name]]
            if tensor.name in record.aliases
            else _allocate(tensor, device)
            for tensor in record.outputs
        }
        #: Tensors to copy after a step: (target, source).
        self.copies = [
            (state[STATE_IN + name.removeprefix(STATE_OUT)], tensor)
            for name, tensor in self.outputs.items()
            if name.startswith(STATE_OUT) and name not in record.aliases
        ]
        self._dynamic = [tensor.name for tensor in inputs if tensor.min_shape != tensor.max_shape]
        read = {tensor.name: state[tensor.name] for tensor in record.inputs if tensor.name in state}
        bound = {**read, **self.inputs, **self.outputs}
        bind(context, record, inputs, {name: tensor.data_ptr() for name, tensor in bound.items()})

    def run(self, inputs: tuple[torch.Tensor, ...], stream: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run one step.

        Args:
            inputs: Inputs of the method, in order, on any device.
            stream: The current CUDA stream; None on a CPU.

        Returns:
            Logits [batch, vocab], or of several tokens if it `scores`; or all outputs of a method without logits.
            They are copies.
        """
        for (name, buffer), given in zip(self.inputs.items(), inputs, strict=True):
            buffer.view(-1)[: given.numel()].copy_(given.reshape(-1), non_blocking=True)
            if name in self._dynamic:
                self._context.set_input_shape(name, tuple(given.shape))
        self._runs += 1
        if stream is None or not self._captures or self._runs == 1:
            # Not captured, because the first run initializes the engine.
            self._execute(0 if stream is None else stream.cuda_stream)
        else:
            if self._graph is None:
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph, stream=stream):
                    self._execute(stream.cuda_stream)
            self._graph.replay()
        if LOGITS not in self.outputs:
            return tuple(self._front(name, tensor).clone() for name, tensor in self.outputs.items())
        logits = self.outputs[LOGITS]
        if logits.dim() == 2:
            return logits.clone()
        # Fewer tokens fill the front.
        rows, most, vocab = logits.shape
        count = min(most, inputs[0].shape[1])
        logits = logits.view(-1)[: rows * count * vocab].view(rows, count, vocab)
        return logits.clone() if self.scores else logits[:, -1].clone()

    def _front(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor of the largest shape that the engine wrote."""
        shape = tuple(self._context.get_tensor_shape(name))
        return tensor.view(-1)[: math.prod(shape)].view(shape)

    def _execute(self, stream: int) -> None:
        if not self._context.execute_async_v3(stream):
            raise RuntimeError("TensorRT could not run the engine; see its log")
        for target, source in self.copies:
            target.copy_(source)


def open_engines(folder: Path, description: ProgramDescription) -> EngineRunner:
    """Load the plans of a bundle.

    Raises:
        BundleError: If there is no GPU, or the GPU or the installed TensorRT cannot run a plan.
        DeviceMemoryError: If the GPU has too little memory.
    """
    records = records_of(description.details)
    built_for = next(iter(records.values()))[1].built_for
    if not torch.cuda.is_available():
        raise BundleError(
            f"a TensorRT program needs an NVIDIA GPU (built for {built_for}), and torch finds none: {_why_no_gpu()}; "
            "copy the bundle to a machine with a GPU, or verify it without: exportable-cache verify"
        )
    from torch_tensorrt.logging import TRT_LOGGER

    from .upstream import collected_errors, trt

    major, minor = torch.cuda.get_device_capability()
    here = 10 * major + minor
    plans = {file: (folder / file).stat().st_size for file, _ in records.values()}
    kept = [tensor for part in _kept(record for _, record in records.values()) for tensor in part.values()]
    cache = sum(math.prod(one.max_shape) * getattr(torch, one.dtype).itemsize for one in kept)
    check_fits(sum(plans.values()), cache, *torch.cuda.mem_get_info())
    runtime = trt.Runtime(TRT_LOGGER)
    contexts = {}
    # Weights are on the device once for each engine, whose contexts share them.
    engines: dict[str, Any] = {}
    stream = torch.cuda.current_stream()
    for method, (file, record) in records.items():
        check_computes(here, record)
        with collected_errors() as errors:
            if file not in engines:
                engines[file] = runtime.deserialize_cuda_engine((folder / file).read_bytes())
            context = engines[file] and engines[file].create_execution_context()
            if context and record.profile is not None:
                if not context.set_optimization_profile_async(record.profile, stream.cuda_stream):
                    context = None
                stream.synchronize()
        if context is None:
            raise load_error(here, file, record, errors)
        contexts[method] = context
    device = torch.device("cuda", torch.cuda.current_device())
    return EngineRunner(
        description.methods, {method: record for method, (_, record) in records.items()}, contexts, device
    )


def _why_no_gpu() -> str:
    """Return what torch says of a missing GPU: it has no CUDA, or the driver is missing or too old."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        said = first_line(error).partition(". ")[0].rstrip(".")
        return said if torch.version.cuda is None else f"{said}, and torch was built for CUDA {torch.version.cuda}"
    return "no device is visible"


def runs_here(records: Iterable[EngineRecord]) -> bool:
    """Return True if the plans were built for this machine's GPU."""
    if not torch.cuda.is_available():
        return False
    major, minor = torch.cuda.get_device_capability()
    return all(loads_on(10 * major + minor, record.capabilities) for record in records)


def _kept(records: Iterable[EngineRecord]) -> tuple[dict[str, Input], dict[str, Input]]:
    """Return the inputs that hold the cache, and those that hold slots for adapters, of all engines by name."""
    state: dict[str, Input] = {}
    lora: dict[str, Input] = {}
    for record in records:
        state |= {tensor.name: tensor for tensor in record.state}
        lora |= {tensor.name: tensor for tensor in record.lora}
    return state, lora


def _allocate(tensor: Output, device: torch.device) -> torch.Tensor:
    if -1 in tensor.shape:
        raise BundleError(f"output {tensor.name!r} must have static sizes, got {tensor.shape}; export the model again")
    return torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype), device=device)
