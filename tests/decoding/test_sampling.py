"""Sampling: exact sets, exact repeats, and refusals."""

from __future__ import annotations

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from exportable_cache.decoding import Sampling, check_seed, draw, penalise, sample, sorted_distribution
from exportable_cache.errors import InputError
from exportable_cache.generation.sampling import SamplingSettings

# Probabilities 0.5, 0.3, 0.15, 0.05, not in order.
LOGITS = torch.tensor([[0.15, 0.5, 0.05, 0.3]]).log()


def kept(**options: float) -> list[int]:
    probabilities, tokens = sorted_distribution(LOGITS, Sampling(temperature=1.0, **options).settings())
    assert probabilities.sum().item() == pytest.approx(1.0)
    return sorted(tokens[0, probabilities[0] > 0].tolist())


def drawn(count: int, **options: float) -> set[int]:
    generator = torch.Generator().manual_seed(0)
    return set(sample(LOGITS.repeat(count, 1), temperature=1.0, generator=generator, **options).tolist())


def test_greedy_takes_the_largest_of_each_row() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, -1.0, 4.0]])
    assert sample(logits).tolist() == [1, 0]
    assert sample(logits).dtype == torch.int64


@pytest.mark.parametrize(
    ("top_k", "expected"), [(1, [1]), (2, [1, 3]), (3, [0, 1, 3]), (4, [0, 1, 2, 3]), (9, [0, 1, 2, 3])]
)
def test_top_k_keeps_the_k_largest(top_k: int, expected: list[int]) -> None:
    assert kept(top_k=top_k) == expected
    assert drawn(2000, top_k=top_k) == set(expected)


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [(0.01, [1]), (0.49, [1]), (0.51, [1, 3]), (0.79, [1, 3]), (0.81, [0, 1, 3]), (1.0, [0, 1, 2, 3])],
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, expected: list[int]) -> None:
    assert kept(top_p=top_p) == expected
    assert drawn(2000, top_p=top_p) == set(expected)


def test_top_p_that_is_reached_exactly_keeps_no_more() -> None:
    probabilities, _ = sorted_distribution(torch.zeros(1, 4), Sampling(temperature=1.0, top_p=0.5).settings())
    assert probabilities.tolist() == [[0.5, 0.5, 0.0, 0.0]]


@pytest.mark.parametrize(("min_p", "expected"), [(0.0, [0, 1, 2, 3]), (0.2, [0, 1, 3]), (0.5, [1, 3]), (1.0, [1])])
def test_min_p_keeps_those_near_the_most_probable(min_p: float, expected: list[int]) -> None:
    assert kept(min_p=min_p) == expected
    assert drawn(2000, min_p=min_p) == set(expected)


def test_the_penalty_is_transformers_own() -> None:
    logits = torch.tensor([[1.5, -2.0, 0.5, -0.1], [0.3, 0.2, -0.7, 4.0]])
    ids = torch.tensor([[0, 1], [3, 3]])
    seen = torch.zeros(2, 4, dtype=torch.bool).scatter(1, ids, True)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(ids, logits.clone())
    torch.testing.assert_close(penalise(logits, seen, torch.tensor(1.3)), expected)
    assert Sampling(repetition_penalty=100.0).choose(logits, seen=seen).tolist() == [2, 0]


def test_draws_are_the_inverse_of_the_cumulative_distribution() -> None:
    probabilities, tokens = torch.tensor([[0.5, 0.25, 0.25, 0.0]]), torch.tensor([[7, 5, 6, 4]])
    for uniform, token in ((0.0, 7), (0.499, 7), (0.5, 5), (0.749, 5), (0.75, 6), (1.0, 6)):
        assert draw(probabilities, tokens, torch.tensor([uniform])).tolist() == [token]


def test_one_graph_serves_all_settings() -> None:
    torch._dynamo.reset()
    step = torch.compile(
        lambda logits, u, *s: draw(*sorted_distribution(logits, SamplingSettings(*s)), u), backend="eager"
    )
    logits, uniform = torch.randn(3, 50), torch.rand(3)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for options in (
            {"temperature": 0.5},
            {"temperature": 1.0, "top_k": 3},
            {"temperature": 2.0, "top_p": 0.4, "min_p": 0.1},
        ):
            settings = Sampling(**options).settings()
            assert (
                step(logits, uniform, *settings).tolist()
                == draw(*sorted_distribution(logits, settings), uniform).tolist()
            )


