"""The selective scan of Mamba (Gu and Dao 2023, arXiv:2312.00752), from any initial state."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from .bound import doublings


def selective_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    initial_state: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`h[t] = exp(A dt[t]) h[t-1] + dt[t] B[t] x[t]`, `y[t] = C[t] h[t] + D x[t]`, gated by `silu(z[t])`.

    Args:
        hidden_states: x, [batch, channels, length].
        dt: [batch, channels, length].
        A: [channels, states], negative.
        B: [batch, states, length].
        C: [batch, states, length].
        initial_state: h before the first token, [batch, channels, states].
        D: [channels].
        z: [batch, channels, length].
        delta_bias: Added to dt, [channels].
        delta_softplus: Whether dt is then passed through softplus.

    Returns:
        y [batch, channels, length], and h after the last token [batch, channels, states].
    """
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = F.softplus(dt)
    # [batch, channels, length, states]
    decay = torch.exp(A[None, :, None, :] * dt[..., None])
    inputs = dt[..., None] * B.transpose(1, 2)[:, None].float() * hidden_states[..., None].float()
    state = linear_recurrence(decay.transpose(1, 2), inputs.transpose(1, 2), initial_state).transpose(1, 2)
    output = (state.to(hidden_states.dtype) * C.transpose(1, 2)[:, None]).sum(-1)
    if D is not None:
        output = output + hidden_states * D[None, :, None]
    if z is not None:
        output = output * F.silu(z)
    return output, state[:, :, -1]


def linear_recurrence(decay: torch.Tensor, inputs: torch.Tensor, initial_state: torch.Tensor) -> torch.Tensor:
    """`h[t] = decay[t] h[t-1] + inputs[t]`, elementwise.

    Computed by doubling (Hillis and Steele 1986): after round k each position sums up the 2^k tokens up to it. Decays
    are at most 1 and only ever multiplied, so nothing overflows.

    Args:
        decay: [batch, length, ...], between 0 and 1.
        inputs: [batch, length, ...].
        initial_state: h before the first token, [batch, ...].

    Returns:
        h after each token, [batch, length, ...].
    """
    state = inputs
    for round_ in range(doublings(inputs.shape[1])):
        shift = 2**round_
        state = state + decay * shifted(state, shift, 0.0)
        decay = decay * shifted(decay, shift, 1.0)
    return state + decay * initial_state[:, None].to(state.dtype)


def shifted(values: torch.Tensor, tokens: int, fill: float) -> torch.Tensor:
    """`values` [batch, length, ...] moved `tokens` later, the front filled."""
    front = values.new_full((values.shape[0], tokens, *values.shape[2:]), fill)
    return torch.cat([front, values], dim=1).narrow(1, 0, values.shape[1])
