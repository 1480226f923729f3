"""Drawing in C++: the same distribution as in Python, and the same draws for the same seed."""

from dataclasses import replace

import pytest
import torch

from exportable_cache import load
from exportable_cache.decoding import Completer, CompletionOptions, Sampling, sorted_distribution
from exportable_cache.generation.sampling_options import SamplingOptions

from .conftest import Probe, ids

LOGITS = torch.tensor([[2.0, 0.5, 1.5, -1.0, 1.5, -3.0, 0.0, 1.0]])
DRAWS = 20_000


def sample(*options: str, count: int = DRAWS, logits: torch.Tensor = LOGITS) -> tuple:
    return ("sample", " ".join(repr(value) for value in logits[0].tolist()), count, *options)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.0, "top_k": 100},
        {"temperature": 2.0, "top_p": 0.7},
        {"temperature": 1.0, "top_p": 0.0001},
        {"temperature": 1.0, "top_p": 1.0},
        {"temperature": 0.7, "top_k": 4, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.25},
        {"temperature": 1.5, "min_p": 0.5, "top_k": 6, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 1.0},
    ],
)
def test_frequencies_are_the_probabilities(probe: Probe, options: dict[str, float]) -> None:
    draws = probe(sample(*(f"{name}={value}" for name, value in options.items()), "seed=11"))[0].tokens()
    counts = torch.bincount(torch.tensor(draws), minlength=8)
    probabilities, tokens = sorted_distribution(LOGITS, Sampling(**options).settings())
    expected = torch.zeros(8).scatter(0, tokens[0], probabilities[0])
    assert not counts[expected == 0].any() and counts[expected > 1e-2].all()
    # Five standard deviations of a binomial count.
    assert ((counts / DRAWS - expected).abs() <= 5 * (expected * (1 - expected) / DRAWS).sqrt() + 1e-9).all()


def test_greedy_takes_the_first_of_the_largest(probe: Probe) -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    assert probe(sample(count=3, logits=logits))[0].tokens() == [1, 1, 1]


def test_tiny_temperature_is_greedy_and_minus_infinity_is_never_drawn(probe: Probe) -> None:
    logits = torch.tensor([[-torch.inf, 1.0, 1.5, -torch.inf]])
    cold, warm = probe(
        sample("temperature=1e-300", "seed=1", logits=logits), sample("temperature=100", "seed=1", logits=logits)
    )
    assert set(cold.tokens()) == {2}
    assert set(warm.tokens()) == {1, 2}


def test_a_seed_repeats_across_processes_and_another_differs(demo_bundle, probe: Probe) -> None:
    def generate(seed: int) -> list[int]:
        options = ("temperature=1.5", "top_p=0.95", f"seed={seed}", "max_new_tokens=30")
        return probe(("open", demo_bundle), ("generate", ids([30, 40, 50, 60]), *options))[1].tokens()

    first = generate(3)
    assert generate(3) == first
    assert generate(4) != first


def test_draws_of_a_seed_are_what_they_were(probe: Probe) -> None:
    # std::mt19937_64 and the arithmetic after it are the same everywhere: these must not change.
    assert probe(sample("temperature=1", "seed=5489", count=12))[0].tokens() == EXPECTED


# The 12 first outputs of mt19937_64 with its default seed, 5489, as numbers in [0, 1), looked up in the running sum of
# the softmax of LOGITS: made by `_reference`.
def _reference() -> list[int]:
    state = [5489]
    for index in range(1, 312):
        state.append((6364136223846793005 * (state[-1] ^ (state[-1] >> 62)) + index) % 2**64)
    for index in range(312):
        bits = (state[index] & 0xFFFFFFFF80000000) | (state[(index + 1) % 312] & 0x7FFFFFFF)
        state[index] = state[(index + 156) % 312] ^ (bits >> 1) ^ (0xB5026F5AA96619E9 if bits & 1 else 0)
    sums = LOGITS[0].double().softmax(-1).cumsum(-1)
    tokens = []
    for value in state[:12]:
        value ^= (value >> 29) & 0x5555555555555555
        value ^= (value << 17) & 0x71D67FFFEDA60000
        value ^= (value << 37) & 0xFFF7EEE000000000
        value ^= value >> 43
        tokens.append(
            int(torch.searchsorted(sums, torch.tensor((value >> 11) * 2.0**-53, dtype=torch.float64), right=True))
        )
    return tokens


EXPECTED = _reference()


@pytest.mark.parametrize("repetition", [None, 1.3])
def test_additions_to_logits_are_those_of_a_session(demo_bundle, probe: Probe, repetition: float | None) -> None:
    """Greedy tokens depend on the additions: a bias, a penalty once for a generated token, and one for each time."""
    prompt, bias = [5, 6, 7, 8, 9], {7: 4.0, 11: -2.5}
    completer = Completer(load(demo_bundle))
    options = CompletionOptions(max_new_tokens=24, logit_bias=bias, presence_penalty=0.75, frequency_penalty=1.5)
    if repetition is not None:
        options = replace(options, sampling=SamplingOptions(repetition_penalty=repetition))
    expected = [piece.token for piece in completer.complete(prompt, options)]
    fields = [f"bias={token}:{value}" for token, value in bias.items()]
    fields += ["presence_penalty=0.75", "frequency_penalty=1.5"]
    fields += [] if repetition is None else [f"repetition_penalty={repetition}"]
    replies = probe(
        ("open", demo_bundle),
        ("generate", ids(prompt), "max_new_tokens=24", *fields),
        ("reset",),
        # The tokens of an earlier call count where they are named.
        ("generate", ids(prompt), "max_new_tokens=9", *fields),
        ("generate", ids([expected[8]]), "max_new_tokens=15", f"counted={ids(expected[:9])}", *fields),
        ("reset",),
        ("generate", ids(prompt), "max_new_tokens=24"),
    )
    assert replies[1].tokens() == expected
    if repetition is None:
        assert replies[3].tokens() + replies[4].tokens() == expected
    assert replies[6].tokens() != expected


@pytest.mark.parametrize(
    "option",
    [
        "bias=-1:1",
        "bias=100000:1",
        "bias=5:nan",
        "bias=5:1e308",
        "counted=-1",
        "presence_penalty=inf",
        "frequency_penalty=nan",
    ],
)
def test_wrong_additions_are_refused(demo_bundle, probe: Probe, option: str) -> None:
    reply = probe(("open", demo_bundle), ("generate", "5 6", option))[1]
    assert (reply.ok, reply.values[0]) == (False, "input")
    assert option.split("=")[0].replace("bias", "logit_bias") in reply.values[1]
