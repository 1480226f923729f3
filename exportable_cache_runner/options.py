"""Options and results of a generation."""

from __future__ import annotations

import ctypes
import enum
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .failures import Failure, Status
from .library import AllowTokens, OnLogProbs, OptionsStruct, StatisticsStruct

#: Callback that takes the tokens chosen so far, without the prompt, and a mask of zeroed 32-bit words. It sets bit
#: `token % 32` of word `token // 32` for each allowed token, and returns False if the response is complete.
AllowedTokens = Callable[[list[int], "array[int]"], bool]

#: Callback that takes a token's log probability under the model, before temperature and other settings, and pairs of
#: the most probable tokens, in order, and theirs.
TakeLogProbs = Callable[[float, list[tuple[int, float]]], object]


class Stop(enum.IntEnum):
    """The reason why a generation ended (`ec_stop`)."""

    END_TOKEN = 0
    STOP_STRING = 1
    MAX_NEW_TOKENS = 2
    CACHE_FULL = 3
    CALLBACK = 4
    CANCELLED = 5
    WHOLE = 6


@dataclass(frozen=True)
class Statistics:
    """Statistics of a generation.

    Attributes:
        prompt_tokens, generated_tokens: Numbers of tokens.
        time_to_first_token, decode_seconds: Seconds of the prompt with the first choice, and of the tokens after it.
        proposed_tokens, accepted_tokens: Tokens of prompt lookup.
        stop: The reason why it ended.
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
        """Return the statistics that the library wrote."""
        values = {name: getattr(found, name) for name in cls.__dataclass_fields__ if name != "stop"}
        return cls(**values, stop=Stop(found.stop))


@dataclass(frozen=True)
class Options:
    """Options of a generation; the default is greedy, with as many tokens as fit.

    Attributes:
        max_new_tokens: The limit of new tokens; None for as many as fit.
        temperature: Divisor of the logits; 0 for greedy decoding.
        top_k: Sample from the k most probable tokens; None for all.
        top_p: Sample from the fewest tokens that reach this probability; 1 for all.
        seed: Seed of the draws.
        stop_tokens, stop_strings: Stops in addition to the model's end tokens; strings are not returned.
        prompt_lookup: Most tokens proposed per step from the text itself; 0 for none.
        allowed_tokens: Called before each choice, see `AllowedTokens`; None if all are allowed.
        min_p: Sample from tokens at least this times as probable as the most probable one; 0 for all.
        repetition_penalty: Above 1, tokens of the prompt and of the generation become less likely; None for the
            checkpoint's.
        cached_tokens: Number of the prompt's first tokens that are cached: later ones are rolled back, and the rest of
            the prompt is fed. 0 if the prompt follows the cached tokens.
        on_logprobs: Called before each token, see `TakeLogProbs`; None if not needed.
        alternatives: Number of most probable tokens that it gets.
        from_checkpoint: True to sample as the checkpoint's generation config says, if it has `do_sample`. A temperature
            of 0, and limits that keep all tokens, are then its values; others replace them.
        shift_when_full: True to drop half of the tokens after the protected ones when the cache is full, and continue.
        protected_tokens: Number of first tokens that shifts keep.
        logit_bias: Numbers to be added to the logits of tokens, by token id.
        presence_penalty: Number that is subtracted from the logits of tokens that were generated.
        frequency_penalty: Number that is subtracted from a token's logit each time that it was generated.
        counted_tokens: Tokens of earlier calls that count as generated.
        draft_tokens: Most tokens proposed per step by the bundle's draft head, at most 15; 0 for none.
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
    min_p: float = 0.0
    repetition_penalty: float | None = None
    cached_tokens: int = 0
    on_logprobs: TakeLogProbs | None = None
    alternatives: int = 0
    from_checkpoint: bool = False
    shift_when_full: bool = False
    protected_tokens: int = 4
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    counted_tokens: Sequence[int] = ()
    draft_tokens: int = 0

    def __post_init__(self) -> None:
        # In C, 0 means no limit, and values out of an integer's range would be truncated.
        for name, value, least in (
            ("max_new_tokens", self.max_new_tokens, 1),
            ("top_k", self.top_k, 1),
            ("prompt_lookup", self.prompt_lookup, 0),
            ("cached_tokens", self.cached_tokens, 0),
            ("draft_tokens", self.draft_tokens, 0),
            ("alternatives", self.alternatives, 0),
            ("protected_tokens", self.protected_tokens, 0),
            *(("logit_bias", token, 0) for token in self.logit_bias),
            *(("counted_tokens", token, 0) for token in self.counted_tokens),
            *(("stop_tokens", token, 0) for token in self.stop_tokens),
        ):
            if value is not None and not (hasattr(value, "__index__") and least <= value < 2**63):
                raise Failure(Status.INPUT, f"{name} must be from {least} to 2**63 - 1, got {value!r}")
        if self.repetition_penalty == 0:
            raise Failure(Status.INPUT, "repetition_penalty must be a number above 0 (1 changes nothing), got 0")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise Failure(Status.INPUT, f"seed must be from 0 to 2**64 - 1, got {self.seed}")

    def struct(self, failed: Callable[[BaseException], None]) -> OptionsStruct:
        """Return the C structure for one call; `failed` is called with an exception of `allowed_tokens`."""
        found = OptionsStruct()
        found.size = ctypes.sizeof(found)
        found.max_new_tokens, found.top_k = self.max_new_tokens or 0, self.top_k or 0
        found.temperature, found.top_p, found.prompt_lookup = self.temperature, self.top_p, self.prompt_lookup
        found.min_p, found.repetition_penalty = self.min_p, self.repetition_penalty or 0.0
        found.seed, found.has_seed = self.seed or 0, int(self.seed is not None)
        tokens = (ctypes.c_int64 * len(self.stop_tokens))(*self.stop_tokens)
        strings = (ctypes.c_char_p * len(self.stop_strings))(*map(encoded, self.stop_strings))
        found.stop_tokens, found.stop_token_count = tokens, len(tokens)
        found.stop_strings, found.stop_string_count = strings, len(strings)
        found.cached_tokens, found.alternatives = self.cached_tokens, self.alternatives
        found.draft_tokens = self.draft_tokens
        found.from_checkpoint = int(self.from_checkpoint)
        if self.shift_when_full:
            # Otherwise 0, because an older library refuses fields that it does not know, unless they are 0.
            found.shift_when_full, found.protected_tokens = 1, self.protected_tokens
        found.bias_count, found.counted_token_count = len(self.logit_bias), len(self.counted_tokens)
        found.bias_tokens = (ctypes.c_int64 * len(self.logit_bias))(*self.logit_bias)
        found.bias_values = (ctypes.c_double * len(self.logit_bias))(*self.logit_bias.values())
        found.counted_tokens = (ctypes.c_int64 * len(self.counted_tokens))(*self.counted_tokens)
        found.presence_penalty, found.frequency_penalty = self.presence_penalty, self.frequency_penalty
        if self.on_logprobs is not None:
            found.on_logprobs = OnLogProbs(_giver(self.on_logprobs, failed))
        if self.allowed_tokens is not None:
            found.allowed_tokens = AllowTokens(_taker(self.allowed_tokens, failed))
        return found


