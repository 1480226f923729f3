"""The tokens that a completer holds, and what it does with a conversation that is longer than its cache."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from hashlib import sha256
from typing import Any, NamedTuple

from ..common.settings import check_choice
from ..errors import InputError
from ..session.checks import PROTECTED, check_protected

#: What may happen when the cache is full: an error or the end of the response; dropping the oldest tokens after the
#: protected ones; dropping the oldest turns; or dropping all earlier turns.
ON_FULL = ("refuse", "shift", "drop-turns", "restart")
#: Fewest tokens that are moved instead of fed again.
_LEAST_MOVED = 8
#: Number of system prompts whose protected tokens are kept.
_MOST_KNOWN = 64


class Placed(NamedTuple):
    """A prompt in the form that is fed.

    Attributes:
        ids: Its token ids, without those that were dropped.
        held: Number of its first tokens that the session holds already.
    """

    ids: list[int]
    held: int


class Context(ABC):
    """The tokens of one session, which drops old ones by a policy.

    Attributes:
        on_full: One of `ON_FULL`. Turns are dropped by `fitting_turns`, which the caller of `complete` uses.
        protected: Number of first tokens that stay, such as a system prompt.
        dropped_tokens: Number of tokens of the conversation that were dropped by shifts.
    """

    def __init__(self) -> None:
        self.on_full, self.protected = "refuse", PROTECTED
        # Tokens that the session holds; None while they are not known.
        self._held: list[int] | None = None
        # The beginning of the conversation up to the last dropped token.
        self._gone: list[int] = []

    @property
    @abstractmethod
    def length(self) -> int:
        """Number of tokens that the session holds."""

    @property
    @abstractmethod
    def max_length(self) -> int | None:
        """The limit of tokens that the session can hold; None for no limit."""

    def most_dropped(self, first: int) -> int:
        """Return the most held tokens that can be dropped from position `first` on; 0 if the program cannot."""
        return 0

    def _drop(self, count: int, first: int, reaching: int = 0) -> None:
        """Drop held tokens.

        Args:
            count: Number of tokens to drop.
            first: Number of tokens before them.
            reaching: Length of the prompt that is fed next, which chooses the factors of RoPE; 0 for the kept length.
        """
        raise NotImplementedError

    def _keep(self, count: int) -> int:
        """Take back all but the first `count` held tokens, and return how many are left: `count`, or 0."""
        raise NotImplementedError

    @property
    def is_full(self) -> bool:
        """True if the session cannot hold another token."""
        return self.max_length is not None and self.length >= self.max_length

    @property
    def dropped_tokens(self) -> int:
        """See `Context`."""
        return max(0, len(self._gone) - self.protected)

    def use(self, on_full: str, protected: int = PROTECTED) -> None:
        """Set the policy for a full cache.

        Args:
            on_full: One of `ON_FULL`.
            protected: Number of first tokens that shifts keep.

        Raises:
            InputError: If the policy is unknown, or the protected tokens fill more than half of the cache.
        """
        check_choice("on_full", on_full, ON_FULL)
        most = self.max_length
        if on_full == "shift" and most is not None:
            check_protected(protected, most)
        if protected != self.protected:
            self._gone = []
        self.on_full, self.protected = on_full, protected

    def common(self, ids: Sequence[int]) -> int | None:
        """Return the number of a prompt's first tokens that the session holds, or None if its tokens are not known."""
        held = self._held
        if held is None or len(held) != self.length:
            return None
        # The last token is always fed, because its logits are needed.
        most = min(len(held), len(ids) - 1)
        return next((index for index in range(most) if held[index] != ids[index]), most)

    def place(self, ids: list[int]) -> Placed:
        """Move the session to the common beginning with a prompt, and make room for the rest of it.

        Args:
            ids: Token ids of the whole prompt.
        """
        first, most = self.protected, self.max_length
        if self.on_full == "drop-turns":
            self._align(ids)
        if self.on_full != "shift" or most is None:
            return Placed(ids, self._keep(self.common(ids) or 0))
        whole, gone = ids, len(self._gone)
        if whole[:gone] == self._gone and gone < len(whole):
            ids = whole[:first] + whole[gone:] if gone else whole
        else:
            self._gone, gone = [], 0
        held = self._keep(self.common(ids) or 0)
        self._held = ids[:held]
        over = len(ids) - most
        if over <= 0:
            return Placed(ids, held)
        # Half of what is not protected, so that the next shift is not soon.
        count = max(over, (most - first) // 2)
        if held - first >= over and self.most_dropped(first) >= over:
            count = min(count, held - first, self.most_dropped(first))
            self._drop(count, first, len(ids) - count)
            held, ids = held - count, ids[:first] + ids[first + count :]
        else:
            ids = ids[:first] + ids[first + count :]
            # Once more, because keys of the longer prompt may have other factors of RoPE.
            held = self._keep(min(held, first, self.common(ids) or 0))
        self._gone = whole[: max(gone, first) + count]
        self._held = None
        return Placed(ids, held)

    def make_room(self, feed: Callable[[list[int]], Any]) -> None:
        """Drop half of the held tokens that are not protected, in the middle of a response.

        Args:
            feed: Feeds tokens at position 0; called where the program cannot shift.
        """
        held, first = self._held, self.protected
        if held is None or len(held) - first < 2:
            raise InputError(f"a cache of {self.max_length} tokens is too small for {first} protected ones; enlarge it")
        count, most = (len(held) - first) // 2, self.most_dropped(first)
        kept_known, self._held = held, None
        if most >= 1:
            count = min(count, most)
            self._drop(count, first)
        else:
            self._keep(0)
            feed(held[:first] + held[first + count :])
        self._gone = (self._gone or held[:first]) + kept_known[first : first + count]
        self._held = held[:first] + held[first + count :]

    def _align(self, ids: list[int]) -> None:
        """Drop the held tokens that a prompt lacks, if those after them follow in it."""
        held, start = self._held, self.common(ids)
        if held is None or start is None or start == min(len(held), len(ids) - 1):
            return
        for count in range(1, len(held) - start - _LEAST_MOVED + 1):
            if held[start + count] != ids[start]:
                continue
            tail = held[start + count :]
            if ids[start : start + len(tail)] == tail and len(tail) < len(ids) - start:
                if count <= self.most_dropped(start):
                    self._drop(count, start, len(ids))
                    self._held = held[:start] + tail
                return


class Fitting(NamedTuple):
    """A conversation that fits the cache.

    Attributes:
        ids: Its token ids.
        dropped: Number of turns, of a question and its response, that are left out.
    """

    ids: list[int]
    dropped: int


def fitting_turns(
    encode: Callable[[Sequence[Mapping[str, Any]]], list[int]],
    context: Context,
    system: Sequence[Mapping[str, Any]],
    messages: Sequence[Mapping[str, Any]],
    reserve: int,
    dropped: int = 0,
) -> Fitting:
    """Return the token ids of a conversation, without the oldest turns if the policy drops turns.

    A turn begins with a message of the user, and has the calls and results of tools after it.

    Args:
        encode: Encodes messages.
        context: What holds the tokens.
        system: Messages that stay.
        messages: The messages after these.
        reserve: Number of tokens to leave for the response.
        dropped: Number of turns that were left out before.
    """
    starts = [index for index, message in enumerate(messages) if message.get("role") == "user"]
    turns, most = max(0, len(starts) - 1), context.max_length
    drops = context.on_full in ("drop-turns", "restart") and most is not None
    dropped = min(dropped, turns) if drops else 0

    def without(count: int) -> tuple[list[int], bool]:
        ids = encode([*system, *messages[starts[count] if count else 0 :]])
        return ids, most is None or len(ids) + min(reserve, most // 2) <= most

    ids, fits = without(dropped)
    if fits or not drops or dropped == turns:
        return Fitting(ids, dropped)
    if context.on_full == "restart":
        return Fitting(without(turns)[0], turns)
    # The step doubles, because each try encodes the conversation, which can have 100,000 turns.
    few, step = dropped, 1
    while not fits and dropped < turns:
        few, dropped, step = dropped, min(dropped + step, turns), 2 * step
        ids, fits = without(dropped)
    while dropped - few > 1:
        between = (few + dropped) // 2
        found, fits = without(between)
        if fits:
            dropped, ids = between, found
        else:
            few = between
    return Fitting(ids, dropped)


def protected_tokens(
    encode: Callable[[Sequence[Mapping[str, Any]]], list[int]],
    system: Sequence[Mapping[str, Any]],
    known: dict[str, int] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> int:
    """Return the number of first tokens of each conversation with a system prompt: what two beginnings share.

    Args:
        encode: Encodes messages.
        system: The system prompt.
        known: Results of earlier calls, which this one reads and adds to; at most 64 are kept.
        tools: Tools that `encode` describes to the model, of which the result depends, too.
    """
    # With the day, because some templates write it, and with the order of keys, because they write tools as given.
    text = json.dumps([str(date.today()), list(system), list(tools)], default=str)
    key = sha256(text.encode(errors="surrogatepass")).hexdigest()
    # One call, because another thread may clear it.
    if known is not None and (count := known.get(key)) is not None:
        return count
    first, other = (encode([*system, {"role": "user", "content": text}]) for text in "ab")
    pairs = enumerate(zip(first, other, strict=False))
    found = next((index for index, (one, two) in pairs if one != two), min(len(first), len(other)))
    if known is not None:
        if len(known) >= _MOST_KNOWN:
            known.clear()
        known[key] = found
    return found