def test_top_p_counts_after_top_k() -> None:
    # Of the two kept by top_k the first has 0.625: alone it reaches 0.6, in the full distribution it would not.
    assert drawn(2000, top_k=2, top_p=0.6) == {1}
    assert drawn(2000, top_p=0.6) == {1, 3}


def test_draws_follow_the_probabilities() -> None:
    tokens = sample(LOGITS.repeat(20000, 1), temperature=1.0, generator=torch.Generator().manual_seed(1))
    shares = torch.bincount(tokens, minlength=4) / 20000
    assert torch.allclose(shares, LOGITS.exp()[0], atol=0.02)


def test_temperature_sharpens() -> None:
    tokens = sample(LOGITS.repeat(20000, 1), temperature=0.5, generator=torch.Generator().manual_seed(1))
    squared = LOGITS.exp()[0] ** 2
    assert torch.allclose(torch.bincount(tokens, minlength=4) / 20000, squared / squared.sum(), atol=0.02)


def test_tiny_temperature_is_greedy_not_infinite() -> None:
    logits = torch.tensor([[3e4, 2e4, -3e4]], dtype=torch.float16)
    assert sample(logits, temperature=1e-30).tolist() == [0]


# 1e-45 is the least float32, 5e-324 the least float64 above zero: their inverses are infinite in the same format.
@pytest.mark.parametrize("temperature", [1e-37, 1e-39, 1e-45, 1e-300, 5e-324])
@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.5}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_any_temperature_above_zero_draws_the_largest(temperature: float, options: dict, dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -torch.inf], [5.0, -1.0, 4.0, 4.875]], dtype=dtype)
    for _ in range(5):
        assert sample(logits, temperature=temperature, **options).tolist() == [1, 0]


def test_seed_repeats_and_other_seed_differs() -> None:
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0))

    def draws(seed: int) -> list[int]:
        sampling = Sampling(temperature=1.0, seed=seed)
        generator = sampling.generator()
        return [int(sampling.choose(logits, generator)[0]) for _ in range(10)]

    assert draws(3) == draws(3)
    assert draws(3) != draws(4)
    assert len(set(draws(3))) > 1


@pytest.mark.parametrize("seed", [-(2**63), 2**64 - 1])
def test_seeds_at_the_limits_are_what_torch_takes(seed: int) -> None:
    check_seed(seed)
    assert Sampling(temperature=1.0, seed=seed).generator().initial_seed() % 2**64 == seed % 2**64
    with pytest.raises((RuntimeError, ValueError, OverflowError)):
        torch.Generator().manual_seed(seed + (1 if seed > 0 else -1))


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"temperature": -0.5}, ["temperature", "-0.5", "at least 0"]),
        ({"temperature": float("nan")}, ["temperature", "nan"]),
        ({"temperature": float("inf")}, ["temperature", "inf"]),
        ({"temperature": "hot"}, ["temperature", "'hot'"]),
        ({"temperature": 1.0, "top_k": 0}, ["top_k", "0", "at least 1"]),
        ({"temperature": 1.0, "top_k": 2.5}, ["top_k", "2.5"]),
        ({"temperature": 1.0, "top_p": 0.0}, ["top_p", "0.0", "above 0"]),
        ({"temperature": 1.0, "top_p": 1.01}, ["top_p", "1.01", "at most 1"]),
        ({"temperature": 1.0, "min_p": 1.5}, ["min_p", "1.5", "from 0 to 1"]),
        ({"repetition_penalty": 0.0}, ["repetition_penalty", "0.0", "above 0"]),
        ({"min_p": 0.1}, ["got 0, which is greedy", "min_p=0.1"]),
        ({"seed": 1.5}, ["seed", "1.5"]),
        ({"seed": 2**70}, ["seed", str(2**70), str(2**64 - 1)]),
        ({"seed": -(2**63) - 1}, ["seed", str(-(2**63) - 1)]),
        ({"seed": True}, ["seed", "True"]),
        ({"top_p": 0.9}, ["got 0, which is greedy", "top_p=0.9"]),
        ({"top_k": 5}, ["got 0, which is greedy", "top_k=5"]),
    ],
)
def test_out_of_range_is_refused(options: dict, parts: list[str]) -> None:
    with pytest.raises(InputError) as error:
        Sampling(**options)
    assert all(part in str(error.value) for part in parts), str(error.value)