def encoded(text: str) -> bytes:
    """Return a text encoded for C.

    Raises:
        Failure: If it is no string, or has a zero byte, which ends a text in C, or half of a character.
    """
    if not isinstance(text, str):
        raise Failure(Status.INPUT, f"a text must be a str, got {text!r:.100}")
    if "\0" in text:
        raise Failure(Status.INPUT, f"the text has a zero byte at {text.index(chr(0))}; leave it out")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise Failure(Status.INPUT, f"the text has half of a character at {error.start}; leave it out") from None


def _giver(take: TakeLogProbs, failed: Callable[[BaseException], None]) -> Callable[..., None]:
    def give(logprob: float, tokens: Any, logprobs: Any, count: int, user: Any) -> None:
        try:
            take(logprob, [*zip(tokens[:count], logprobs[:count])])
        except BaseException as error:
            failed(error)

    return give


def _taker(allowed: AllowedTokens, failed: Callable[[BaseException], None]) -> Callable[..., int]:
    def take(tokens: Any, count: int, mask: Any, words: int, user: Any) -> int:
        # A copy, because the library's mask is invalid after the call and the callback may keep it.
        bits = array("I", bytes(4 * words))
        try:
            goes_on = bool(allowed(tokens[:count], bits))
            ctypes.memmove(mask, bits.tobytes(), 4 * words)
        except BaseException as error:
            failed(error)
            return -1
        return int(goes_on)

    return take
