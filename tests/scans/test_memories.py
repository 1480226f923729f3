"""RWKV's weighted mean and xLSTM's matrix memory against their recurrences, token by token, in float64."""

import pytest
import torch

from exportable_cache.models.scans import MemoryState, matrix_memory, weighted_values

from .test_scans import LENGTHS, TOLERANCE, random

EPS = 1e-6


def mean_steps(decay, bonus, key, value, state):
    """The sums as they are, with nothing taken out of them."""
    scale = state[:, 2].double().exp()
    values, weights, rows = state[:, 0].double() * scale, state[:, 1].double() * scale, []
    for at in range(key.shape[1]):
        k, v = key[:, at].double(), value[:, at].double()
        own = (k + bonus.double()).exp()
        rows.append((values + own * v) / (weights + own))
        left = decay.double().exp()
        values, weights = left * values + k.exp() * v, left * weights + k.exp()
    return torch.stack(rows, 1), values, weights


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("is_new", [True, False])
def test_weighted_values(length: int, is_new: bool) -> None:
    decay, bonus = -random(3).exp(), random(3, seed=1)
    key, value = 4 * random(2, length, 3, seed=2), random(2, length, 3, seed=3)
    state = torch.zeros(2, 3, 3) if is_new else random(2, 3, 3, seed=4).abs() + 1
    means, last = weighted_values(decay, bonus, key, value, state)
    expected, values, weights = mean_steps(decay, bonus, key, value, state)
    assert (means - expected).abs().max() <= TOLERANCE
    scale = last[:, 2].double().exp()
    assert (last[:, 0] * scale / values - 1).abs().max() <= 1e-4
    assert (last[:, 1] * scale / weights - 1).abs().max() <= 1e-4


def test_weighted_values_of_large_keys_are_finite() -> None:
    """A first key of -300 has a weight that float32 has no number for, and it is all there is."""
    key = torch.full((1, 4, 2), -300.0)
    key[:, 2] = 300.0
    means, last = weighted_values(-torch.ones(2), torch.zeros(2), key, torch.ones(1, 4, 2), torch.zeros(1, 3, 2))
    assert torch.isfinite(last).all() and (means - 1).abs().max() <= TOLERANCE


def memory_steps(query, key, value, gates, state):
    memory, normalizer, largest = (one.double() for one in state)
    rows, scaled = [], query.double() * query.shape[-1] ** -0.5
    for at in range(query.shape[2]):
        entered = gates[0][:, :, at, None].double()
        left = torch.nn.functional.logsigmoid(gates[1][:, :, at, None].double())
        before, largest = largest, torch.maximum(left + largest, entered)
        left, entered = (left + before - largest).exp(), (entered - largest).exp()
        k, v, q = (one[:, :, at].double() for one in (key, value, scaled))
        memory = left[..., None] * memory + entered[..., None] * k[..., :, None] * v[..., None, :]
        normalizer = left * normalizer + entered * k
        norm = (q * normalizer).sum(-1, keepdim=True).abs()
        rows.append((q[..., None, :] @ memory)[..., 0, :] / (torch.maximum(norm, (-largest).exp()) + EPS))
    return torch.stack(rows, 2), (memory, normalizer, largest)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("is_new", [True, False])
def test_matrix_memory(length: int, is_new: bool) -> None:
    query, key = random(2, 3, length, 4), random(2, 3, length, 4, seed=1)
    value = random(2, 3, length, 5, seed=2)
    gates = (3 * random(2, 3, length, seed=3), 3 * random(2, 3, length, seed=4))
    state = MemoryState(random(2, 3, 4, 5), random(2, 3, 4), random(2, 3, 1))
    if is_new:
        state = MemoryState(*map(torch.zeros_like, state))
    output, last = matrix_memory(query, key, value, gates, state, EPS)
    expected, after = memory_steps(query, key, value, gates, state)
    assert (output - expected).abs().max() <= 1e-4
    for found, wanted in zip(last, after, strict=True):
        assert (found - wanted).abs().max() <= TOLERANCE
