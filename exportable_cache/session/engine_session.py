"""One sequence over the engines of a TensorRT bundle without torch: calls of `exportable_cache_runner.Session`.

Tokens are chosen on the host. The rules are those of the C++ runner (`runners/cpp/src/session.cpp`).
"""

from __future__ import annotations

import math
import operator
import os
import random
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from exportable_cache_runner import Options, Statistics, Stop

from ..errors import InputError, NonFiniteLogitsError
from ..generation.host_sampling import distribution, draw, log_probabilities, look_up, most_probable, penalised
from .checks import check_room

if TYPE_CHECKING:
    from ..generation.checkpoint_settings import CheckpointSettings
    from ..models.lora_arrays import AdapterSlots


#: A length that no session reaches, for the limits that hold everywhere.
_FAR = 1 << 40


class Engines(Protocol):
    """Steps of one row, see `CudaEngines`."""

    def run(self, method: str, tokens: Sequence[int], position: int) -> np.ndarray:
        """Run a step and return its logits, float32 [rows, vocab]: of the last token, or of several."""

    def write_adapter(self, slot: int, arrays: Sequence[np.ndarray]) -> None:
        """Write an adapter into a slot, see `CudaEngines.write_adapter`."""

    def use_slot(self, slot: int) -> None:
        """Run the next steps with the adapter in a slot; 0 for the model itself."""

    def close(self) -> None:
        """Release the memory."""


@dataclass(frozen=True)
class CacheLimits:
    """Capacity of a cache and its limits of rollback, see `SlotPolicy.max_rollback`.

    Attributes:
        max_length: The limit of cached tokens; None if no layer keeps them all.
        rings: First tokens, slots after them and window of each layer with a window.
        keeps_states: True if a layer keeps a state that sums up all tokens.
    """

    max_length: int | None = None
    rings: tuple[tuple[int, int, int], ...] = ()
    keeps_states: bool = False

    @classmethod
    def of(cls, layers: Sequence[Mapping[str, Any]]) -> CacheLimits:
        """Return the limits of a manifest's layers.

        Raises:
            KeyError, TypeError: If a layer is of an unknown policy, or lacks a size.
        """
        capacities, rings, keeps_states = [], [], False
        for layer in layers:
            policy = layer["policy"]
            keeps_states |= layer.get("states") is not None
            if policy["kind"] == "full":
                capacities.append(int(policy["capacity"]))
            elif policy["kind"] in ("ring", "sinks"):
                slots = int(policy["window"]) + int(policy.get("rollback_slots", 0))
                rings.append((int(policy.get("sinks", 0)), slots, int(policy["window"])))
            elif policy["kind"] not in ("recurrent", "none"):
                raise KeyError(policy["kind"])
        return cls(min(capacities, default=None), tuple(rings), keeps_states)

    def max_rollback(self, length: int, max_len_ever: int) -> int:
        """Return how many of the newest tokens can be taken back.

        Args:
            length: Number of cached tokens.
            max_len_ever: Largest number since the cache was empty.
        """
        if self.keeps_states:
            return 0
        # Slots of positions up to max_len_ever - 1 - slots hold later tokens.
        oldest = [
            max_len_ever - 1 - slots + window for first, slots, window in self.rings if max_len_ever > first + slots
        ]
        return max(0, min([length, *(length - position for position in oldest)]))


class Step(NamedTuple):
    """A method of the program: fewest and most tokens, and the most of them that get logits, 0 for the last one."""

    least: int
    most: int
    scored: int = 0


