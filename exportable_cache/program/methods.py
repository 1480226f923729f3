"""The methods of a program: which tensors each takes, and which of them serves a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING

import torch

from ..common.method_io import TensorSpec
from ..errors import InputError
from .spec import ProgramSpec

if TYPE_CHECKING:
    from ..models.cache_factory import ExportableCache
    from .inputs.probe import Travelling
    from .items import ItemFacts

DEFAULT_PREFILL_CHUNK = 256
#: Below this, attention over the slots costs too little beside the weights for a bucket of its own.
SMALLEST_BUCKET = 128


#: What is added to a position in the cache to get the rotary one, where images count as fewer positions than tokens.
ROPE_DELTAS = TensorSpec("rope_deltas", "int64", ("batch",))
#: Name of the rotary positions of each token of a step, [axes, batch, length], such as time, height and width.
POSITIONS = "position_ids"
#: The length that the factors of RoPE are chosen by, of models whose factors change with it, see `models.positions`.
ROPE_LENGTHS = TensorSpec("rope_lengths", "int64", ("batch",))
#: As long as the cache is to be read, its values unread: how a compiled step is told a length that it does not guard.
KV_SLOTS = TensorSpec("kv_slots", "bool", ("kv_slots",))


@dataclass(frozen=True)
class ProgramMethod:
    """A function of a program that is called by its name, as ExecuTorch's `Method` is; not a method of a Python class.

    `ProgramMethod("prefill", 2, 256)` takes 2 to 256 new tokens per row, `ProgramMethod("decode", 1, 1)` one.

    Attributes:
        name: In the program.
        min_length: Least size named "length": fewest new tokens per row.
        max_length: Largest size named "length": most new tokens per row.
        kv_read_len: Serves steps that leave no row longer than this, and reads the cache no further; None for all.
        inputs: What it takes, in order; `text_inputs` by default.
        ranges: Least and most of every other named size but "batch".
        scored_tokens: Gives logits after each of the last so many tokens, or all if there are fewer: [batch,
            min(length, scored_tokens), vocab]. 0 for those after the last token alone, [batch, vocab].
        outputs: What it gives, if that is not the logits of a step: then it takes no part in steps and has no cache.
        multiple: What every size named "length" is a multiple of.
        grid: The `image_grid_thw` (time, height, width, in patches) of every image it takes, where its encoder needs
            one.
        item: What is to be known of the items that it encodes, where it does.
        travels: Features beside the embeddings that it takes, where there are any.
        sees: See `ItemFacts.sees`, of the items that it takes.
    """

    name: str
    min_length: int
    max_length: int
    kv_read_len: int | None = None
    inputs: tuple[TensorSpec, ...] = ()
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    outputs: tuple[TensorSpec, ...] = ()
    scored_tokens: int = 0
    grid: tuple[int, int, int] | None = None
    multiple: int = 1
    item: ItemFacts | None = None
    travels: tuple[Travelling, ...] = ()
    sees: str = ""

    def __post_init__(self) -> None:
        if not self.inputs:
            object.__setattr__(self, "inputs", text_inputs(self.min_length, self.max_length))

    @property
    def is_step(self) -> bool:
        """Whether it feeds tokens over the cache and gives logits."""
        return not self.outputs

    @property
    def only_scores(self) -> bool:
        """Whether it is there to score a few tokens, and others feed prompts."""
        return self.scored_tokens > 0 and self.min_length > 1

    @property
    def takes_ids(self) -> bool:
        """Whether its tokens come as ids; or as embeddings, or it takes none."""
        return self.inputs[0].name == "input_ids"

    @property
    def pads(self) -> bool:
        """Whether a session pads its input to a multiple: text, where a sound has to come in whole frames."""
        return self.takes_ids and self.multiple > 1

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the inputs, in order."""
        return tuple(spec.name for spec in self.inputs)

    @property
    def dynamic_sizes(self) -> dict[str, tuple[int, int]]:
        """Every named size that may differ from call to call, with its range."""
        sizes = {"length": (self.min_length, self.max_length), **self.ranges}
        used = {size for spec in self.inputs for size in spec.shape}
        return {name: limits for name, limits in sizes.items() if name in used and limits[0] != limits[1]}

    @property
    def codebooks(self) -> int | None:
        """Ids that it takes for each token, where these are several."""
        shape = self.inputs[0].shape
        return int(shape[2]) if self.takes_ids and len(shape) > 2 else None

    def of_codebooks(self, count: int) -> ProgramMethod:
        """The same step for tokens of `count` ids each."""
        if not self.is_step:
            return self
        ids = replace(self.inputs[0], shape=(*self.inputs[0].shape, count))
        return replace(self, inputs=(ids, *self.inputs[1:]))

    def serves(self, size: int, end: int) -> bool:
        """Whether it takes `size` new tokens after which the longest row holds `end`."""
        in_range = self.min_length <= size <= self.max_length
        return self.is_step and in_range and (self.kv_read_len is None or end <= self.kv_read_len)


def text_inputs(min_length: int, max_length: int) -> tuple[TensorSpec, ...]:
    """What a text decoder takes: token ids [batch, length], and the position of each row's first [batch]."""
    length: int | str = min_length if min_length == max_length else "length"
    return TensorSpec("input_ids", "int64", ("batch", length)), TensorSpec("input_pos", "int64", ("batch",))


