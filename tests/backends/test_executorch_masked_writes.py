"""Writes of the same values to many places through the runtime, where its own operator fails."""

import pytest
import torch
from torch import nn

pytest.importorskip("executorch", reason="the executorch extra is not installed")

from executorch.runtime import Runtime

from exportable_cache.backends.executorch.lowering.lower import lower_programs
from exportable_cache.backends.executorch.lowering.rewrites import masked_writes_to_where

CHOSEN = torch.tensor([1, 4])


class Masked(nn.Module):
    """Rows at or above 3 cleared, as ids of pictures are: a mask over the first two of three dimensions."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        cleared = values.clone()
        cleared[values[..., 0] >= 3] = 0
        return cleared + values


class Embedded(nn.Module):
    """One vector wherever a number is above 3, as the end of a picture has an embedding of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("vector", torch.arange(6.0))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        embedded = values.clone()
        embedded[values[..., 0] >= 3] = self.vector
        return embedded + values


class Chosen(nn.Module):
    """Numbers of the vocabulary that are never given out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("chosen", CHOSEN)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        logits = values * 2
        logits[:, :, self.chosen] = -7.0
        return logits


class Elsewhere(nn.Module):
    """Writes that stay: a value for each place, indices that come in, numbers that are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("chosen", torch.tensor([1, 3]))

    def forward(self, values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        written = values.clone()
        written[:, indices] = 1.0
        written[0] = values[0] * 3
        written[:, self.chosen] = values[:, :2] * 2
        return torch.ops.aten.index_put(written, [values > 2], torch.tensor(1.0), True)


def writes(program: torch.export.ExportedProgram) -> int:
    return sum(node.op == "call_function" and "index_put" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize("module", [Masked(), Embedded(), Chosen()], ids=["mask", "vector", "indices"])
def test_the_same_values_are_written_by_a_choice(module: nn.Module) -> None:
    values = torch.arange(18, dtype=torch.float32).view(1, 3, 6) / 3
    expected = module(values)
    program = torch.export.export(module, (values,))
    assert writes(program) == 1
    program = masked_writes_to_where(program)
    assert writes(program) == 0 and torch.equal(program.module()(values), expected)
    lowered = lower_programs({"forward": torch.export.export(module, (values,))})
    (output,) = Runtime.get().load_program(lowered.buffer).load_method("forward").execute([values])
    assert torch.equal(output, expected)


def test_other_writes_are_left_alone() -> None:
    values, indices = torch.randn(2, 4), torch.tensor([0, 2])
    program = torch.export.export(Elsewhere(), (values, indices))
    before = writes(program)
    assert before == 3 == writes(masked_writes_to_where(program))
