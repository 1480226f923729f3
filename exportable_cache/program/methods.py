"""The methods of a program: their inputs, facts about the items that they encode, and the choice of one for a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch

from ..common.tensors import TensorSpec

#: Tiles that each token of a step attends to, int64 [batch, items * tiles, length]: 1 where it does, -1 for tokens
#: before the first image of a prompt.
ITEMS_SEEN = "items_seen"
#: States of all cached images, [batch, items * slots, hidden_size], padded with zeros.
ITEM_STATES = "item_states"
#: The processor's form of `ITEMS_SEEN`, bool [batch, length, items, tiles].
CROSS_MASK = "cross_attention_mask"


@dataclass(frozen=True)
class FixedInput:
    """A tensor that is equal for every item, such as its grid. It determines sizes, so it is part of the program.

    Attributes:
        dtype: Name of a torch dtype.
        shape: Shape for one item.
        values: All elements in order, or a single one if all are equal.
    """

    dtype: str
    shape: tuple[int, ...]
    values: tuple[int | bool | float, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> FixedInput:
        """Store the values of a tensor of any shape."""
        values = tuple(tensor.flatten().tolist())
        same = len(values) > 1 and len(set(values)) == 1
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), values[:1] if same else values)

    def tensor(self) -> torch.Tensor:
        """Return the tensor [*shape], on the CPU. It is contiguous, because ExecuTorch lifts no other constants."""
        values = torch.tensor(self.values, dtype=getattr(torch, self.dtype))
        return values.expand(self.numel).reshape(self.shape).contiguous()

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class ItemFacts:
    """Facts that a session needs to insert items of an `encode_*` method into a prompt.

    Attributes:
        token_id: Id of the placeholder token; a prompt has one per embedding.
        fixed: Constant inputs of the encoder, by the processor's name.
        positions: Rotary positions of an item's tokens on each axis, [axes][tokens], relative to its start; empty if
            they increase by one like those of text.
        advance: Offset from an item's start to the position of the token after it, if `positions` is not empty.
        sees: What an item's tokens attend to besides earlier tokens: "item" for the tokens of the same item, "sliding
            item" for these in sliding-attention layers only, "whole item" for these also beyond a sliding window,
            "items" for those of all items of the prompt, "prompt" for the whole prompt, "" for nothing.
        tiles: Tiles per item that cross-attention masks separately; 0 if embeddings replace placeholders instead.
        apart: True if the frames of a video are separate items of one frame in a prompt.
        tokens: Placeholders of one item, for the method `encode` of an encoder-decoder; 0 for methods that return
            the embeddings.
        size: Height and width in pixels of the images that the program takes, before the processor; None if it takes
            those of any size, or the size is not known.
        samples: Samples of the audio that the program takes, before the processor; 0 if the processor pads audio.
    """

    token_id: int
    fixed: Mapping[str, FixedInput] = field(default_factory=dict)
    positions: tuple[tuple[int, ...], ...] = ()
    advance: int = 0
    sees: str = ""
    apart: bool = False
    tiles: int = 0
    tokens: int = 0
    size: tuple[int, int] | None = None
    samples: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as JSON values."""
        return {
            "token_id": self.token_id,
            "fixed": {
                name: {"dtype": one.dtype, "shape": list(one.shape), "values": list(one.values)}
                for name, one in self.fixed.items()
            },
            "positions": [list(axis) for axis in self.positions],
            "advance": self.advance,
            "sees": self.sees,
            "apart": self.apart,
            "tiles": self.tiles,
            **({"tokens": self.tokens} if self.tokens else {}),
            **({} if self.size is None else {"size": list(self.size)}),
            **({"samples": self.samples} if self.samples else {}),
        }


