"""Networks of a few operators."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from exportable_cache.backends.tensorrt.engine_io import EngineIO
from exportable_cache.backends.tensorrt.evaluator import NetworkEvaluator
from exportable_cache.backends.tensorrt.network import Network, build_network


class Toy(nn.Module):
    """A function of tensors in the shape of a method: a position goes in and comes out, and no layer has state."""

    def __init__(self, function: Callable[..., torch.Tensor], *buffers: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        for index, buffer in enumerate(buffers):
            self.register_buffer(f"buffer{index}", buffer)
        self.count = len(buffers)

    def forward(self, tensors: list[torch.Tensor], input_pos: torch.Tensor, length: torch.Tensor):
        buffers = [getattr(self, f"buffer{index}") for index in range(self.count)]
        return self.function(*tensors, *buffers), input_pos + 1


def toy_network(function: Callable[..., torch.Tensor], tensors: list[torch.Tensor], *buffers: torch.Tensor) -> Network:
    """The network of `function(*tensors, *buffers)`, whose result is its logits; inputs are `x0`, `x1`, ..."""
    position = torch.zeros(1, dtype=torch.int64)
    program = torch.export.export(Toy(function, *buffers).eval(), (tensors, position, position.clone()))
    names = tuple(f"x{index}" for index in range(len(tensors)))
    return build_network(program, EngineIO((*names, "input_pos"), ("layers.0.cumulative_length",), (1, 1, 1)))


def evaluate(network: Network, tensors: list[torch.Tensor]) -> torch.Tensor:
    """The result of a toy network on the CPU."""
    given = {f"x{index}": tensor for index, tensor in enumerate(tensors)}
    return NetworkEvaluator(network.definition, network.constants).run(
        {**given, "input_pos": torch.zeros(1, dtype=torch.int64)}
    )["logits"]
