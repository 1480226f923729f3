"""Recurrences over the tokens of one step, computed without a loop over them.

Each starts from a state and returns the outputs and the next state. Results are exact for any number of tokens, so one
exported graph serves a prompt, its continuation and every length. tests/scans compares with the sequential recurrence.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.nn import functional as F


class _Longest(threading.local):
    """A thread-local limit. TorchDynamo (2.13) traces attributes of a `threading.local`, but not a `ContextVar`."""

    def __init__(self) -> None:
        # Set on the instance of every thread, because guards of a graph fail if the attribute appears later.
        self.tokens: int | None = None


_longest = _Longest()


@contextmanager
def longest_step(tokens: int | None) -> Iterator[None]:
    """Set the most tokens of a step inside the block; None if the lengths are known at tracing time.

    Scans by doubling take as many rounds as that limit needs, for every length.
    """
    before = _longest.tokens
    _longest.tokens = tokens
    try:
        yield
    finally:
        _longest.tokens = before


def doublings(length: int) -> int:
    """Return the rounds that doubling needs for `length` tokens, which may be symbolic inside `longest_step`."""
    return ((_longest.tokens or length) - 1).bit_length()


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
    """Compute the selective scan of Mamba (Gu and Dao 2023, arXiv:2312.00752).

    `h[t] = exp(A dt[t]) h[t-1] + dt[t] B[t] x[t]`, `y[t] = C[t] h[t] + D x[t]`, gated by `silu(z[t])`.

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
        delta_softplus: True to apply softplus to dt then.

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
    """Compute `h[t] = decay[t] h[t-1] + inputs[t]`, elementwise.

    Doubling (Hillis and Steele 1986): after round k each position holds the sum over the 2^k tokens up to it. Decays
    are at most 1 and only multiplied, so nothing overflows.

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
    """Shift `values` [batch, length, ...] by `tokens` positions, filling the front."""
    front = values.new_full((values.shape[0], tokens, *values.shape[2:]), fill)
    return torch.cat([front, values], dim=1).narrow(1, 0, values.shape[1])


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
    """Compute the state space scan of Mamba 2 (Dao and Gu 2024, arXiv:2405.21060), with one decay per head.

    `h[t] = exp(A dt[t]) h[t-1] + dt[t] x[t] B[t]`, `y[t] = h[t] C[t] + D x[t]`. All tokens are one chunk of the paper's
    chunked form (section 6): attention with decays between them, and one product for the initial state. Upstream pads
    to whole chunks of a fixed size, which fixes the length of a traced step.

    Args:
        hidden_states: x, [batch, length, heads, head_dim].
        dt: [batch, length, heads].
        A: [heads], negative.
        B: [batch, length, groups, states], `heads` a multiple of `groups`.
        C: [batch, length, groups, states].
        initial_state: h before the first token, [batch, heads, head_dim, states].
        D: [heads].
        dt_bias: Added to dt, [heads].
        dt_softplus: True to apply softplus to dt then.
        dt_limit: Range that dt of several tokens is clamped to. A single token's is not, as in the step of one token
            upstream, because one method may compute both.

    Returns:
        y [batch, length, heads, head_dim] in float32, and h after the last token.
    """
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    at = torch.arange(hidden_states.shape[1], device=hidden_states.device)
    if not dt_softplus or tuple(dt_limit) != (0.0, float("inf")):
        dt = torch.where(at[-1:] > 0, torch.clamp(dt, min=dt_limit[0], max=dt_limit[1]), dt)
    dt = dt.float()
    groups = hidden_states.shape[2] // B.shape[2]
    # [batch, heads, length, ...]
    x, B, C = [tensor.transpose(1, 2).float() for tensor in (hidden_states, B, C)]
    B, C = B.repeat_interleave(groups, dim=1), C.repeat_interleave(groups, dim=1)
    state, step = initial_state.float(), dt.transpose(1, 2)
    total = (A.float()[None, :, None] * step).cumsum(-1)[..., None]
    later = at[:, None] < at[None, :]
    between = (total - total.transpose(-1, -2)).masked_fill(later, float("-inf")).exp()
    added = x * step[..., None]
    output = ((C @ B.transpose(-1, -2)) * between) @ added + (C * total.exp()) @ state.transpose(-1, -2)
    last = total[..., -1:, :]
    state = last.exp() * state + added.transpose(-1, -2) @ (B * (last - total).exp())
    if D is not None:
        output = output + D[None, :, None, None] * x
    return output.transpose(1, 2).contiguous(), state


def delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    normalize: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the gated delta rule (Yang et al. 2024, arXiv:2412.06464), with decays per head or per channel.

    `S[t] = exp(g[t]) S[t-1] + beta[t] k[t] (v[t] - k[t] exp(g[t]) S[t-1])`, `o[t] = q[t] S[t] / sqrt(dim)`. All tokens
    are one chunk of the chunked form (sections 3.2 and 3.3): attention between them, a triangular system for the update
    of the state, and one product for the initial state. Decays per channel, as in Kimi Delta Attention, take
    length x length x dim memory per head, so keep steps short there.

    Args:
        query: [batch, length, key_heads, dim].
        key: [batch, length, key_heads, dim].
        value: [batch, length, heads, value_dim], `heads` a multiple of `key_heads`.
        decay: g, at most 0: [batch, length, heads], or [batch, length, heads, dim].
        beta: [batch, length, heads].
        initial_state: S before the first token, [batch, heads, dim, value_dim].
        normalize: True to scale queries and keys to length 1.

    Returns:
        o [batch, length, heads, value_dim], and S after the last token.
    """
    dtype, groups = query.dtype, value.shape[2] // key.shape[2]
    query, key, value, beta, decay = [x.transpose(1, 2).float() for x in (query, key, value, beta, decay)]
    if groups > 1:
        query, key = query.repeat_interleave(groups, dim=1), key.repeat_interleave(groups, dim=1)
    if normalize:
        query, key = _normalized(query), _normalized(key)
    query, state = query * query.shape[-1] ** -0.5, initial_state.float()
    key_beta = key * beta[..., None]
    at = torch.arange(query.shape[2], device=query.device)
    later = at[:, None] < at[None, :]
    if decay.dim() == 3:
        total = decay.cumsum(-1)[..., None]
        between = (total - total.transpose(-1, -2)).masked_fill(later, float("-inf")).exp()
        mixing, scores = (key_beta @ key.transpose(-1, -2)) * between, (query @ key.transpose(-1, -2)) * between
    else:
        total = decay.cumsum(-2)
        between = (total[..., :, None, :] - total[..., None, :, :]).masked_fill(later[..., None], float("-inf")).exp()
        mixing, scores = [
            (left[..., :, None, :] * key[..., None, :, :] * between).sum(-1) for left in (key_beta, query)
        ]
    inverse = unit_lower_inverse(mixing)
    added = inverse @ (value * beta[..., None]) - inverse @ (key_beta * total.exp()) @ state
    output = (query * total.exp()) @ state + scores @ added
    last = total[..., -1:, :]
    state = last.transpose(-1, -2).exp() * state + (key * (last - total).exp()).transpose(-1, -2) @ added
    return output.transpose(1, 2).to(dtype), state


