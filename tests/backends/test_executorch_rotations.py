"""Rotary halves as a product: which concatenations are rewritten, and that the numbers are the same."""

import pytest
import torch

pytest.importorskip("executorch", reason="the executorch extra is not installed")

from exportable_cache.backends.executorch.lowering.rewrites import rotations_to_linear

HEAD_DIM = 8
HALF = HEAD_DIM // 2


class Halves(torch.nn.Module):
    """A function of x [1, heads, length, HEAD_DIM] as a module."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def rewritten(function, dtype: torch.dtype = torch.float32):
    length = torch.export.Dim("length", min=2, max=64)
    x = torch.randn(1, 3, 5, HEAD_DIM).to(dtype)
    program = rotations_to_linear(torch.export.export(Halves(function), (x,), dynamic_shapes={"x": {2: length}}))
    return program, {node.target for node in program.graph.nodes}


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((-x[..., HALF:], x[..., :HALF]), dim=-1)


@pytest.mark.parametrize("length", [2, 40])
def test_a_rotation_is_one_product_with_the_same_numbers(length: int) -> None:
    program, targets = rewritten(rotate_half)
    assert torch.ops.aten.linear.default in targets
    assert not {torch.ops.aten.slice.Tensor, torch.ops.aten.neg.default, torch.ops.aten.cat.default} & targets
    x = torch.randn(1, 3, length, HEAD_DIM)
    assert torch.equal(program.module()(x), rotate_half(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.cat((x[..., HALF:], x[..., :HALF]), dim=-1),  # no sign
        lambda x: torch.cat((-x[..., :HALF], x[..., HALF:]), dim=-1),  # not swapped
        lambda x: torch.cat((-x[..., HALF + 1 :], x[..., : HALF + 1]), dim=-1),  # not halves
        lambda x: torch.cat((-x[..., :HALF], x[..., :HALF]), dim=-1),  # one half twice
        lambda x: torch.cat((-x[..., HALF:], x[..., :HALF]), dim=-2),  # stacked
        lambda x: torch.cat((-x[..., 1::2], x[..., ::2]), dim=-1),  # interleaved
        lambda x: torch.cat((-(x + 1)[..., HALF:], x[..., :HALF]), dim=-1),  # of two tensors
    ],
)
def test_other_concatenations_are_left_alone(function) -> None:
    assert torch.ops.aten.linear.default not in rewritten(function)[1]


def test_other_dtypes_are_left_alone() -> None:
    assert torch.ops.aten.linear.default not in rewritten(rotate_half, torch.bfloat16)[1]
