"""Shapes of what delegates give, told without running them.

Every pass of ExecuTorch that goes over a program works out what a delegate gives by running the operators that it was
made from, on tensors without values: 0.6 s for each delegate of a quantised layer, through all passes. The shapes are
known from when it was made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from executorch.exir.lowered_backend_module import LoweredBackendModule
from torch.fx import Graph

from .segments import place_of_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.export import ExportedProgram
    from torch.fx import Node

    from ....common.compat.executorch import NamedDataStoreOutput


class DelegateShapes:
    """What stands for the program that a delegate was made from once nothing of it is needed but its outputs' shapes.

    Attributes:
        graph: With as many outputs.
    """

    def __init__(self, outputs: list[tuple[torch.dtype, list[int | str]]]) -> None:
        self._outputs = outputs
        self.graph = Graph()
        self.graph.output((None,) * len(outputs))

    def module(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """What gives the outputs, without their values, for the delegate's inputs."""
        return self._run

    def _run(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(
            torch.empty([size_of(size, inputs) for size in sizes], dtype=dtype) for dtype, sizes in self._outputs
        )


def with_known_shapes(lowered: LoweredBackendModule) -> LoweredBackendModule:
    """The same call, its shapes told from here on; as it is where they cannot be."""
    program = lowered.original_module
    shapes = None if isinstance(program, DelegateShapes) else shapes_of(program)
    return lowered if shapes is None else replaced(lowered, original_module=shapes)


def replaced(
    lowered: LoweredBackendModule,
    original_module: Any = None,
    processed_bytes: bytes | None = None,
    named_data: NamedDataStoreOutput | None = None,
) -> LoweredBackendModule:
    """A call with some of its parts exchanged, those that are not None."""
    changed = LoweredBackendModule(
        original_module or lowered.original_module,
        lowered.backend_id,
        lowered.processed_bytes if processed_bytes is None else processed_bytes,
        lowered.compile_specs,
        named_data or lowered.named_data_store_output,
    )
    changed.meta = lowered.meta
    return changed


def shapes_of(program: ExportedProgram) -> DelegateShapes | None:
    """Of the program that a delegate was made from; None where a size of its outputs is not one of its inputs'."""
    inputs = [
        node for node in program.graph.find_nodes(op="placeholder") if node.name in program.graph_signature.user_inputs
    ]
    outputs = [node.meta["val"] for node in program.graph.output_node().args[0]]
    if not all(isinstance(value, torch.Tensor) and value.is_contiguous() for value in outputs):
        return None
    described: list[tuple[torch.dtype, list[int | str]]] = []
    for value in outputs:
        sizes = [described_size(size, inputs) for size in value.shape]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            return None
        described.append((value.dtype, known))
    return DelegateShapes(described)


def described_size(size: int | torch.SymInt, inputs: Sequence[Node]) -> int | str | None:
    """A static size, or the place of a symbolic one, as `size_of` reads it."""
    return place_of_size(size, inputs) if isinstance(size, torch.SymInt) else size


def size_of(described: int | str, inputs: Sequence[torch.Tensor]) -> int | torch.SymInt:
    """The size of tensors at hand."""
    if isinstance(described, int):
        return described
    index, dim = map(int, described.split("."))
    return inputs[index].shape[dim]
