"""The entry points of a program, and which of them serves a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .cache import ExportableCache
from .errors import InputError

DEFAULT_PREFILL_LENGTH = 256
#: Below this, attention over the slots costs too little beside the weights for a bucket of its own.
SMALLEST_BUCKET = 128


@dataclass(frozen=True)
class Method:
    """One entry point: `Method("prefill", 2, 256)` takes 2 to 256 new tokens per row, `Method("decode", 1, 1)` one.

    Attributes:
        name: In the program.
        min_length: Fewest new tokens per row.
        max_length: Most new tokens per row.
        read_length: Serves steps that leave no row longer than this, and reads the cache no further; None for all.
    """

    name: str
    min_length: int
    max_length: int
    read_length: int | None = None

    def serves(self, size: int, end: int) -> bool:
        """Whether it takes `size` new tokens after which the longest row holds `end`."""
        return self.min_length <= size <= self.max_length and (self.read_length is None or end <= self.read_length)


def methods_for(
    cache: ExportableCache, prefill_length: int | None = None, forward: bool = False, buckets: Sequence[int] = ()
) -> dict[str, Method]:
    """The methods of a program over `cache`.

    Args:
        prefill_length: Longest chunk of a prompt; longer prompts go through in several. `DEFAULT_PREFILL_LENGTH`, or
            what the cache holds, by default. At 1 there is no prefill.
        forward: Add a method `forward` that takes any length from 1 on, for runtimes that know one entry point only.
        buckets: Read lengths that get methods of their own, `decode_128` and `prefill_128` for 128; see `length_buckets`.

    Raises:
        InputError: If `prefill_length` is not positive or exceeds what the cache holds, or a bucket is not positive.
    """
    limit = cache.max_length
    if prefill_length is None:
        prefill_length = DEFAULT_PREFILL_LENGTH if limit is None else min(DEFAULT_PREFILL_LENGTH, limit)
    if prefill_length < 1 or (limit is not None and prefill_length > limit):
        allowed = "at least 1" if limit is None else f"1 to {limit}, the tokens the cache holds"
        raise InputError(f"prefill_length is {prefill_length}; it must be {allowed}")
    methods = [Method("decode", 1, 1)]
    if prefill_length > 1:
        methods.append(Method("prefill", 2, prefill_length))
    if forward:
        methods.append(Method("forward", 1, prefill_length))
    for bucket in buckets:
        if not isinstance(bucket, int) or isinstance(bucket, bool) or bucket < 1:
            raise InputError(f"a length bucket is {bucket!r}; each must be an int of at least 1, such as 128")
        methods.append(Method(f"decode_{bucket}", 1, 1, bucket))
        if prefill_length > 1 and bucket > 1:
            methods.append(Method(f"prefill_{bucket}", 2, min(prefill_length, bucket), bucket))
    return {method.name: method for method in methods}


def length_buckets(cache: ExportableCache, smallest: int = SMALLEST_BUCKET) -> list[int]:
    """Powers of two from `smallest` up to below the most slots that a layer of `cache` has."""
    most = max(getattr(layer, "capacity", 0) for layer in cache.layers)
    return [2**power for power in range(math.ceil(math.log2(smallest)), 63) if 2**power < most]


def method_for(methods: Mapping[str, Method], size: int, end: int) -> str:
    """Name of the method that serves a step at the least cost: of those that can, the one that reads and takes least.

    Args:
        methods: Of a program, by name.
        size: New tokens per row.
        end: Tokens that the longest row holds after the step.
    """
    able = [method for method in methods.values() if method.serves(size, end)]
    return min(able, key=lambda method: (method.read_length or math.inf, method.max_length)).name


def chunk_sizes(methods: Mapping[str, Method], length: int) -> list[int]:
    """How many tokens of a prompt of `length` go through each step.

    Long prompts go through in chunks of the longest method; what is left and too short for any goes token by token.
    """
    anywhere = [method for method in methods.values() if method.read_length is None]
    longest = max(method.max_length for method in anywhere)
    whole, rest = divmod(length, longest)
    chunks = [longest] * whole
    if rest:
        chunks += [rest] if any(method.serves(rest, length) for method in anywhere) else [1] * rest
    return chunks