@dataclass(frozen=True)
class ExtraFeature:
    """Features of each token that a decoder takes in addition to the embeddings.

    Attributes:
        name: Name of the decoder's argument.
        keys: Indices or layer numbers of its tensors if it is a list or dict; empty for a single tensor.
        size: Values per token, over all tensors.
        mask: Argument with the mask of the tokens that have them, if not all do.
        shape: Shape for one token, if it is a single tensor.
        of_text: True if text tokens have them too.
    """

    name: str
    keys: tuple[int, ...]
    size: int
    mask: str = ""
    shape: tuple[int, ...] = ()
    of_text: bool = False

    def tensors(self, given: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return its tensors [tokens, size] from a decoder's arguments for one prompt."""
        value = given[self.name]
        if not self.keys:
            return [value[0].flatten(1)]
        return [value[key].reshape(-1, value[key].shape[-1]) for key in self.keys]


#: Offset from cache position to rotary position, for models whose images span fewer positions than tokens.
ROPE_DELTAS = TensorSpec("rope_deltas", "int64", ("batch",))
#: Name of the input with the rotary positions of each token, [axes, batch, length], such as time, height and width.
POSITIONS = "position_ids"
#: Sequence length that selects the RoPE factors, for models whose factors depend on it; see `models.positions`.
ROPE_LENGTHS = TensorSpec("rope_lengths", "int64", ("batch",))
#: Dummy input whose size is the read length of the cache; compiled steps do not recompile when it changes.
KV_SLOTS = TensorSpec("kv_slots", "bool", ("kv_slots",))


#: Inputs of the method `shift`: the lengths of the rows, and the positions that are dropped.
_PLACES = ("input_pos", "first", "count")


@dataclass(frozen=True)
class ProgramMethod:
    """A function of a program that is called by name, like ExecuTorch's `Method`; not a method of a Python class.

    `ProgramMethod("prefill", 2, 256)` takes 2 to 256 new tokens per row, `ProgramMethod("decode", 1, 1)` one.

    Attributes:
        name: Name in the program.
        min_length: Fewest new tokens per row, the minimum of the size named "length".
        max_length: Most new tokens per row, the maximum of the size named "length".
        kv_read_len: Number of slots read. The method serves steps after which no row is longer; None reads all slots.
        inputs: Input tensors in order; `text_inputs` by default.
        ranges: Minimum and maximum of every named size except "length" and "batch".
        scored_tokens: Number of last tokens that get logits, [batch, min(length, scored_tokens), vocab]; 0 for the last
            token only, [batch, vocab].
        outputs: Outputs of a method that is not a step of the decoder; such a method does not use the cache,
            except `SHIFT` and `DRAFT`.
        multiple: Divisor of every size named "length".
        grid: `image_grid_thw` (time, height, width, in patches) of every image, if the encoder needs one.
        item: Facts about the items it encodes, if it is an encoder.
        extra_features: Features that are passed to the decoder along with the embeddings.
        sees: `ItemFacts.sees` of the items in its input.
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
    extra_features: tuple[ExtraFeature, ...] = ()
    sees: str = ""

    def __post_init__(self) -> None:
        if not self.inputs:
            object.__setattr__(self, "inputs", text_inputs(self.min_length, self.max_length))

    @cached_property
    def is_step(self) -> bool:
        """True if the method feeds tokens to the decoder and returns logits."""
        return not self.outputs

    @cached_property
    def only_scores(self) -> bool:
        """True if the method only scores drafts, so that other methods feed prompts."""
        return self.scored_tokens > 0 and self.min_length > 1

    @cached_property
    def takes_ids(self) -> bool:
        """True if its tokens are ids; False for embeddings, or if it takes no tokens."""
        return self.inputs[0].name == "input_ids"

    @property
    def pads(self) -> bool:
        """True if a session pads its input to `multiple`. Only text is padded; audio must have whole frames."""
        return self.takes_ids and self.multiple > 1

    @cached_property
    def input_names(self) -> tuple[str, ...]:
        """Names of the input tensors, in order."""
        return tuple(spec.name for spec in self.inputs)

    @property
    def dynamic_sizes(self) -> dict[str, tuple[int, int]]:
        """Named sizes that may differ between calls, with their ranges."""
        sizes = {"length": (self.min_length, self.max_length), **self.ranges}
        used = {size for spec in self.inputs for size in spec.shape}
        return {name: limits for name, limits in sizes.items() if name in used and limits[0] != limits[1]}

    @property
    def codebooks(self) -> int | None:
        """Number of ids per token, for models with several codebooks."""
        shape = self.inputs[0].shape
        return int(shape[2]) if self.takes_ids and len(shape) > 2 else None

    def of_codebooks(self, count: int) -> ProgramMethod:
        """Return the step for tokens of `count` ids each."""
        if not self.is_step:
            return self
        ids = replace(self.inputs[0], shape=(*self.inputs[0].shape, count))
        return replace(self, inputs=(ids, *self.inputs[1:]))

    def serves(self, size: int, end: int) -> bool:
        """Return True if the method takes `size` new tokens after which the longest row holds `end`."""
        in_range = self.min_length <= size <= self.max_length
        return self.is_step and in_range and (self.kv_read_len is None or end <= self.kv_read_len)


#: Method that drops positions of the cache, see `program.shift`. Its output is the new lengths.
SHIFT = ProgramMethod(
    "shift",
    1,
    1,
    inputs=tuple(TensorSpec(name, "int64", ("batch",)) for name in _PLACES),
    outputs=(TensorSpec("kept", "int64", ("batch",)),),
)


#: Further inputs of `shift` where the factors of RoPE change with the length: the length that chose those of each
#: position, before and after the shift.
ROPE_BEFORE, ROPE_AFTER = "rope_before", "rope_after"
#: Further input of `shift` for models whose images have fewer rotary positions than tokens: the number of rotary
#: positions that later tokens move by.
TURN = "turn"


def moves_images(methods: Mapping[str, ProgramMethod]) -> bool:
    """Return True if rotary positions of these methods differ from positions in the cache after an image."""
    return any(ROPE_DELTAS in method.inputs for method in methods.values())


def shift_method(rope_slots: int | None = None, turn: bool = False) -> ProgramMethod:
    """Return the method `shift` of a program.

    Args:
        rope_slots: Number of positions of a row, if the factors of RoPE change within them.
        turn: True if rotary positions and positions in the cache differ.
    """
    further = [TensorSpec(TURN, "int64", ("batch",))] if turn else []
    if rope_slots is not None:
        further += [TensorSpec(name, "int64", ("batch", rope_slots)) for name in (ROPE_BEFORE, ROPE_AFTER)]
    return replace(SHIFT, inputs=(*SHIFT.inputs, *further)) if further else SHIFT


#: Method that proposes the token after one that the model has not seen, see `models.draft_heads.DraftHead.draft`. It
#: writes the head's layers and does not advance the length.
DRAFT = ProgramMethod(
    "draft",
    1,
    1,
    inputs=(
        TensorSpec("input_ids", "int64", ("batch", 1)),
        TensorSpec("input_pos", "int64", ("batch",)),
        TensorSpec("link", "int64", ("batch",)),
    ),
    outputs=(TensorSpec("draft_logits", "float32", ("batch", "vocab")),),
)


def text_inputs(min_length: int, max_length: int) -> tuple[TensorSpec, ...]:
    """Return the inputs of a text decoder: token ids [batch, length] and first positions [batch]."""
    length: int | str = min_length if min_length == max_length else "length"
    return TensorSpec("input_ids", "int64", ("batch", length)), TensorSpec("input_pos", "int64", ("batch",))


def smallest_inputs(method: ProgramMethod, batch_size: int, device: torch.device) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield zeros of the smallest sizes a method takes, and of size 2 where that is 1.

    Both are needed for warm-up, because TorchDynamo may compile separate graphs for size 1.
    """
    fixed = {"batch": batch_size, "length": method.min_length}
    choices = [{least, min(max(2, least), most)} for least, most in method.dynamic_sizes.values()]
    for chosen in product(*map(sorted, choices)):
        sizes = {**fixed, **dict(zip(method.dynamic_sizes, chosen, strict=True))}
        yield tuple(
            torch.zeros(spec.sizes(sizes), dtype=getattr(torch, spec.dtype), device=device) for spec in method.inputs
        )


def method_for(methods: Mapping[str, ProgramMethod], size: int, end: int, scores: bool = False) -> str:
    """Return the name of the cheapest method that serves a step: the one with the shortest read and input length.

    Args:
        methods: The program's methods, by name.
        size: New tokens per row.
        end: Length of the longest row after the step, in tokens.
        scores: True if logits of every new token are needed.
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
    """Return the sizes of the steps that prefill a prompt of `length` tokens.

    Long prompts are split into chunks of the longest method. A rest that is too short for any method is fed token by
    token.

    Args:
        methods: The program's methods, by name.
        length: Tokens of the prompt.
        keeps_prompt: True if a step of one token ends the prompt, see `SlotPolicy.keeps_prompt`.
        most: Longest chunk to use if a method takes chunks that short; None for the methods' maximum.
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
        # A chunk has at least 3 tokens, see `checked_prefill_chunk`.
        return [*chunks[1:], longest - 1, 2]
    if rest:
        chunks += [rest] if any(method.serves(rest, length) for method in anywhere) else [1] * rest
    return chunks
