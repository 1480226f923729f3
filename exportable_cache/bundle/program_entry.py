"""What a manifest says of the program: its methods, with the tensors that they take and give."""

from __future__ import annotations

import itertools
from typing import Literal

from pydantic import Field, field_validator, model_validator

from ..common.tensor_spec import TensorSpec
from ..models.rope import RopeRule
from ..program.items import FixedInput, ItemFacts
from ..program.methods import ROPE_LENGTHS, ProgramMethod
from ..program.spec import Form, Logits
from .entries import Count, Dtype, Entry, names_of

# What the names of an explicit program's state tensors begin with, among the inputs and outputs of its methods.
STATE_PREFIX = "cache."

#: Name of a step's first output.
LOGITS = "logits"


class Signature(Entry):
    """One input or output: `shape` has numbers, and names of sizes: "batch", "length" and those of the method's
    `ranges`.
    """

    name: str
    dtype: Dtype
    shape: list[Count | str]


class FixedEntry(Entry):
    """See `FixedInput`."""

    dtype: Dtype
    shape: list[Count]
    values: list[int | bool | float]


class ItemEntry(Entry):
    """What a session has to know of the items that a method encodes, see `ItemFacts`."""

    token_id: int
    fixed: dict[str, FixedEntry] = {}
    positions: list[list[int]] = []
    advance: int = 0
    sees: Literal["", "item", "sliding item", "prompt"] = ""
    apart: bool = False
    tiles: int = Field(0, ge=0)

    def described(self) -> ItemFacts:
        """The same as a program knows it."""
        fixed = {name: FixedInput(one.dtype, tuple(one.shape), tuple(one.values)) for name, one in self.fixed.items()}
        positions = tuple(map(tuple, self.positions))
        return ItemFacts(self.token_id, fixed, positions, self.advance, self.sees, self.apart, self.tiles)


class MethodEntry(Entry):
    """One method of the program, see `ProgramMethod`."""

    min_length: int = Field(ge=1, lt=2**63)
    max_length: int = Field(ge=1, lt=2**63)
    # `ProgramMethod.kv_read_len`, under the name that the format has had from the start.
    read_length: int | None = Field(default=None, ge=1, lt=2**63)
    # Of files that were written before `scored_tokens`: it is max_length then.
    scores: bool = False
    scored_tokens: Count = 0
    # Least and most of every size named in a shape, besides "batch" and "length".
    ranges: dict[str, tuple[Count, Count]] = {}
    inputs: list[Signature]
    outputs: list[Signature]
    # image_grid_thw of every image that it takes.
    grid: tuple[int, int, int] | None = None
    # Of the items that it encodes; bundles from before have a grid alone.
    item: ItemEntry | None = None
    # Of what "length" is a multiple.
    multiple: int = Field(default=1, ge=1, lt=2**63)

    @model_validator(mode="after")
    def _range(self) -> MethodEntry:
        if self.min_length > self.max_length:
            raise ValueError(f"min_length is {self.min_length}, above max_length {self.max_length}")
        return self

    @model_validator(mode="after")
    def _every_size_is_known(self) -> MethodEntry:
        known = {"batch", "length", *self.ranges}
        for signature in self.inputs:
            unknown = [size for size in signature.shape if isinstance(size, str) and size not in known]
            if unknown:
                raise ValueError(
                    f"input {signature.name!r} has a size {unknown[0]!r}, ranges has {names_of(self.ranges)}"
                )
        return self

    @property
    def is_step(self) -> bool:
        """Whether it feeds tokens over the cache and gives logits."""
        return any(signature.name == LOGITS for signature in self.outputs)

    @property
    def only_scores(self) -> bool:
        """See `ProgramMethod.only_scores`."""
        return self.described("").only_scores

    def described(self, name: str) -> ProgramMethod:
        """The same as a runner knows it: without the state tensors."""
        inputs, outputs = (
            tuple(
                TensorSpec(item.name, item.dtype, tuple(item.shape))
                for item in items
                if not item.name.startswith(STATE_PREFIX)
            )
            for items in (self.inputs, () if self.is_step else self.outputs)
        )
        return ProgramMethod(
            name,
            self.min_length,
            self.max_length,
            self.read_length,
            inputs,
            dict(self.ranges),
            outputs,
            self.max_length if self.scores else self.scored_tokens,
            self.grid,
            self.multiple,
            None if self.item is None else self.item.described(),
        )

    @property
    def kv_read_len(self) -> int | None:
        """`read_length`, as `ProgramMethod` calls it; files keep the name that they have."""
        return self.read_length


class RopeEntry(Entry):
    """When the factors of the model's RoPE change, see `RopeRule`."""

    kind: Literal["longrope", "dynamic"]
    borders: list[int] = Field(min_length=1, max_length=64)
    recomputes: bool = False

    @field_validator("borders")
    @classmethod
    def _ascend(cls, borders: list[int]) -> list[int]:
        if borders[0] < 1 or any(before >= after for before, after in itertools.pairwise(borders)):
            raise ValueError(f"borders are {borders}, which do not ascend from 1 on")
        return borders

    def described(self) -> RopeRule:
        """Return it as a session knows it."""
        return RopeRule(self.kind, tuple(self.borders), self.recomputes)


class ProgramEntry(Entry):
    """The program's form and methods."""

    form: Form
    logits: Logits
    batch_size: int = Field(ge=1, lt=2**63)
    max_cache_len: int = Field(ge=1, lt=2**63)
    methods: dict[str, MethodEntry]
    # Whether all rows have to hold as many tokens, see `row_lengths.needs_equal_rows`.
    equal_rows: bool = False
    # Where its steps are handed the lengths that RoPE's factors are chosen by.
    rope: RopeEntry | None = None

    @model_validator(mode="after")
    def _lengths_have_a_rule(self) -> ProgramEntry:
        for name, method in self.methods.items():
            takes = any(signature.name == ROPE_LENGTHS.name for signature in method.inputs)
            if takes and self.rope is None:
                raise ValueError(f"method {name!r} takes {ROPE_LENGTHS.name}, but rope is missing")
        return self

    @field_validator("methods")
    @classmethod
    def _can_decode(cls, methods: dict[str, MethodEntry]) -> dict[str, MethodEntry]:
        if not any(
            method.is_step and method.min_length == 1 and method.read_length is None for method in methods.values()
        ):
            raise ValueError(f"none of the methods {', '.join(methods) or '(none)'} takes one token at every position")
        return methods

    @model_validator(mode="after")
    def _state_is_where_the_form_says(self) -> ProgramEntry:
        for name, method in self.methods.items():
            explicit = any(signature.name.startswith(STATE_PREFIX) for signature in method.inputs)
            if method.is_step and explicit is not (self.form is Form.EXPLICIT):
                takes = "takes" if explicit else "does not take"
                raise ValueError(f"form is {self.form.value!r}, but method {name!r} {takes} the cache as an input")
        return self
