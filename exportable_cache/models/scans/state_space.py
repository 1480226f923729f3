"""The state space scan of Mamba 2 (Dao and Gu 2024, arXiv:2405.21060), from any initial state."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def state_space_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    initial_state: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> tuple[torch.Tensor, torch.Tensor]:
    """`h[t] = exp(A dt[t]) h[t-1] + dt[t] x[t] B[t]`, `y[t] = h[t] C[t] + D x[t]`, with one decay per head.

    All tokens are one chunk of the paper's chunked form (section 6): attention with decays between them, and one
    product for what the state gave before. Upstream pads to whole chunks of a fixed size instead, which fixes the
    length of a traced step.

    Args:
        hidden_states: x, [batch, length, heads, head_dim].
        dt: [batch, length, heads].
        A: [heads], negative.
        B: [batch, length, groups, states], `heads` a multiple of `groups`.
        C: [batch, length, groups, states].
        initial_state: h before the first token, [batch, heads, head_dim, states].
        D: [heads].
        dt_bias: Added to dt, [heads].
        dt_softplus: Whether dt is then passed through softplus.
        dt_limit: Range that dt is clamped to.

    Returns:
        y [batch, length, heads, head_dim] in float32, and h after the last token.
    """
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    dt = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1]).float()
    groups = hidden_states.shape[2] // B.shape[2]
    # [batch, heads, length, ...]
    x, B, C = [tensor.transpose(1, 2).float() for tensor in (hidden_states, B, C)]
    B, C = B.repeat_interleave(groups, dim=1), C.repeat_interleave(groups, dim=1)
    state, step = initial_state.float(), dt.transpose(1, 2)
    total = (A.float()[None, :, None] * step).cumsum(-1)[..., None]
    at = torch.arange(x.shape[2], device=x.device)
    later = at[:, None] < at[None, :]
    between = (total - total.transpose(-1, -2)).masked_fill(later, float("-inf")).exp()
    added = x * step[..., None]
    output = ((C @ B.transpose(-1, -2)) * between) @ added + (C * total.exp()) @ state.transpose(-1, -2)
    last = total[..., -1:, :]
    state = last.exp() * state + added.transpose(-1, -2) @ (B * (last - total).exp())
    if D is not None:
        output = output + D[None, :, None, None] * x
    return output.transpose(1, 2).contiguous(), state