def unit_lower_inverse(matrix: torch.Tensor) -> torch.Tensor:
    """Invert lower triangular matrices [..., n, n]; the diagonal is taken as ones and the upper part as zeros.

    Diagonal blocks are merged in pairs, `[[A, 0], [C, D]]^-1 = [[A^-1, 0], [-D^-1 C A^-1, D^-1]]`. This is as stable as
    forward substitution, takes log2(n) rounds of products for a symbolic n, and needs no solver, which few runtimes
    have.
    """
    at = torch.arange(matrix.shape[-1], device=matrix.device)
    inverse = (at[:, None] == at[None, :]).to(matrix.dtype).expand(matrix.shape)
    for round_ in range(doublings(matrix.shape[-1])):
        block = torch.div(at, 2**round_, rounding_mode="floor")
        # Rows of the second block of a pair, columns of the first.
        below = (block[:, None] == block[None, :] + 1) & (torch.remainder(block, 2)[:, None] == 1)
        inverse = inverse - inverse @ torch.where(below, matrix, 0.0) @ inverse
    return inverse


def _normalized(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


class MemoryState(NamedTuple):
    """State of a matrix memory; zeros before the first token.

    Attributes:
        memory: Sum of weighted products of keys and values, [batch, heads, key_dim, value_dim].
        normalizer: Sum of weighted keys, [batch, heads, key_dim].
        largest: Exponent that both were divided by, [batch, heads, 1].
    """

    memory: torch.Tensor
    normalizer: torch.Tensor
    largest: torch.Tensor


def matrix_memory(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gates: tuple[torch.Tensor, torch.Tensor],
    state: MemoryState,
    eps: float,
) -> tuple[torch.Tensor, MemoryState]:
    """Compute the matrix memory of xLSTM (Beck et al. 2024, arXiv:2405.04517, section 2.3).

    `C[t] = f[t] C[t-1] + i[t] k[t] v[t]`, `n[t] = f[t] n[t-1] + i[t] k[t]`, `h = q C / max(|q n|, 1)`. All tokens are
    one chunk: attention with gates between them, and one product for the initial state. Sums are scaled by the same
    exponents as in the sequential form, so that `eps` has the same weight.

    Args:
        query: [batch, heads, length, key_dim].
        key: [batch, heads, length, key_dim].
        value: [batch, heads, length, value_dim].
        gates: Input gate i, an exponent, and forget gate f before its sigmoid, [batch, heads, length] each.
        state: State before the first token.
        eps: Added to the denominator.

    Returns:
        h [batch, heads, length, value_dim] in float32, and the state after the last token.
    """
    query, key, value = query.float() * query.shape[-1] ** -0.5, key.float(), value.float()
    length = query.shape[2]
    entered = gates[0].float()[:, :, None, :]
    total = F.logsigmoid(gates[1].float()).cumsum(-1)[..., None]
    at = torch.arange(length, device=query.device)
    later = at[:, None] < at[None, :]
    # Exponent of the weight of each token (column) at each later token (row).
    between = (total - total.transpose(-1, -2) + entered).masked_fill(later, float("-inf"))
    carried = total + state.largest[..., None]
    largest = torch.maximum(carried, between.amax(-1, keepdim=True))
    between, carried = torch.exp(between - largest), torch.exp(carried - largest)
    weights = (query @ key.transpose(-1, -2)) * between
    numerator = weights @ value + carried * (query @ state.memory)
    norm = weights.sum(-1, keepdim=True) + carried * (query @ state.normalizer[..., None])
    output = numerator / (torch.maximum(norm.abs(), torch.exp(-largest)) + eps)
    kept, left = carried.narrow(2, length - 1, 1), between.narrow(2, length - 1, 1)
    weighted = key * left.transpose(-1, -2)
    return output, MemoryState(
        kept * state.memory + weighted.transpose(-1, -2) @ value,
        kept[..., 0] * state.normalizer + weighted.sum(2),
        largest.narrow(2, length - 1, 1)[..., 0],
    )


#: Largest exponent before the first token; finite, so that differences are finite.
_NOTHING = -1e38


def weighted_values(
    decay: torch.Tensor, bonus: torch.Tensor, key: torch.Tensor, value: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute RWKV's weighted mean of values (Peng et al. 2023, arXiv:2305.13048, section 3.1.2).

    A value has the weight `exp(key)`, decayed per later token; the newest has `exp(bonus + key)`. Sums are divided by
    their largest exponent, so nothing overflows. Computed by doubling, as `linear_recurrence`.

    Args:
        decay: Logarithm of the decay of a weight per token, [channels], negative.
        bonus: [channels].
        key: [batch, length, channels].
        value: [batch, length, channels].
        state: Sum of weighted values, sum of weights, and the exponent that both were divided by, [batch, 3, channels].
            Zeros before the first token.

    Returns:
        Means [batch, length, channels], and the state after the last token.
    """
    key, value = key.float(), value.float()
    # The sum of weights is 0 only before the first token, because it is at least 1 later.
    before = torch.where(state[:, 1:2] == 0, _NOTHING, state[:, 2:3])
    values, weights, largest = value, torch.ones_like(value), key
    for round_ in range(doublings(key.shape[1])):
        tokens = 2**round_
        values, weights, largest = _joined(
            (shifted(values, tokens, 0.0), shifted(weights, tokens, 0.0), shifted(largest, tokens, _NOTHING)),
            decay * tokens,
            (values, weights, largest),
        )
    seen = torch.arange(1, key.shape[1] + 1, device=key.device)[:, None]
    sums = _joined((state[:, 0:1], state[:, 1:2], before), decay * seen, (values, weights, largest))
    # Sums before each token.
    found = [
        torch.cat([first, rest], dim=1).narrow(1, 0, key.shape[1])
        for first, rest in zip((state[:, 0:1], state[:, 1:2], before), sums, strict=True)
    ]
    values, weights, _ = _joined((found[0], found[1], found[2]), 0.0, (value, torch.ones_like(value), key + bonus))
    last = torch.cat([one.narrow(1, key.shape[1] - 1, 1) for one in sums], dim=1)
    return values / weights, last


def _joined(
    earlier: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    decay: torch.Tensor | float,
    later: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add the sums of two ranges of tokens, each with its exponent; `decay` is applied to the earlier one."""
    exponent = earlier[2] + decay
    largest = torch.maximum(exponent, later[2])
    left, right = torch.exp(exponent - largest), torch.exp(later[2] - largest)
    return left * earlier[0] + right * later[0], left * earlier[1] + right * later[1], largest
