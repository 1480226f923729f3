"""What a verification feeds by default."""

from __future__ import annotations

import math
from collections.abc import Sequence

_PROMPTS_WITHOUT_WINDOW = (3, 8, 40)
_DECODE_STEPS = 24
# Steps past a window: enough for the ring to have turned over visibly.
_PAST_WINDOW = 8
# Up to this window every prompt is decoded past it, and one of five windows is tried: both cost time as it grows.
_SMALL_WINDOW = 256


def default_prompts(windows: Sequence[int], max_length: int | None, prefill_chunk: int) -> list[int]:
    """Prompt lengths that cross every boundary: around each window, past the longest prefill chunk, and a short one.

    `default_prompts([8], 64, 256)` is `[3, 7, 8, 9, 40]`.

    Args:
        windows: Sliding windows of the model.
        max_length: Tokens that fit, or None for any number. At least one decode step fits after each prompt, except
            where that would leave none for prefill, which takes two tokens: `default_prompts([], 2, 2)` is `[2]`.
        prefill_chunk: Longest chunk.
    """
    lengths = {3} if windows else set(_PROMPTS_WITHOUT_WINDOW)
    for window in windows:
        lengths |= {window - 1, window, window + 1, 5 * window} if window <= _SMALL_WINDOW else {window - 1, window + 1}
    if max(lengths) <= prefill_chunk:
        lengths.add(prefill_chunk + 3)
    longest = math.inf if max_length is None else max_length - 1
    fitting = sorted(length for length in lengths if 1 <= length <= longest)
    return fitting or [2 if max_length is None else min(2, max_length)]


def prompt_feeds(length: int, prefill_chunk: int) -> list[list[int]]:
    """Ways in which a prompt is fed, each from position 0 and as the lengths of its prefill calls; the last one is
    decoded on.

    From four tokens on a prompt goes in as two calls, the second of at least two tokens, so that prefill runs past
    position 0 too: `prompt_feeds(40, 256)` is `[[27, 13]]`. A longer prompt than a chunk keeps its first chunk whole,
    `prompt_feeds(259, 256)` is `[[256, 3]]`. Where the split leaves no chunk whole the prompt is fed at once before
    that: `prompt_feeds(64, 64)` is `[[64], [43, 21]]`. Three tokens are split only where prefill takes no more.

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
    """Decode steps after a prompt: past every small window, and no more than fit."""
    steps = max([_DECODE_STEPS, *(window + _PAST_WINDOW + 2 - prompt for window in windows if window <= _SMALL_WINDOW)])
    return steps if max_length is None else max(0, min(steps, max_length - prompt))
