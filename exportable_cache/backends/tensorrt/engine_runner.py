"""Running plans on a GPU: one device-resident cache under all engines, and a CUDA graph of each fixed-length step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ...errors import BundleError
from .engine_io import LOGITS, STATE_IN, STATE_OUT, records_of

if TYPE_CHECKING:
    from ...program.methods import ProgramMethod
    from ..base import ProgramDescription
    from .engine_io import EngineRecord, Output


class ExecutionContext(Protocol):
    """What is used of TensorRT's `IExecutionContext`."""

    def set_tensor_address(self, name: str, address: int) -> bool: ...

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool: ...

    def execute_async_v3(self, stream_handle: int) -> bool: ...


class EngineRunner:
    """Engines over one cache.

    An aliased output is bound to the address of its input, so a step writes one token where it belongs and copies
    nothing. Outputs that are no aliases (a ring after a prompt, every cache of a plan built with scatters) go to a
    tensor of their own and are copied over the input after the step. Steps run on a stream of their own; a method of
    fixed length is captured as a CUDA graph the second time it runs.

    Nothing here or in TensorRT checks that a write stays within the cache: the session does, before every step.

    Args:
        methods: By name.
        records: Of each method's engine.
        contexts: Of each method's engine.
        device: Where the engines run.
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
        self._contexts = contexts
        first = next(iter(self.records.values()))
        self.state = {
            tensor.name: torch.zeros(tensor.max_shape, dtype=getattr(torch, tensor.dtype), device=device)
            for tensor in first.state
        }
        self.steps = {
            name: EngineStep(record, contexts[name], self.state, device, captured=_is_fixed(record))
            for name, record in self.records.items()
        }
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @torch.no_grad()
    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor:
        step = self.steps[method]
        if self._stream is None:
            return step.run(inputs, None)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            logits = step.run(inputs, self._stream)
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        return logits


class EngineStep:
    """One engine with every tensor bound, by name.

    Args:
        record: Of the engine.
        context: Of the engine.
        state: The cache by input name, shared with the other engines.
        device: Where it runs.
        captured: Whether to replay it as a CUDA graph.
    """

    def __init__(
        self,
        record: EngineRecord,
        context: ExecutionContext,
        state: Mapping[str, torch.Tensor],
        device: torch.device,
        captured: bool,
    ) -> None:
        self._context = context
        self._captures = captured
        self._runs = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        inputs = [tensor for tensor in record.inputs if tensor.name not in state]
        # At the largest shape: shorter inputs fill the front.
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
        #: Copied after a step: (over, from).
        self.copies = [
            (state[STATE_IN + name.removeprefix(STATE_OUT)], tensor)
            for name, tensor in self.outputs.items()
            if name.startswith(STATE_OUT) and name not in record.aliases
        ]
        self._dynamic = [tensor.name for tensor in inputs if tensor.min_shape != tensor.max_shape]
        for name, tensor in {**state, **self.inputs, **self.outputs}.items():
            if not context.set_tensor_address(name, tensor.data_ptr()):
                raise BundleError(f"the engine of {record.method!r} has no tensor {name!r}; export the model again")

    def run(self, inputs: tuple[torch.Tensor, ...], stream: Any) -> torch.Tensor:
        """One step.

        Args:
            inputs: Of the method, in order, on any device.
            stream: CUDA stream, the current one; None on a CPU.

        Returns:
            Logits [batch, vocab], a copy.
        """
        for (name, buffer), given in zip(self.inputs.items(), inputs, strict=True):
            buffer.view(-1)[: given.numel()].copy_(given.reshape(-1), non_blocking=True)
            if name in self._dynamic:
                self._context.set_input_shape(name, tuple(given.shape))
        self._runs += 1
        if stream is None or not self._captures or self._runs == 1:
            # The first run sets the engine up, which no graph may hold.
            self._execute(0 if stream is None else stream.cuda_stream)
        else:
            if self._graph is None:
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph, stream=stream):
                    self._execute(stream.cuda_stream)
            self._graph.replay()
        return self.outputs[LOGITS].clone()

    def _execute(self, stream: int) -> None:
        if not self._context.execute_async_v3(stream):
            raise RuntimeError("TensorRT could not run the engine; its log says why")
        for over, new in self.copies:
            over.copy_(new)


def open_engines(folder: Path, description: ProgramDescription) -> EngineRunner:
    """Load the plans of a bundle.

    Raises:
        BundleError: If there is no GPU, or it or the installed TensorRT cannot run one of them.
    """
    records = records_of(description.details)
    built_for = next(iter(records.values()))[1].built_for
    if not torch.cuda.is_available():
        raise BundleError(
            f"a TensorRT program runs on an NVIDIA GPU (this one was built for {built_for}), and torch finds none "
            "here; copy the bundle to a machine with one, or check it without: exportable-cache verify"
        )
    from torch_tensorrt.logging import TRT_LOGGER

    from .upstream import collected_errors, trt

    runtime = trt.Runtime(TRT_LOGGER)
    contexts = {}
    for method, (file, _) in records.items():
        with collected_errors() as errors:
            engine = runtime.deserialize_cuda_engine((folder / file).read_bytes())
            context = engine and engine.create_execution_context()
        if context is None:
            major, minor = torch.cuda.get_device_capability()
            raise BundleError(
                f"TensorRT cannot load {file}, built for {built_for}, on this GPU of SM {major}{minor}: "
                f"{'; '.join(errors) or 'it gives no reason'}; export again with sm={major}{minor}"
            )
        contexts[method] = context
    device = torch.device("cuda", torch.cuda.current_device())
    return EngineRunner(
        description.methods, {method: record for method, (_, record) in records.items()}, contexts, device
    )


def runs_here(records: Iterable[EngineRecord]) -> bool:
    """Whether a GPU here is one that the plans were built for."""
    if not torch.cuda.is_available():
        return False
    major, minor = torch.cuda.get_device_capability()
    here = 10 * major + minor
    # 90 and 100 are not on the list of a portable plan.
    return all(
        here in record.capabilities or (not record.capabilities and here in (80, 86, 89)) or here >= 120
        for record in records
    )


def _allocate(tensor: Output, device: torch.device) -> torch.Tensor:
    if -1 in tensor.shape:
        raise BundleError(
            f"output {tensor.name!r} has shape {tensor.shape}, whose size is not known; export the model again"
        )
    return torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype), device=device)


def _is_fixed(record: EngineRecord) -> bool:
    return all(tensor.min_shape == tensor.max_shape for tensor in record.inputs)