@dataclass
class EngineSession:
    """One sequence over engines. It is used by one thread at a time, except for `cancel`.

    It has the calls of `exportable_cache_runner.Session` except those that take text or images (`tokenize`,
    `generate_text`, `chat`, `add_input`) and those of saved states (`save_state`, `load_state`).

    Attributes:
        engines: The engines.
        methods: The methods by name.
        vocab_size: Token ids run from 0 to vocab_size - 1.
        limits: Limits of the cache.
        settings: Settings of the checkpoint; it has no rules besides a repetition penalty.
        length: Number of cached tokens.
        slots: Slots for adapters; None if the program has none.
    """

    engines: Engines
    methods: Mapping[str, Step]
    vocab_size: int
    limits: CacheLimits
    settings: CheckpointSettings
    length: int = 0
    slots: AdapterSlots | None = None
    #: Slots of the loaded adapters by name, and the one in use.
    _adapters: dict[str, int] = field(default_factory=dict)
    _slot: int = 0
    _max_len_ever: int = 0
    _cancelled: threading.Event = field(default_factory=threading.Event)
    _busy: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False

    def __enter__(self) -> EngineSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def max_length(self) -> int | None:
        """The limit of cached tokens; None for no limit."""
        return self.limits.max_length

    def prefill(self, tokens: Sequence[int]) -> array[float]:
        """Feed tokens after the cached ones, and return the logits of the last one, [vocabulary], float32."""
        fed = self._checked(tokens)
        check_room(self.length, self.max_length, len(fed))
        with self._alone():
            return array("f", self._feed(fed)[-1].tobytes())

    def rewind(self, tokens: int) -> None:
        """Roll back the newest tokens.

        Raises:
            InputError: If a layer cannot take them back.
        """
        with self._alone():
            self._rewind(tokens)

    def reset(self) -> None:
        """Start again at position 0."""
        with self._alone():
            self.length = self._max_len_ever = 0

    def load_adapter(self, path: str | os.PathLike[str], name: str) -> None:
        """Load a LoRA adapter that `exportable-cache adapter` wrote into a slot of the program.

        Args:
            path: The file. Its signature is not checked.
            name: Name for `use_adapter`; an adapter of the same name is replaced.

        Raises:
            BundleError: If the file is damaged.
            InputError: If the program has no free slot, or the file is not an adapter for it.
        """
        with self._alone():
            if self.slots is None:
                raise InputError("this program has no slots for adapters; export with lora_slots=1 (--lora-slots)")
            free = sorted({*range(1, self.slots.slots + 1)} - {*self._adapters.values()})
            if name not in self._adapters and not free:
                raise InputError(
                    f"the program has {self.slots.slots} slots for adapters, which hold {', '.join(self._adapters)}; "
                    "unload one of them first, or export with more lora_slots (--lora-slots)"
                )
            arrays, slot = self.slots.read(path), self._adapters.get(name) or free[0]
            self.engines.write_adapter(slot, arrays)
            self._adapters[name] = slot

    def unload_adapter(self, name: str) -> None:
        """Free the slot of an adapter; if it is in use, the model continues without one.

        Raises:
            InputError: If no adapter has this name.
        """
        with self._alone():
            slot = self._slot_of(name)
            if slot == self._slot:
                self._use_slot(0)
            del self._adapters[name]

    def use_adapter(self, name: str | None) -> None:
        """Run the next steps with an adapter, or with the model itself for None.

        Raises:
            InputError: If no adapter has this name.
        """
        with self._alone():
            slot = 0 if name is None else self._slot_of(name)
            if slot != self._slot:
                self._use_slot(slot)

    def _use_slot(self, slot: int) -> None:
        self.engines.use_slot(slot)
        self._slot = slot

    def _slot_of(self, name: str) -> int:
        if name not in self._adapters:
            known = ", ".join(self._adapters) or "none"
            raise InputError(f"adapter must be one that was loaded ({known}), got {name!r:.100}; load_adapter first")
        return self._adapters[name]

    def cancel(self) -> None:
        """End the running generation, from any thread."""
        self._cancelled.set()

    def encode_input(self, values: Any) -> None:
        """Refuse an encoder's input, because engines are of text decoders."""
        raise InputError("the model must have an encoder, got a text decoder; pass the tokens to prefill")

    def close(self) -> None:
        """Release the memory; a second call does nothing.

        Raises:
            InputError: If another call runs, also if a callback of that call closes the session.
        """
        with self._alone(closes=True):
            self._closed = True
            self.engines.close()

    def generate(
        self, prompt: Sequence[int], options: Options, on_token: Callable[[int], object] | None = None
    ) -> tuple[list[int], Statistics]:
        """Generate tokens after the cached ones and a prompt; see `exportable_cache_runner.Session.generate`.

        Raises:
            InputError: If the prompt or an option is out of range.
            CacheFullError: If the prompt, or the prompt with `max_new_tokens`, does not fit.
            NonFiniteLogitsError: If no token can be chosen.
        """
        with self._alone():
            return self._generate(self._checked(prompt), options, on_token)

    def _generate(
        self, prompt: list[int], options: Options, on_token: Callable[[int], object] | None
    ) -> tuple[list[int], Statistics]:
        limit = self._limit(prompt, options)
        chooser = _Chooser(options, self.settings, self.vocab_size)
        start = first = time.perf_counter()
        self._cancelled.clear()
        # Asked before the step, because a failure must leave the session as any stop does.
        stop = None if chooser.ask([]) else Stop.WHOLE
        if options.cached_tokens:
            self._rewind(self.length - options.cached_tokens)
        tokens: list[int] = []
        logits = self._feed(prompt[options.cached_tokens :], may_stop=True)[-1:]
        proposal: list[int] = []
        proposed = accepted = 0
        if self._cancelled.is_set():
            stop = Stop.CANCELLED
        while stop is None:
            used, end = 0, self.length
            try:
                # The logits are those of the newest token and of each proposed one after it.
                while stop is None and used <= len(proposal):
                    token = chooser.choose(logits[used], prompt + tokens, end - len(proposal) + used)
                    used += 1
                    if not tokens:
                        first = time.perf_counter()
                    tokens.append(token)
                    stop = self._stop_after(tokens, options, on_token, limit)
                    if stop is None and not chooser.ask(tokens):
                        stop = Stop.WHOLE
                    # A token that differs from the proposed one invalidates the proposals after it.
                    if used <= len(proposal) and token != proposal[used - 1]:
                        break
            finally:
                # The newest token is not fed, and rejected proposals are rolled back.
                self.length = end - len(proposal) + max(used - 1, 0)
            accepted += used - 1
            if stop is None and self.length == self.max_length:
                stop = Stop.CACHE_FULL
            if stop is None and self._cancelled.is_set():
                stop = Stop.CANCELLED
            if stop is None:
                proposal = self._propose(prompt + tokens, options, None if limit is None else limit - len(tokens))
                proposed += len(proposal)
                logits = self._feed([tokens[-1], *proposal], scores=True)
        decoding = time.perf_counter() - first
        fed = len(prompt) - options.cached_tokens
        return tokens, Statistics(fed, len(tokens), first - start, decoding, proposed, accepted, stop)

    def _propose(self, context: list[int], options: Options, room: int | None) -> list[int]:
        """Return the tokens that followed the text's end before, fewer than the `room` tokens that are still wanted."""
        count = min(options.prompt_lookup, self._most_scored - 1)
        if room is not None:
            # The last one is not fed.
            count = min(count, room - 1)
        if self.max_length is not None:
            count = min(count, self.max_length - self.length - 1)
        return look_up(context, count) if count > 0 else []

    @property
    def _most_scored(self) -> int:
        return max(step.scored for step in self.methods.values())

    def _stop_after(
        self, tokens: list[int], options: Options, on_token: Callable[[int], object] | None, limit: int | None
    ) -> Stop | None:
        """Give out the newest token, and return why the generation ends with it, or None."""
        if on_token is not None and on_token(tokens[-1]) is False:
            return Stop.CALLBACK
        if tokens[-1] in options.stop_tokens or tokens[-1] in self.settings.ends:
            return Stop.END_TOKEN
        return Stop.MAX_NEW_TOKENS if len(tokens) == limit else None

    def _limit(self, prompt: list[int], options: Options) -> int | None:
        """Return the limit of new tokens, after checking the options that depend on the session."""
        cached = options.cached_tokens
        if cached and (cached > self.length or cached >= len(prompt)):
            raise InputError(
                f"cached_tokens must be from 0 to {max(0, min(self.length, len(prompt) - 1))}, because the cache holds "
                f"{self.length} tokens and the last one of the prompt is always fed, got {cached}; pass 0"
            )
        self._check_lookup(options.prompt_lookup)
        if options.draft_tokens:
            raise InputError(
                f"draft_tokens must be 0 for TensorRT, got {options.draft_tokens}; its programs have no draft head"
            )
        if options.shift_when_full:
            raise InputError("shift_when_full must be False for TensorRT, got True; its programs have no method shift")
        held = 0 if cached else self.length
        check_room(held, self.max_length, len(prompt), options.max_new_tokens)
        return options.max_new_tokens or self.settings.limit(held + len(prompt))

    def _check_lookup(self, most: int) -> None:
        """Check that the program can score that many proposed tokens and take them back."""
        if not most:
            return
        if self._most_scored < 2:
            raise InputError(
                f"prompt_lookup must be 0 (without --prompt-lookup), got {most}, because the program gives the logits "
                f"of the last token alone; export with -O score_length={most + 1}, or leave it out"
            )
        back = min(most, self._most_scored - 1)
        if self.limits.max_rollback(_FAR, _FAR) < back:
            raise InputError(
                f"prompt_lookup must be 0 (without --prompt-lookup), got {most}, because {back} tokens cannot be taken "
                f"back; export with rollback_slots of at least {back - 1} if layers have a window, or leave it out"
            )

    def _feed(self, tokens: Sequence[int], may_stop: bool = False, scores: bool = False) -> np.ndarray:
        """Feed tokens in as few steps as the methods allow.

        Args:
            tokens: Tokens after the cached ones.
            may_stop: True if a cancellation ends it between two steps.
            scores: True to feed them in one step that returns the logits of all of them.

        Returns:
            Logits of the last step, float32 [rows, vocab].
        """
        done, logits = 0, np.empty(0, np.float32)
        most = len(tokens) if scores else max(step.most for step in self.methods.values())
        while done < len(tokens) and not (may_stop and self._cancelled.is_set()):
            size = min(len(tokens) - done, most)
            method = self._method_for(size, scores)
            if method is None and not scores:
                size, method = 1, self._method_for(1)
            if method is None:
                raise InputError(f"no method of the program takes {size} tokens; export the model again")
            # Set before the run, because a run that fails halfway may have written slots.
            self._max_len_ever = max(self._max_len_ever, self.length + size)
            logits = self.engines.run(method, tokens[done : done + size], self.length)
            self.length += size
            done += size
        return logits

    def _method_for(self, size: int, scores: bool = False) -> str | None:
        """Return the method of the fewest logits and the shortest range that takes `size` tokens."""
        found = [
            (step.scored, step.most - step.least, name)
            for name, step in self.methods.items()
            if step.least <= size <= step.most and (size == 1 or not scores or step.scored >= size)
        ]
        return min(found)[2] if found else None

    def _rewind(self, tokens: int) -> None:
        if not 0 <= tokens <= self.length:
            raise InputError(f"rewind must be from 0 to the {self.length} tokens that the cache holds, got {tokens}")
        # A row without tokens restarts, so its layers need not keep anything.
        most = self.length if tokens == self.length else self.limits.max_rollback(self.length, self._max_len_ever)
        if tokens > most:
            reason = "a layer's state sums up all tokens" if self.limits.keeps_states else "the window has moved on"
            raise InputError(
                f"rewind must be at most {most} tokens at a length of {self.length}, because {reason}, got {tokens}; "
                "reset() and prefill the tokens to keep"
            )
        self.length -= tokens
        if not self.length:
            self._max_len_ever = 0

    def _checked(self, tokens: Sequence[int]) -> list[int]:
        """Return tokens as Python's integers, also those of an array.

        Raises:
            InputError: If there is none, or one is not a token id of the vocabulary.
        """
        try:
            given = list(tokens)
        except TypeError:
            kind = type(tokens).__name__
            raise InputError(f"tokens must be a sequence of token ids, got a {kind}; pass a list") from None
        if not given:
            raise InputError("tokens must be at least one, got none: the prompt is empty")
        found = []
        for index, token in enumerate(given):
            try:
                found.append(operator.index(token))
            except TypeError:
                found.append(-1)
            if not 0 <= found[-1] < self.vocab_size:
                raise InputError(
                    f"tokens[{index}] must be a token id from 0 to {self.vocab_size - 1}, got {token!r:.80}; tokenize "
                    "with the model's own tokenizer"
                )
        return found

    @contextmanager
    def _alone(self, closes: bool = False) -> Iterator[None]:
        """Refuse a call while another one runs, or after `close`, except for a second `close`."""
        if not self._busy.acquire(blocking=False):
            raise InputError("the session is in use by another thread or by the call of this callback; wait for it")
        try:
            if self._closed and not closes:
                raise InputError("the session is closed; open another")
            yield
        finally:
            self._busy.release()


