"""What a completer does when a conversation is longer than its cache, over a list of tokens in place of a model."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from exportable_cache.decoding.context import Context, fitting_turns, protected_tokens
from exportable_cache.errors import InputError

SLOTS, PROTECTED = 64, 6


class Tokens(Context):
    """A context over a list of tokens.

    Attributes:
        tokens: The cached tokens.
        drops: Ranges that were dropped, as count and first position.
        shifts: False for a program without the method.
    """

    def __init__(self, shifts: bool = True) -> None:
        super().__init__()
        self.tokens: list[int] = []
        self.drops: list[tuple[int, int]] = []
        self.shifts = shifts

    @property
    def length(self) -> int:
        """Number of cached tokens."""
        return len(self.tokens)

    @property
    def max_length(self) -> int:
        """Number of slots."""
        return SLOTS

    def most_dropped(self, first: int) -> int:
        """Return the tokens after the first ones, or 0 without the method."""
        return len(self.tokens) - first if self.shifts else 0

    def _drop(self, count: int, first: int, reaching: int = 0) -> None:
        assert 0 < count <= self.most_dropped(first)
        del self.tokens[first : first + count]
        self.drops.append((count, first))

    def _keep(self, count: int) -> int:
        del self.tokens[count:]
        return count

    def feed(self, ids: list[int]) -> int:
        """Feed a prompt, and return the number of tokens that were computed."""
        placed = self.place(ids)
        assert self.tokens == placed.ids[: placed.held]
        self.tokens = list(placed.ids)
        assert len(self.tokens) <= SLOTS
        self._held = list(self.tokens)
        return len(placed.ids) - placed.held

    def generate(self, token: int) -> None:
        """Feed a token of a response."""
        if self.on_full == "shift" and self.is_full:
            self.make_room(self.tokens.extend)
        self.tokens.append(token)
        assert self._held is not None and len(self.tokens) <= SLOTS
        self._held.append(token)


@pytest.mark.parametrize("shifts", [True, False])
def test_a_thousand_turns_fit_and_each_feeds_its_message_only(shifts: bool) -> None:
    """Check that the protected tokens and the newest ones are held in each turn, and what a turn computes."""
    numbers, context = random.Random(0), Tokens(shifts)
    context.use("shift", PROTECTED)
    whole = [numbers.randrange(100) for _ in range(PROTECTED)]
    for _ in range(1000):
        message = [numbers.randrange(100) for _ in range(numbers.randrange(2, 20))]
        whole += message
        computed = context.feed(list(whole))
        if shifts:
            # The newest token of the last response was not fed.
            assert computed <= len(message) + 1 or len(whole) <= SLOTS
        for _ in range(numbers.randrange(1, 30)):
            whole.append(numbers.randrange(100))
            context.generate(whole[-1])
        kept = context.tokens
        assert kept[:PROTECTED] == whole[:PROTECTED]
        assert kept[PROTECTED:] == whole[len(whole) - len(kept) + PROTECTED :]
        assert context.dropped_tokens == len(whole) - len(kept)
    assert bool(context.drops) is shifts


def test_another_conversation_is_fed_from_its_beginning() -> None:
    """Check that what was dropped of one conversation is not left out of the next."""
    context = Tokens()
    context.use("shift", PROTECTED)
    context.feed(list(range(50)))
    context.feed(list(range(80)))
    assert context.dropped_tokens > 0
    context.feed([1, 2, 3])
    assert context.tokens == [1, 2, 3] and context.dropped_tokens == 0


def _encode(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    return [token for message in messages for token in message["content"]]


def _said(start: int, count: int = 10) -> dict[str, Any]:
    """Return a message of the user at an odd hundred, and else of the assistant."""
    return {"role": "user" if start // 100 % 2 else "assistant", "content": list(range(start, start + count))}


@pytest.mark.parametrize("shifts", [True, False])
def test_dropped_turns_leave_the_cache(shifts: bool) -> None:
    """Check that the turns after a dropped one are moved, or fed again by a program that cannot move them."""
    context = Tokens(shifts)
    context.use("drop-turns")
    system, messages = [_said(1000, 5)], [_said(100 * turn) for turn in range(1, 6)]
    context.feed(_encode([*system, *messages]))
    messages += [_said(600), _said(700)]
    ids, dropped = fitting_turns(_encode, context, system, messages, reserve=4)
    assert dropped == 1 and ids == _encode([*system, *messages[2:]])
    assert context.feed(ids) == (20 if shifts else 50)
    assert context.drops == ([(20, 5)] if shifts else [])
    # Turns that were left out before stay out.
    assert fitting_turns(_encode, context, system, messages, 0, dropped).dropped == 1


@pytest.mark.parametrize("dropped", [0, 3])
def test_many_turns_are_dropped_by_few_encodings(dropped: int) -> None:
    """Check conversations of any length against all numbers of turns; each encoding of 100,000 turns takes seconds."""
    numbers, context, calls = random.Random(1), Tokens(), list[int]()
    context.use("drop-turns")

    def encode(given: Sequence[Mapping[str, Any]]) -> list[int]:
        calls.append(len(given))
        return _encode(given)

    for turns in (*range(1, 20), 1000):
        messages = [{"role": "user", "content": [7] * numbers.randrange(1, 30)} for _ in range(turns)]
        calls.clear()
        found = fitting_turns(encode, context, [], messages, 4, dropped)
        fits = (count for count in range(min(dropped, turns - 1), turns) if len(_encode(messages[count:])) + 4 <= SLOTS)
        assert found.dropped == next(fits) and found.ids == _encode(messages[found.dropped :])
        assert len(calls) <= 2 * turns.bit_length() + 1


def test_a_restart_keeps_the_new_message() -> None:
    """Check that all earlier turns are left out once they do not fit, and none before."""
    context = Tokens()
    context.use("restart")
    system, messages = [_said(1000, 5)], [_said(100 * turn) for turn in range(1, 8)]
    assert fitting_turns(_encode, context, system, messages[:5], reserve=4).dropped == 0
    assert fitting_turns(_encode, context, system, messages, reserve=4) == (_encode([*system, messages[-1]]), 3)


def test_policies_are_checked() -> None:
    """Check the messages of an unknown policy and of a system prompt that is too long."""
    with pytest.raises(InputError, match="on_full must be one of refuse, shift, drop-turns, restart, got 'stop'"):
        Tokens().use("stop")
    with pytest.raises(InputError, match="protected must be from 0 to 32, half of a cache of 64 tokens, got 33"):
        Tokens().use("shift", 33)
    context = Tokens()
    context.use("refuse")
    assert context.place(list(range(70))).ids == list(range(70))


def test_protected_tokens_are_counted_once_for_a_system_prompt_and_its_tools() -> None:
    calls: list[str] = []

    def encode(messages: Sequence[Mapping[str, Any]]) -> list[int]:
        calls.append("".join(one["content"] for one in messages))
        return [ord(letter) for letter in calls[-1]]

    known: dict[str, int] = {}
    for prompt, tools, expected, encoded in (("brief", [], 5, 2), ("brief", [], 5, 2), ("long", [], 4, 4)):
        assert protected_tokens(encode, [{"role": "system", "content": prompt}], known, tools) == expected
        assert len(calls) == encoded
    protected_tokens(encode, [{"role": "system", "content": "long"}], known, [{"name": "tool"}])
    assert len(calls) == 6
    for index in range(200):
        protected_tokens(encode, [{"role": "system", "content": str(index)}], known)
    assert len(known) <= 64
