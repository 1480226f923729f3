"""The decode loop over a scripted model: what is fed when, and what ends it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest
import torch

from exportable_cache.decoding import Sampler, Sampling, generate_tokens

from .byte_tokenizer import END, SIZE, byte_tokenizer

PROMPT = torch.zeros(1, 2, dtype=torch.int64)


def chooser(prompt: torch.Tensor) -> Sampler:
    return Sampler(Sampling(), prompt, SIZE)


class Scripted:
    """Gives the tokens of a script, one list per row, and records what it is fed."""

    device = torch.device("cpu")
    steps_per_launch = 1
    moves = 0
    # Nothing is taken back: rows that have ended go on over padding.
    least_rollback = ("layer 0", 0)

    def __init__(self, script: Sequence[Sequence[int]], room: int | None = None) -> None:
        self.script = torch.tensor(script)
        self.tokenizer = byte_tokenizer()
        self.fed: list[list[int]] = []
        self.room = room

    def prefill(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.room is not None:
            self.room -= input_ids.shape[1]
        return torch.nn.functional.one_hot(self.script[:, len(self.fed)], SIZE).float()

    def decode_and_choose(self, tokens: torch.Tensor, chooser: Sampler, steps: int) -> torch.Tensor:
        assert steps == 1
        self.fed.append(tokens.tolist())
        return chooser.choose(self.prefill(tokens[:, None]))[:, None]

    @property
    def stepper(self) -> Scripted:
        return self

    def guarded(self, begin: Callable[[], Generator[Any]]) -> Generator[Any]:
        return begin()

    def equal_steps(self, active: torch.Tensor) -> int:
        return 1

    def shift(self, tokens: int) -> None:
        assert tokens == 0


def run(
    session: Scripted, limit: int | None = None, ends: Sequence[int] = (), strings: Sequence[str] = ()
) -> list[list[int]]:
    prompt = torch.zeros(session.script.shape[0], 2, dtype=torch.int64)
    return [
        step.tolist() for step in generate_tokens(session, prompt, limit, chooser(prompt), ends, strings, pad_token=99)
    ]


def test_limit_ends_and_the_last_token_is_not_fed() -> None:
    session = Scripted([[5, 6, 7, 8]])
    assert run(session, limit=3) == [[5], [6], [7]]
    assert session.fed == [[5], [6]]


def test_nothing_runs_before_it_is_asked_for() -> None:
    session = Scripted([[5, 6, 7]])
    steps = generate_tokens(session, PROMPT, None, chooser(PROMPT), ())
    assert next(steps).tolist() == [5]
    assert session.fed == []
    assert next(steps).tolist() == [6]
    assert session.fed == [[5]]


def test_a_stop_string_that_names_a_special_token_ends_with_it() -> None:
    tokenizer = byte_tokenizer()
    tokens = tokenizer(f"ab{END}cd")["input_ids"]
    for strings, count in (([END], 3), ([f"b{END}"], 3), ([f"{END}c"], 4), (["bc"], 4)):
        assert run(Scripted([tokens]), strings=strings) == [[token] for token in tokens[:count]]


def test_end_token_is_given_and_ends() -> None:
    session = Scripted([[5, 6, 7, 8]])
    assert run(session, limit=10, ends={6, 8}) == [[5], [6]]


def test_full_cache_ends() -> None:
    # Two of five slots go to the prompt, three to tokens; the last token needs none.
    assert run(Scripted([[5, 6, 7, 8, 9]], room=5)) == [[5], [6], [7], [8]]


def test_rows_end_on_their_own_and_are_padded() -> None:
    session = Scripted([[5, 2, 6, 7, 8], [5, 6, 7, 2, 8], [2, 5, 5, 5, 5]])
    assert run(session, limit=10, ends={2}) == [[5, 5, 2], [2, 6, 99], [99, 7, 99], [99, 2, 99]]


@pytest.mark.parametrize("stop", ["lo", "hello", "é"])
def test_stop_string_ends_with_the_token_that_completes_it(stop: str) -> None:
    text = "hello, é!"
    tokens = byte_tokenizer()(text)["input_ids"]
    expected = len(text[: text.index(stop) + len(stop)].encode())
    assert run(Scripted([tokens]), limit=10, strings=[stop]) == [[token] for token in tokens[:expected]]


def test_stop_strings_are_looked_for_per_row() -> None:
    encode = byte_tokenizer()
    rows = [encode("ab..")["input_ids"], encode("xaab")["input_ids"]]
    assert run(Scripted(rows), limit=4, strings=["ab"]) == [
        [rows[0][0], rows[1][0]], [rows[0][1], rows[1][1]], [99, rows[1][2]], [99, rows[1][3]]
    ]  # fmt: skip
