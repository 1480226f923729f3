"""Decompositions of operators that several compilers for devices lack.

They are functions for `ExportedProgram.run_decompositions`, and return NotImplemented for calls that they leave.
"""

from __future__ import annotations

from typing import Any

import torch


def scatter_by_comparisons(target: torch.Tensor, dim: int, index: torch.Tensor, source: Any) -> Any:
    """Compute `torch.scatter` along the last dimension by comparisons.

    Routers scatter along the experts, whose number is fixed. Other calls are left.

    Args:
        target: Tensor [..., size].
        dim: Dimension, the last one.
        index: Positions in the last dimension [..., chosen]; those of a row differ.
        source: Values [..., chosen], or a number.
    """
    if not _is_along_last(target, dim, index):
        return NotImplemented
    hits = index.unsqueeze(-1) == torch.arange(target.shape[-1], device=target.device)
    if isinstance(source, torch.Tensor):
        source = torch.where(hits, source.unsqueeze(-1), torch.zeros_like(source[..., :1, None])).sum(-2)
    # Sums of integers have 64 bits, and numbers may be of another kind than the tensor.
    return torch.where(hits.any(-2), source, target).to(target.dtype)


def gather_by_comparisons(source: torch.Tensor, dim: int, index: torch.Tensor, *, sparse_grad: bool = False) -> Any:
    """Compute `torch.gather` along the last dimension by comparisons; other calls are left.

    Args:
        source: Numbers [..., size], of a fixed size.
        dim: Dimension, the last one.
        index: Positions in the last dimension [..., chosen].
        sparse_grad: Ignored, because nothing is differentiated.
    """
    if source.dtype == torch.bool or not _is_along_last(source, dim, index) or not isinstance(source.shape[-1], int):
        return NotImplemented
    hits = index.unsqueeze(-1) == torch.arange(source.shape[-1], device=source.device)
    return torch.where(hits, source.unsqueeze(-2), 0).sum(-1).to(source.dtype)


def _is_along_last(tensor: torch.Tensor, dim: int, index: torch.Tensor) -> bool:
    rank = tensor.dim()
    return rank > 0 and dim % rank == rank - 1 and index.dim() == rank and index.shape[:-1] == tensor.shape[:-1]
