"""Completions by the native runner: those of a session, without torch, and how they end."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exportable_cache import load
from exportable_cache.decoding import Completer, CompletionOptions
from exportable_cache.decoding.native_completion import NativeCompleter
from exportable_cache.errors import InputError
from exportable_cache.generation.checkpoint_settings import CheckpointSettings

from ..support.letters import letter_tokenizer
from ..support.native import require_native, run_native
from . import completion_calls


@pytest.fixture(scope="module")
def native(demo_bundle: Path) -> dict[str, Any]:
    require_native()
    pytest.importorskip("llguidance")
    done = run_native(
        f"import runpy, sys; sys.argv = ['', {str(demo_bundle)!r}]; runpy.run_module({MODULE!r}, run_name='__main__')"
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-3000:]
    return json.loads(done.stdout)


MODULE = completion_calls.__name__


@pytest.fixture(scope="module")
def expected(demo_bundle: Path, native: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(completion_calls.calls(Completer(load(demo_bundle)))))


def test_completions_are_those_of_a_session(native: dict[str, Any], expected: dict[str, Any]) -> None:
    assert native["loaded"] == []
    for name in expected.keys() - {"logprobs", "drawn"}:
        assert native[name] == expected[name], name
    for (logprob, tokens, values), (wanted, known, best) in zip(native["logprobs"], expected["logprobs"], strict=True):
        assert tokens == known
        assert [logprob, *values] == pytest.approx([wanted, *best], abs=1e-4)


def test_draws_are_those_of_their_seed(native: dict[str, Any]) -> None:
    one, again, other = native["drawn"]
    assert one == again != other


class Runner:
    """A session whose generation is a function of the test."""

    vocab_size = 64
    max_length = 40
    drafted_by_default = 0
    has_encoder = False
    layers: list[Any] = []

    def __init__(self, generate: Callable[..., None]) -> None:
        self.settings = CheckpointSettings()
        self.text_tokenizer = letter_tokenizer()
        self.length = 0
        self.cancelled = threading.Event()
        self.asked: list[tuple[int, int]] = []
        self._generate = generate

    def rewind(self, tokens: int) -> None:
        if tokens > 3:
            raise InputError("a ring")
        self.length -= tokens

    def reset(self) -> None:
        self.length = 0

    def cancel(self) -> None:
        self.cancelled.set()

    def generate(self, ids: list[int], on_token: Callable[[int], bool], **options: Any) -> None:
        self.asked.append((len(ids), options["cached_tokens"]))
        assert options["cached_tokens"] == self.length
        self.length = len(ids)
        self._generate(self, on_token)


def give(tokens: list[int]) -> Callable[..., None]:
    def generate(runner: Runner, on_token: Callable[[int], bool]) -> None:
        for index, token in enumerate(tokens):
            if index:
                runner.length += 1
            if not on_token(token):
                return

    return generate


def tokens_of(completer: NativeCompleter, ids: list[int], most: int = 3) -> list[int]:
    return [piece.token for piece in completer.complete(ids, CompletionOptions(max_new_tokens=most))]


def test_only_what_is_new_is_fed() -> None:
    runner = Runner(give([7, 8, 9]))
    completer = NativeCompleter(runner)  # type: ignore[arg-type]
    assert tokens_of(completer, [1, 2, 3, 4]) == [7, 8, 9]
    # The newest token is not held.
    assert completer.length == 6
    tokens_of(completer, [1, 2, 3, 4, 7, 8, 9, 5])
    tokens_of(completer, [1, 2, 3, 4, 7, 8, 9, 5])
    # More than a layer can take back.
    tokens_of(completer, [1, 2, 6])
    assert runner.asked == [(4, 0), (8, 6), (8, 7), (3, 0)]


def test_a_prompt_that_is_given_up_ends_at_once_and_what_was_fed_is_held() -> None:
    begun = threading.Event()

    def waits(runner: Runner, on_token: Callable[[int], bool]) -> None:
        runner.length = 2
        begun.set()
        assert runner.cancelled.wait(20)

    runner = Runner(waits)
    completer = NativeCompleter(runner)  # type: ignore[arg-type]
    given_up = completer.complete([1, 2, 3, 4])
    other = threading.Thread(target=lambda: (begun.wait(20), given_up.give_up()))
    other.start()
    assert next(given_up, None) is None and given_up.finish_reason is None
    other.join()
    runner._generate = give([7])
    assert tokens_of(completer, [1, 2, 3, 4], 1) == [7]
    assert runner.asked == [(4, 0), (4, 2)]
    # Before it begins, nothing is generated that anybody waits for.
    late = completer.complete([1, 2])
    late.give_up()
    assert next(late, None) is None


def test_a_failure_is_raised_and_nothing_is_relied_on_after_it() -> None:
    def fails(runner: Runner, on_token: Callable[[int], bool]) -> None:
        on_token(7)
        raise MemoryError("full")

    runner = Runner(fails)
    completer = NativeCompleter(runner)  # type: ignore[arg-type]
    failing = completer.complete([1, 2])
    assert next(failing).token == 7
    with pytest.raises(MemoryError, match="full"):
        next(failing)
    assert next(failing, None) is None
    runner._generate = give([7])
    tokens_of(completer, [1, 2, 7, 8], 1)
    assert runner.asked == [(2, 0), (4, 0)]


def test_an_encoder_decoder_is_refused() -> None:
    runner = Runner(give([7]))
    runner.has_encoder = True
    with pytest.raises(InputError, match="completions need a text decoder"):
        NativeCompleter(runner)  # type: ignore[arg-type]


def test_closing_ends_what_runs() -> None:
    def endless(runner: Runner, on_token: Callable[[int], bool]) -> None:
        on_token(7)
        assert runner.cancelled.wait(20)

    runner = Runner(endless)
    completer = NativeCompleter(runner)  # type: ignore[arg-type]
    begun = completer.complete([1, 2])
    assert next(begun).token == 7
    completer.close()
    assert runner.cancelled.is_set() and not any(one.name == "generation" for one in threading.enumerate())
