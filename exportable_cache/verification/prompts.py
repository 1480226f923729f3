"""Prompts and steps of a verification."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..cache.policies import SinkPolicy
from ..cache.spec import Sinks
from ..errors import InputError
from ..models.positions import position_limit
from ..program.inputs.kinds import text_after

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..session.session import Session
    from .spec import VerifySpec


_SHORT_PROMPTS = (3, 8, 40)
_DECODE_STEPS = 24
# Steps past a window, enough for the ring buffer to wrap.
_PAST_WINDOW = 8
# Larger windows get fewer prompts, and few steps past them, because decoding past them takes time.
_SMALL_WINDOW = 256


def default_prompts(windows: Sequence[int], max_length: int | None, prefill_chunk: int) -> list[int]:
    """Return prompt lengths around each window, past the longest prefill chunk, and a short one.

    `default_prompts([8], 64, 256)` is `[3, 7, 8, 9, 40]`.

    Args:
        windows: Sliding windows of the model.
        max_length: Capacity in tokens, or None if it is unlimited. At least one decode step fits after each prompt,
            except if prefill, which takes two tokens, would not fit: `default_prompts([], 2, 2)` is `[2]`.
        prefill_chunk: Longest chunk.
    """
    lengths = {3} if any(window <= _SMALL_WINDOW for window in windows) else set(_SHORT_PROMPTS)
    for window in windows:
        lengths |= {window - 1, window, window + 1, 5 * window} if window <= _SMALL_WINDOW else {window - 1, window + 1}
    if max(lengths) <= prefill_chunk:
        lengths.add(prefill_chunk + 3)
    longest = math.inf if max_length is None else max_length - 1
    fitting = sorted(length for length in lengths if 1 <= length <= longest)
    return fitting or [2 if max_length is None else min(2, max_length)]


def prompt_feeds(length: int, prefill_chunk: int) -> list[list[int]]:
    """Return the ways to feed a prompt, each a list of the lengths of its prefill calls; decoding follows the last.

    A prompt of four tokens or more is fed in two calls, the second of at least two tokens, so that prefill also starts
    past position 0: `prompt_feeds(40, 256)` is `[[27, 13]]`. A prompt longer than a chunk starts with a whole chunk:
    `prompt_feeds(259, 256)` is `[[256, 3]]`. If no call has a whole chunk, the prompt is also fed at once:
    `prompt_feeds(64, 64)` is `[[64], [43, 21]]`. Three tokens are split only if that is the longest chunk.

    Args:
        length: Tokens of the prompt.
        prefill_chunk: Longest chunk.
    """
    if length < (4 if prefill_chunk > 3 else 3):
        return [[length]]
    second = length // 3
    if length > prefill_chunk:
        second = min(second, length - prefill_chunk)
    second = max(2, second)
    split = [length - second, second]
    return [[length], split] if split[0] < prefill_chunk <= length else [split]


def default_decode_steps(prompt: int, windows: Sequence[int], max_length: int | None) -> int:
    """Return the number of decode steps after a prompt: past every small window, within the capacity."""
    steps = max([_DECODE_STEPS, *(window + _PAST_WINDOW + 2 - prompt for window in windows if window <= _SMALL_WINDOW)])
    return steps if max_length is None else max(0, min(steps, max_length - prompt))


# Largest number of tokens over all rows for which a prompt that fills the cache is tried unless asked for, because it
# takes time.
_MOST_TO_FILL = 4096


# Largest number of parameters times tokens of a prompt that a large model reads to its end. Such a pass takes as long
# as the rest of an export, whose time grows with the parameters, too.
_MOST_PRODUCTS = 10**12
#: Tokens before an end that are read after placed keys, and steps of one token among them.
END_TOKENS, END_STEPS = 64, 8


def read_and_placed(
    plan: Sequence[tuple[int, int]], chunk: int, parameters: int, limit: int | None, capacity: int | None
) -> tuple[list[tuple[int, int]], list[int]]:
    """Divide the prompts of a large model into those that are read, and ends that are reached over placed keys.

    Prompts up to a chunk and a part of the next are read, and longer ones if that takes few products. After the others,
    what a token sees depends on its position and on the keys in the slots, not on how they got there.

    Args:
        plan: Lengths of the prompts, ascending, each with its number of steps.
        chunk: Longest chunk.
        parameters: Number of parameters, times rows.
        limit: Number of tokens that both sides can hold; None if it is unlimited.
        capacity: Number of tokens that the session can hold; None if no layer limits it, so that there is no last slot.

    Returns:
        The plan of the prompts that are read, and the ends, ascending. Each window, each number of slots that a method
        reads, and the last slot is inside one of both, and single steps lead past the first two.
    """
    most = _MOST_PRODUCTS // max(parameters, 1)
    read = [one for one in plan if one[0] <= chunk + 3 or sum(one) <= most] or [*plan[:1]]
    reached = sum(read[-1])
    # The first steps lead over the border, because the method that reads up to it is another than the one after it.
    ends = {length + END_STEPS + END_STEPS // 2 for length, _ in plan if (length, _) not in read}
    ends = {end for end in ends if not any(0 < other - end < END_STEPS for other in ends)}
    if limit is not None:
        ends = {min(end, limit) for end in (*ends, *([] if capacity is None else [limit]))}
    return read, sorted(end for end in ends if end > reached)


def random_text(session: Session, length: int, generator: torch.Generator, padding: int | None = None) -> torch.Tensor:
    """Return random tokens int64 [batch, length] without placeholders, which would need images or audio.

    Args:
        session: The session that they are for.
        length: Number of tokens.
        generator: Chooses them.
        padding: The token of padding, which is left out, too: M2M100 counts positions without it in each call.
    """
    ids = torch.randint(session.vocab_size, (session.batch_size, length), generator=generator)
    avoided = {*session.placeholders, *([] if padding is None else [padding])}
    for token in avoided:
        ids[ids == token] = text_after(token, avoided, session.vocab_size)
    return ids


def planned(session: Session, spec: VerifySpec, limit: int | None, windows: Sequence[int]) -> list[tuple[int, int]]:
    """Return the lengths of the prompts, shortest first, each with its number of decode steps.

    Args:
        session: The session to verify.
        spec: Lengths and steps that were given.
        limit: Capacity of both sides in tokens.
        windows: Windows of the layers, ascending.

    Raises:
        InputError: If a prompt and its steps exceed the limit.
    """
    reachable = [window for window in windows if limit is None or window < limit]
    methods = [method for method in session.runner.methods.values() if method.is_step]
    lengths = set(spec.prompts or default_prompts(reachable, limit, longest_chunk(session)))
    filling = None
    if not spec.prompts:
        # One token less than each bucket, so that the steps that follow use the next one.
        ends = {method.kv_read_len for method in methods if method.kv_read_len is not None and method.kv_read_len > 1}
        # A cache may have more slots than the model has positions.
        most = math.inf if limit is None else limit - (spec.decode_steps or 0)
        lengths.update(end - 1 for end in ends if end <= most)
        # Ring buffers alone have no limit.
        few = limit is not None and session.batch_size * limit <= _MOST_TO_FILL
        if limit is not None and session.max_length is not None and (few or spec.full):
            filling = limit
            lengths.add(filling)
    plan = []
    for length in sorted(lengths):
        if length == filling:
            steps = 0
        elif spec.decode_steps is None:
            steps = default_decode_steps(length, reachable, limit)
        else:
            steps = spec.decode_steps
        if length < 1 or steps < 0 or (limit is not None and length + steps > limit):
            raise InputError(
                "prompt and decode steps must have at least 1 and at most "
                f"{'any number of' if limit is None else limit} tokens, got {length} and {steps}; pass fewer"
            )
        plan.append((length, steps))
    return plan


def longest_chunk(session: Session) -> int:
    """Return the length of the longest prefill chunk."""
    return max(method.max_length for method in session.runner.methods.values() if method.is_step)


def kept_sinks(session: Session) -> Sinks | None:
    """Return the attention sinks of the session's full-attention layers, or None if they keep every token."""
    policies = [layer.policy for layer in session.layers if isinstance(layer.policy, SinkPolicy)]
    found = [Sinks(policy.sinks, policy.window) for policy in policies]
    return found[0] if found else None


def most_tokens(session: Session, model: PreTrainedModel) -> int | None:
    """Return the number of tokens that both sides can hold, or None if it is unlimited."""
    # Learned position tables end there, and models were not trained on later rotary positions.
    positions = position_limit(model.config)
    if session.stepper.rope is not None:
        # Dynamic NTK scaling starts there.
        positions = None
    return min((limit for limit in (session.max_length, positions) if limit), default=None)
