"""Every scan against the recurrence it stands for, token by token, in float64."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.export import Dim

from exportable_cache.common.compat.torch_compile import InductorByRanges
from exportable_cache.models.scans import (
    delta_rule,
    doublings,
    linear_recurrence,
    longest_step,
    selective_scan,
    state_space_scan,
    unit_lower_inverse,
)

from ..support.compiling import compiling_with
from ..support.models import among

LENGTHS = (1, 2, 7, 8, 9, 33)
TOLERANCE = 1e-5


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def selective_inputs(length: int) -> tuple[dict, torch.Tensor]:
    """Two rows, three channels, four states."""
    return {
        "hidden_states": random(2, 3, length),
        "dt": random(2, 3, length, seed=1),
        "A": -random(3, 4).exp(),
        "B": random(2, 4, length, seed=2),
        "C": random(2, 4, length, seed=3),
        "D": random(3),
        "z": random(2, 3, length, seed=4),
        "delta_bias": random(3, seed=5),
        "delta_softplus": True,
    }, random(2, 3, 4, seed=6)


def selective_steps(inputs: dict, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, A, B, C, D, z = (inputs[name].double() for name in ("hidden_states", "A", "B", "C", "D", "z"))
    dt = torch.nn.functional.softplus(inputs["dt"].double() + inputs["delta_bias"].double()[:, None])
    state, rows = state.double(), []
    for t in range(x.shape[-1]):
        state = torch.exp(A * dt[..., t, None]) * state + dt[..., t, None] * B[:, None, :, t] * x[..., t, None]
        rows.append(((state * C[:, None, :, t]).sum(-1) + D * x[..., t]) * torch.nn.functional.silu(z[..., t]))
    return torch.stack(rows, -1), state


def state_space_inputs(length: int) -> tuple[dict, torch.Tensor]:
    """Two rows, four heads in two groups, heads of three, five states."""
    return {
        "hidden_states": random(2, length, 4, 3),
        "dt": random(2, length, 4, seed=1),
        "A": -random(4).exp(),
        "B": random(2, length, 2, 5, seed=2),
        "C": random(2, length, 2, 5, seed=3),
        "D": random(4, seed=4),
        "dt_bias": random(4, seed=5),
        "dt_softplus": True,
        "dt_limit": (0.2, 1.5),
    }, random(2, 4, 3, 5, seed=6)


def state_space_steps(inputs: dict, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, A, B, C, D = (inputs[name].double() for name in ("hidden_states", "A", "B", "C", "D"))
    B, C = B.repeat_interleave(2, dim=2), C.repeat_interleave(2, dim=2)
    dt = torch.nn.functional.softplus(inputs["dt"].double() + inputs["dt_bias"].double())
    # The step of one token upstream does not clamp it.
    dt = dt.clamp(*inputs["dt_limit"]) if dt.shape[1] > 1 else dt
    state, rows = state.double(), []
    for t in range(x.shape[1]):
        state = (
            torch.exp(A * dt[:, t])[..., None, None] * state
            + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        )
        rows.append((state * C[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(rows, 1), state


def delta_inputs(length: int, per_channel: bool) -> tuple[dict, torch.Tensor]:
    """Two rows, two key heads of three under four value heads of five."""
    heads = 2 if per_channel else 4
    return {
        "query": random(2, length, 2, 3),
        "key": random(2, length, 2, 3, seed=1),
        "value": random(2, length, heads, 5, seed=2),
        "decay": -random(2, length, *((heads, 3) if per_channel else (heads,)), seed=3).abs(),
        "beta": random(2, length, heads, seed=4).sigmoid(),
        "normalize": True,
    }, random(2, heads, 3, 5, seed=5)


def delta_steps(inputs: dict, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, g, beta = (inputs[name].double() for name in ("query", "key", "value", "decay", "beta"))
    q, k = (x / (x * x).sum(-1, keepdim=True).add(1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    g = g if g.dim() == 4 else g[..., None]
    state, rows = state.double(), []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None]
        error = v[:, t] - (k[:, t, :, :, None] * state).sum(-2)
        state = state + beta[:, t, :, None, None] * k[:, t, :, :, None] * error[:, :, None]
        rows.append((q[:, t, :, :, None] * state).sum(-2) / math.sqrt(q.shape[-1]))
    return torch.stack(rows, 1), state


SCANS = {
    "selective": (selective_scan, selective_inputs, selective_steps, -1),
    "state_space": (state_space_scan, state_space_inputs, state_space_steps, 1),
    "delta": (delta_rule, lambda length: delta_inputs(length, False), delta_steps, 1),
    "delta_per_channel": (delta_rule, lambda length: delta_inputs(length, True), delta_steps, 1),
}


def part(inputs: dict, axis: int, start: int, end: int) -> dict:
    """The inputs of some tokens: every tensor that has them along `axis`."""
    length = inputs.get("hidden_states", inputs.get("query")).shape[axis]
    return {
        name: value.narrow(axis, start, end - start)
        if isinstance(value, torch.Tensor) and value.dim() > 2 and value.shape[axis] == length
        else value
        for name, value in inputs.items()
    }


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", SCANS)
def test_equals_the_recurrence(name: str, length: int) -> None:
    scan, make, steps, _ = SCANS[name]
    inputs, state = make(length)
    for got, expected in zip(scan(**inputs, initial_state=state), steps(inputs, state), strict=True):
        assert got.shape == expected.shape
        assert (got - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", SCANS)
def test_goes_on_from_where_it_stopped(name: str) -> None:
    scan, make, _, axis = SCANS[name]
    inputs, state = make(13)
    whole, last = scan(**inputs, initial_state=state)
    first, between = scan(**part(inputs, axis, 0, 5), initial_state=state)
    second, end = scan(**part(inputs, axis, 5, 13), initial_state=between)
    assert (torch.cat([first, second], axis) - whole).abs().max() < TOLERANCE
    assert (end - last).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", among(SCANS, fast=["state_space", "delta_per_channel"]))
def test_one_graph_serves_every_length(name: str) -> None:
    scan, make, steps, axis = SCANS[name]

    class Module(torch.nn.Module):
        def forward(self, tensors: dict, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with longest_step(40):
                return scan(**tensors, **options, initial_state=state)

    inputs, state = make(12)
    options = {name: value for name, value in inputs.items() if not isinstance(value, torch.Tensor)}
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    length = Dim("length", min=2, max=40)
    shapes = {
        name: {value.dim() + axis if axis < 0 else axis: length} if value.dim() > 2 else None
        for name, value in tensors.items()
    }
    exported = torch.export.export(
        Module(), (tensors, state), dynamic_shapes=(shapes, None), prefer_deferred_runtime_asserts_over_guards=True
    ).module()
    for size in (2, 3, 40):
        inputs, state = make(size)
        given = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        for got, expected in zip(exported(given, state), steps(inputs, state), strict=True):
            assert (got - expected).abs().max() < TOLERANCE


def recurrence_of_eight(decay: torch.Tensor, inputs: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    with longest_step(8):
        return linear_recurrence(decay, inputs, state)


def largest_difference(compiled: Callable[..., torch.Tensor]) -> float:
    """Return how far a compiled recurrence is from the eager one. One row makes concatenations contiguous."""
    found = []
    for length in (5, 8):
        given = random(1, length, 4, 3).sigmoid(), random(1, length, 4, 3, seed=1), random(1, 4, 3)
        found.append((compiled(*given) - recurrence_of_eight(*given)).abs().max().item())
    return max(found)


def test_compiled_rounds_of_doubling_read_no_sum_of_their_own() -> None:
    with compiling_with("inductor"):
        assert largest_difference(torch.compile(recurrence_of_eight, backend=InductorByRanges(None, True))) < TOLERANCE


@pytest.mark.canary
def test_inductor_writes_over_concatenations_that_it_reads() -> None:
    """Fails where torch has mended it: drop `own_buffers`."""
    with compiling_with("inductor"):
        assert largest_difference(torch.compile(recurrence_of_eight, dynamic=True)) > 1e-3


@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_unit_lower_inverse_of_equal_keys(size: int) -> None:
    # Ones below the diagonal: powers of this matrix reach 1e17, its inverse is 1 and -1 beside the diagonal.
    ones = torch.ones(size, size)
    expected = torch.eye(size) - torch.diag(torch.ones(size - 1), -1)
    assert torch.equal(unit_lower_inverse(ones), expected)


def test_the_limit_of_a_step_is_that_of_its_thread() -> None:
    with longest_step(4), ThreadPoolExecutor(1) as other:
        assert doublings(64) == 2
        assert other.submit(doublings, 64).result() == 6