class _Chooser:
    """Choice of the tokens of one generation.

    Args:
        options: Options of the generation.
        settings: Settings of the checkpoint.
        vocab_size: Token ids run from 0 to vocab_size - 1.
    """

    def __init__(self, options: Options, settings: CheckpointSettings, vocab_size: int) -> None:
        self._options, self._vocab_size = options, vocab_size
        self._penalty = options.repetition_penalty or settings.repetition_penalty or 1.0
        self._random = random.Random(options.seed)
        self._counts = Counter(options.counted_tokens)
        self._allowed: np.ndarray | None = None
        self._words = array("I", bytes(4 * math.ceil(vocab_size / 32)))

    def ask(self, tokens: list[int]) -> bool:
        """Ask which tokens are allowed after those generated so far; return False if the response is complete.

        Raises:
            InputError: If none is.
        """
        if self._options.allowed_tokens is None:
            return True
        self._words = array("I", bytes(4 * len(self._words)))
        if not self._options.allowed_tokens(list(tokens), self._words):
            return False
        bits = np.unpackbits(np.frombuffer(self._words, np.uint8), bitorder="little")[: self._vocab_size]
        self._allowed = bits.astype(bool)
        if not self._allowed.any():
            raise InputError(
                f"allowed_tokens must allow one of {self._vocab_size} tokens after {len(tokens)} new ones, got none; "
                "allow an end token, or return False to end the response"
            )
        return True

    def choose(self, logits: np.ndarray, context: list[int], length: int) -> int:
        """Return the next token.

        Args:
            logits: [vocab], float32.
            context: Tokens of the prompt and of the generation so far.
            length: Number of cached tokens, for messages.
        """
        options, scores = self._options, logits
        added = dict(options.logit_bias)
        if options.presence_penalty or options.frequency_penalty:
            for one, count in self._counts.items():
                added[one] = added.get(one, 0.0) - options.presence_penalty - count * options.frequency_penalty
        if added:
            scores = logits.copy()
            scores[[*added]] += np.asarray([*added.values()], np.float32)
        if self._penalty != 1:
            scores = penalised(scores, np.unique(context), self._penalty)
        if self._allowed is not None:
            scores = scores.copy()
            scores[: self._vocab_size][~self._allowed] = -np.inf
            scores[self._vocab_size :] = -np.inf
        # Of not-a-number, argmax returns the first.
        token = int(scores.argmax())
        if self._allowed is not None and np.isneginf(scores[token]):
            raise InputError(
                "allowed_tokens must allow a token that the program computes logits of, got none; allow others, or "
                "export with a larger vocabulary"
            )
        if not np.isfinite(scores[token]):
            raise NonFiniteLogitsError(
                f"the logits are not finite at position {length - 1}, so no token can be chosen: the model overflows "
                "there, or its weights or its cache hold infinities or not-a-number; export it in float32"
            )
        if options.temperature:
            limits = options.top_k, options.top_p, options.min_p
            token = draw(*distribution(scores, options.temperature, *limits), self._random.random())
        if options.on_logprobs is not None:
            known = log_probabilities(logits)
            best = most_probable(logits, options.alternatives)
            options.on_logprobs(float(known[token]), [(one, float(known[one])) for one in best])
        self._counts[token] += 1
        return token
