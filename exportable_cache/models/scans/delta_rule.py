"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464), decays per head or, as in Kimi Delta Attention, per
channel.
"""

from __future__ import annotations

import torch

from .bound import doublings


def delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    normalize: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`S[t] = exp(g[t]) S[t-1] + beta[t] k[t] (v[t] - k[t] exp(g[t]) S[t-1])`, `o[t] = q[t] S[t] / sqrt(dim)`.

    All tokens are one chunk of the chunked form (sections 3.2 and 3.3 of the paper): attention between them, a
    triangular system for what each adds to the state, and one product for what the state gave before. Per channel, it
    keeps length x length x dim decays per head, so keep steps short there.

    Args:
        query: [batch, length, key_heads, dim].
        key: [batch, length, key_heads, dim].
        value: [batch, length, heads, value_dim], `heads` a multiple of `key_heads`.
        decay: g, at most 0: [batch, length, heads], or [batch, length, heads, dim].
        beta: [batch, length, heads].
        initial_state: S before the first token, [batch, heads, dim, value_dim].
        normalize: Whether queries and keys are scaled to length 1.

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
    """Inverse of a lower triangular matrix [..., n, n] whose diagonal counts as ones and whose upper part as zeros.

    Diagonal blocks are merged two by two, `[[A, 0], [C, D]]^-1 = [[A^-1, 0], [-D^-1 C A^-1, D^-1]]`: as stable as
    forward substitution, in log2(n) rounds of products, for an n that need not be known, and without a solver, which
    few runtimes have.
    """
    at = torch.arange(matrix.shape[-1], device=matrix.device)
    inverse = (at[:, None] == at[None, :]).to(matrix.dtype).expand(matrix.shape)
    for round_ in range(doublings(matrix.shape[-1])):
        block = torch.div(at, 2**round_, rounding_mode="floor")
        # Rows of the second of two neighbouring blocks, columns of the first.
        below = (block[:, None] == block[None, :] + 1) & (torch.remainder(block, 2)[:, None] == 1)
        inverse = inverse - inverse @ torch.where(below, matrix, 0.0) @ inverse
    return inverse


def _normalized(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