def smallest_inputs(method: ProgramMethod, batch_size: int, device: torch.device) -> Iterator[tuple[torch.Tensor, ...]]:
    """Zeros of the least sizes that a method takes; and of 2, where that is 1: compiled, the two may have graphs of
    their own.

    Args:
        method: Of a program.
        batch_size: Its rows.
        device: Where to allocate.
    """
    fixed = {"batch": batch_size, "length": method.min_length}
    choices = [{least, min(max(2, least), most)} for least, most in method.dynamic_sizes.values()]
    for chosen in product(*map(sorted, choices)):
        sizes = {**fixed, **dict(zip(method.dynamic_sizes, chosen, strict=True))}
        yield tuple(
            torch.zeros(spec.sizes(sizes), dtype=getattr(torch, spec.dtype), device=device) for spec in method.inputs
        )


def methods_for(cache: ExportableCache, spec: ProgramSpec | None = None) -> dict[str, ProgramMethod]:
    """The methods of a text decoder over `cache`.

    Args:
        cache: Limits their lengths.
        spec: Which methods, see `ProgramSpec`; `forward` and `split` are decided.

    Raises:
        InputError: If `prefill_chunk`, `score_length` or a bucket is more than a row holds.
    """
    spec = ProgramSpec() if spec is None else spec
    score_length, split = spec.score_length, spec.split
    prefill_chunk = checked_prefill_chunk(cache, spec.prefill_chunk)
    methods = [ProgramMethod("decode", 1, 1)] if split else []
    if split and prefill_chunk > 1:
        methods.append(ProgramMethod("prefill", 2, prefill_chunk))
    if spec.forward or not split:
        # Logits of a few tokens more cost it little; a method more costs a runtime that packs weights all of them.
        methods.append(ProgramMethod("forward", 1, prefill_chunk, scored_tokens=min(score_length, prefill_chunk)))
    if cache.max_length is not None and score_length > cache.max_length:
        raise InputError(f"score_length is {score_length}, a row holds {cache.max_length} tokens; pass at most that")
    if score_length and not spec.forward:
        methods.append(ProgramMethod("score", 2, score_length, scored_tokens=score_length))
    for bucket in spec.buckets:
        if cache.max_length is not None and bucket > cache.max_length:
            raise InputError(
                f"a length bucket is {bucket}, a row holds {cache.max_length} tokens; pass buckets below that, or none"
            )
        methods.append(ProgramMethod(f"decode_{bucket}", 1, 1, bucket))
        if prefill_chunk > 1 and bucket > 1:
            methods.append(ProgramMethod(f"prefill_{bucket}", 2, min(prefill_chunk, bucket), bucket))
        if score_length and bucket > 1:
            most = min(score_length, bucket)
            methods.append(ProgramMethod(f"score_{bucket}", 2, most, bucket, scored_tokens=most))
    return {method.name: method for method in methods}


def checked_prefill_chunk(cache: ExportableCache, prefill_chunk: int | None) -> int:
    """The longest chunk of a prompt: the given one, or the default.

    Raises:
        InputError: If it is not positive or exceeds what the cache holds, or the model cannot do with so few.
    """
    limit = cache.max_length
    if prefill_chunk is None:
        return DEFAULT_PREFILL_CHUNK if limit is None else min(DEFAULT_PREFILL_CHUNK, limit)
    if prefill_chunk < 1 or (limit is not None and prefill_chunk > limit):
        allowed = "at least 1" if limit is None else f"1 to {limit}, the tokens the cache holds"
        raise InputError(f"prefill_chunk is {prefill_chunk}; it must be {allowed}")
    if prefill_chunk < 3 and any(layer.policy.keeps_prompt for layer in cache.layers):
        raise InputError(
            f"prefill_chunk is {prefill_chunk}; this model keeps its prompt whole, and a step of one token ends it, so "
            "it must be at least 3"
        )
    return prefill_chunk


def length_buckets(cache: ExportableCache, smallest: int = SMALLEST_BUCKET) -> list[int]:
    """Powers of two from `smallest` up to below the most slots that a layer of `cache` has."""
    most = max(layer.capacity or 0 for layer in cache.layers if layer.follows_decoder)
    return [2**power for power in range(math.ceil(math.log2(smallest)), 63) if 2**power < most]


def method_for(methods: Mapping[str, ProgramMethod], size: int, end: int, scores: bool = False) -> str:
    """Name of the method that serves a step at the least cost: of those that can, the one that reads and takes least.

    Args:
        methods: Of a program, by name.
        size: New tokens per row.
        end: Tokens that the longest row holds after the step.
        scores: Whether logits after every token are wanted.
    """
    able = [
        method
        for method in methods.values()
        if method.serves(size, end) and (method.scored_tokens >= size if scores else not method.only_scores)
    ]
    return min(able, key=lambda method: (method.kv_read_len or math.inf, method.max_length)).name


def chunk_sizes(
    methods: Mapping[str, ProgramMethod], length: int, keeps_prompt: bool = False, most: int | None = None
) -> list[int]:
    """How many tokens of a prompt of `length` go through each step.

    Long prompts go through in chunks of the longest method; what is left and too short for any goes token by token.

    Args:
        keeps_prompt: Whether a token that comes alone ends the prompt, see `SlotPolicy.keeps_prompt`.
        most: Longest chunk to use, where a method takes one so short; None for the methods' own.
    """
    anywhere = [
        method
        for method in methods.values()
        if method.is_step and not method.only_scores and method.kv_read_len is None
    ]
    longest = max(method.max_length for method in anywhere)
    if most is not None and any(method.serves(min(most, longest), length) for method in anywhere):
        longest = min(most, longest)
    whole, rest = divmod(length, longest)
    chunks = [longest] * whole
    if rest == 1 and whole and keeps_prompt and any(method.serves(2, length) for method in anywhere):
        # Of 3 tokens at least, see `checked_prefill_chunk`.
        return [*chunks[1:], longest - 1, 2]
    if rest:
        chunks += [rest] if any(method.serves(rest, length) for method in anywhere) else [1] * rest
    return chunks
