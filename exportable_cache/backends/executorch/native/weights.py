"""How weights lie in a program whose layers are operators of this package: in blocks of outputs, in the order in which
a step reads them. `kernels/src/linear.h` and `float_linear.h` say the same.
"""

from __future__ import annotations

import torch

#: Outputs of a block, and what the weights of a group are a multiple of.
BLOCK, GROUP_MULTIPLE = 16, 32
#: A bfloat16 scale for each group, a float32 sum for each output, in bytes.
_SCALE, _SUM = 2, 4
_QUADS = 8


#: How an operator over weights of a type is called.
NAMES = {torch.float32: "float", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def pack_float(weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Weights as the kernel reads them, of float32 [outputs, inputs]: [blocks, inputs, `BLOCK`], and of bfloat16
    [blocks, pairs of inputs, `BLOCK`, 2]. Outputs and inputs that are not there are zeros.
    """
    pairs = _pairs(dtype)
    outputs, inputs = weight.shape
    whole = torch.nn.functional.pad(weight.detach().to(dtype), (0, -inputs % pairs, 0, -outputs % BLOCK))
    packed = whole.view(-1, BLOCK, whole.shape[1] // pairs, pairs).transpose(1, 2)
    return packed.contiguous() if pairs > 1 else packed.squeeze(3).contiguous()


def unpack_float(weights: torch.Tensor, inputs: int, outputs: int) -> torch.Tensor:
    """What `pack_float` was given: float32 [outputs, inputs]."""
    whole = weights.transpose(1, 2).reshape(-1, weights.shape[1] * _pairs(weights.dtype))
    return whole[:outputs, :inputs].float()


def _pairs(dtype: torch.dtype) -> int:
    """Inputs of an output that lie side by side."""
    return 2 if dtype == torch.bfloat16 else 1


def pack(integers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Weights as the kernel reads them, blocks of `BLOCK` outputs: for each the sum of its weights in float32, for each
    of its groups a scale in bfloat16, and the integers plus 8, two a byte.

    Args:
        integers: int8 [outputs, inputs], of -8 to 7; inputs a multiple of `GROUP_MULTIPLE`.
        scales: float [outputs, groups].

    Returns:
        uint8 [blocks, bytes]; outputs that are not there are zeros.
    """
    (outputs, inputs), groups = integers.shape, scales.shape[1]
    blocks = -(-outputs // BLOCK)
    missing = blocks * BLOCK - outputs
    scales = scales.to(torch.bfloat16)
    grouped = integers.view(outputs, groups, inputs // groups).sum(-1, dtype=torch.int32)
    sums = (scales.double() * grouped).sum(-1).float()
    # Zero is stored as 8.
    whole = torch.nn.functional.pad((integers + 8).to(torch.uint8), (0, 0, 0, missing), value=8)
    whole = whole.view(blocks, BLOCK, inputs // _QUADS, 2, _QUADS // 2)
    halves = (whole[..., 0, :] | (whole[..., 1, :] << 4)).transpose(1, 2)
    parts = (
        torch.nn.functional.pad(sums, (0, missing)).view(blocks, BLOCK),
        torch.nn.functional.pad(scales, (0, 0, 0, missing)).view(blocks, BLOCK, groups).transpose(1, 2),
        halves,
    )
    return torch.cat([part.contiguous().view(torch.uint8).reshape(blocks, -1) for part in parts], dim=1)


def unpack(weights: torch.Tensor, inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What `pack` was given: int8 [outputs, inputs] and bfloat16 [outputs, groups]."""
    blocks, size = weights.shape
    groups = (size // BLOCK - _SUM - inputs // 2) // _SCALE
    scales, halves = weights[:, BLOCK * _SUM :].split([BLOCK * _SCALE * groups, BLOCK * inputs // 2], dim=1)
    halves = halves.reshape(blocks, inputs // _QUADS, BLOCK, _QUADS // 2)
    whole = torch.stack([halves & 15, halves >> 4], dim=3).permute(0, 2, 1, 3, 4).reshape(blocks * BLOCK, inputs)
    scales = scales.contiguous().view(torch.bfloat16).view(blocks, groups, BLOCK).transpose(1, 2)
    return whole[:outputs].to(torch.int8) - 8, scales.reshape(blocks * BLOCK, groups)[:outputs]
