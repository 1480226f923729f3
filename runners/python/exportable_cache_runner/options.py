"""How tokens are generated, and what came of it."""

from __future__ import annotations

import ctypes
import enum
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .failures import Failure, Status
from .library import AllowTokens, OptionsStruct, StatisticsStruct

#: Takes the tokens chosen so far, the prompt not among them, and a mask, 32-bit words that are 0: it sets bit
#: `token % 32` of word `token // 32` for each that may come next, and gives False where the answer is whole.
AllowedTokens = Callable[[list[int], "array[int]"], bool]


class Stop(enum.IntEnum):
    """Why a generation ended (`ec_stop`)."""

    END_TOKEN = 0
    STOP_STRING = 1
    MAX_NEW_TOKENS = 2
    CACHE_FULL = 3
    CALLBACK = 4
    CANCELLED = 5
    WHOLE = 6


@dataclass(frozen=True)
class Statistics:
    """What came of a generation.

    Attributes:
        prompt_tokens, generated_tokens: How many there were.
        time_to_first_token, decode_seconds: Of the prompt with the first choice, and of the tokens after it.
        proposed_tokens, accepted_tokens: Of prompt lookup.
        stop: Why it ended.
    """

    prompt_tokens: int
    generated_tokens: int
    time_to_first_token: float
    decode_seconds: float
    proposed_tokens: int
    accepted_tokens: int
    stop: Stop

    @classmethod
    def of(cls, found: StatisticsStruct) -> Statistics:
        """What the library wrote."""
        values = {name: getattr(found, name) for name in cls.__dataclass_fields__ if name != "stop"}
        return cls(**values, stop=Stop(found.stop))


@dataclass(frozen=True)
class Options:
    """How tokens are generated: greedily, and all that fit, unless told otherwise.

    Attributes:
        max_new_tokens: None for as many as fit.
        temperature: 0 for the likeliest token, always.
        top_k: None for all.
        top_p: 1 for all.
        seed: The same draws every time.
        stop_tokens, stop_strings: Besides the model's end tokens; strings end the text and are not given out.
        prompt_lookup: Most tokens proposed in a step from the text itself; 0 for none.
        allowed_tokens: Called before each choice, as `AllowedTokens` says; None where all may come.
    """

    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None
    stop_tokens: Sequence[int] = ()
    stop_strings: Sequence[str] = ()
    prompt_lookup: int = 0
    allowed_tokens: AllowedTokens | None = None

    def __post_init__(self) -> None:
        # To C, 0 means all; what is out of an integer's range would be cut off there.
        for name, value, least in (
            ("max_new_tokens", self.max_new_tokens, 1),
            ("top_k", self.top_k, 1),
            ("prompt_lookup", self.prompt_lookup, 0),
            *(("stop_tokens", token, 0) for token in self.stop_tokens),
        ):
            if value is not None and not least <= value < 2**63:
                raise Failure(Status.INPUT, f"{name} is {value}; it is {least} or more, and below 2**63")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise Failure(Status.INPUT, f"seed is {self.seed}; it is 0 or more, and below 2**64")

    def struct(self, failed: Callable[[BaseException], None]) -> OptionsStruct:
        """For one call. What `allowed_tokens` raises goes to `failed`, and ends the generation."""
        found = OptionsStruct()
        found.size = ctypes.sizeof(found)
        found.max_new_tokens, found.top_k = self.max_new_tokens or 0, self.top_k or 0
        found.temperature, found.top_p, found.prompt_lookup = self.temperature, self.top_p, self.prompt_lookup
        found.seed, found.has_seed = self.seed or 0, int(self.seed is not None)
        tokens = (ctypes.c_int64 * len(self.stop_tokens))(*self.stop_tokens)
        strings = (ctypes.c_char_p * len(self.stop_strings))(*map(encoded, self.stop_strings))
        found.stop_tokens, found.stop_token_count = tokens, len(tokens)
        found.stop_strings, found.stop_string_count = strings, len(strings)
        if self.allowed_tokens is not None:
            found.allowed_tokens = AllowTokens(_taker(self.allowed_tokens, failed))
        return found


def encoded(text: str) -> bytes:
    """A text for C.

    Raises:
        Failure: If it has a zero byte, where C would take it to end, or a half of a character.
    """
    if "\0" in text:
        raise Failure(Status.INPUT, f"the text has a zero byte at {text.index(chr(0))}; leave it out")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise Failure(Status.INPUT, f"the text has half of a character at {error.start}; leave it out") from None


def _taker(allowed: AllowedTokens, failed: Callable[[BaseException], None]) -> Callable[..., int]:
    def take(tokens: Any, count: int, mask: Any, words: int, user: Any) -> int:
        # The library's own mask is gone after the call, whatever the callback keeps.
        bits = array("I", bytes(4 * words))
        try:
            goes_on = bool(allowed(tokens[:count], bits))
            ctypes.memmove(mask, bits.tobytes(), 4 * words)
        except BaseException as error:
            failed(error)
            return -1
        return int(goes_on)

    return take
