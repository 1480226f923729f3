"""Tiny networks built with TensorRT's own builder, and what the evaluator makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from exportable_cache.backends.tensorrt.evaluator import NetworkEvaluator

trt = pytest.importorskip(
    "tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install 'exportable-cache[tensorrt-rtx]'"
)

DTYPES = {
    torch.float32: trt.float32,
    torch.float16: trt.float16,
    torch.bfloat16: trt.bfloat16,
    torch.int32: trt.int32,
    torch.int64: trt.int64,
    torch.bool: trt.bool,
}


class Log(trt.ILogger):
    """Keeps errors and warnings; without a GPU every error is followed by one about the CUDA runtime."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []
        self.warnings: list[str] = []

    def log(self, severity: Any, message: str) -> None:
        if severity <= trt.ILogger.ERROR and "catchCudaError" not in message:
            self.errors.append(message)
        if severity == trt.ILogger.WARNING:
            self.warnings.append(message)


LOG = Log()
_BUILDER = trt.Builder(LOG)


class Net:
    """A strongly typed network under construction; keeps the constants that it points into."""

    def __init__(self) -> None:
        flag = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        self.network = _BUILDER.create_network(flag)
        self.constants: dict[str, torch.Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.network, name)

    def input(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...] | None = None) -> Any:
        """A network input like `tensor`, of its shape unless another is given."""
        return self.network.add_input(name, DTYPES[tensor.dtype], tuple(tensor.shape) if shape is None else shape)

    def constant(self, values: Any, dtype: torch.dtype = torch.int64, name: str | None = None) -> Any:
        """The output of a constant layer."""
        tensor = torch.as_tensor(values, dtype=None if isinstance(values, torch.Tensor) else dtype).contiguous()
        layer = self.network.add_constant(
            tuple(tensor.shape), trt.Weights(DTYPES[tensor.dtype], tensor.data_ptr(), tensor.numel())
        )
        layer.name = name or f"constant{len(self.constants)}"
        self.constants[layer.name] = tensor
        return layer.get_output(0)

    def evaluator(self, *outputs: Any) -> NetworkEvaluator:
        """The evaluator of the network with these outputs."""
        for index, tensor in enumerate(outputs):
            tensor.name = f"out{index}"
            self.network.mark_output(tensor)
        return NetworkEvaluator(self.network, self.constants)


def evaluate(
    build: Callable[..., Any], *tensors: torch.Tensor, shapes: dict[int, tuple[int, ...]] | None = None
) -> Any:
    """What a network makes of `tensors`.

    Args:
        build: `(net, *inputs) -> ` layer, output tensor, or a tuple of output tensors.
        shapes: Shapes of inputs by position, where they are not those of the tensors.

    Returns:
        A tensor, or a tuple of them.
    """
    net = Net()
    inputs = [net.input(f"in{index}", tensor, (shapes or {}).get(index)) for index, tensor in enumerate(tensors)]
    made = build(net, *inputs)
    made = made if isinstance(made, tuple) else (made,)
    outputs = [tensor if isinstance(tensor, trt.ITensor) else tensor.get_output(0) for tensor in made]
    results = net.evaluator(*outputs).run({f"in{index}": tensor for index, tensor in enumerate(tensors)})
    results = tuple(results[f"out{index}"] for index in range(len(outputs)))
    return results if len(results) > 1 else results[0]


def assert_same(result: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-6) -> None:
    """Equal dtype and shape, values within `tolerance` of the largest."""
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    if result.dtype.is_floating_point:
        torch.testing.assert_close(
            result, expected, rtol=0, atol=tolerance * max(1.0, expected.abs().max().item()), equal_nan=True
        )
    else:
        assert torch.equal(result, expected)


def assert_caught(result: torch.Tensor, expected: torch.Tensor) -> None:
    """A planted fault shows: another shape, or values that differ by far more than rounding."""
    if result.shape == expected.shape:
        assert (result.double() - expected.double()).abs().max() > 1e-2


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal values with no symmetry: a mean that is not 0, and another scale along every dimension."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator) + 0.3
    for dim, size in enumerate(shape):
        values = values * torch.linspace(0.5, 1.5, size).reshape(
            [-1 if other == dim else 1 for other in range(len(shape))]
        )
    return values.to(dtype)
