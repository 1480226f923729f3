"""The parts of a manifest: files, quantization, cache layers, and the program's methods."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from ..cache.kernel import Kernel
from ..cache.layers import layer_from
from ..common.method_io import TensorSpec
from ..errors import InputError
from ..models.positions import RopeRule
from ..program.items import FixedInput, ItemFacts
from ..program.methods import ROPE_LENGTHS, ProgramMethod
from ..program.spec import Form, Logits

#: A number of bytes, or a size: what 64 bits hold.
Count = Annotated[int, Field(ge=0, lt=2**63)]


def _is_dtype(name: str) -> str:
    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise ValueError(f"must be the name of a dtype of torch, got {name!r}")
    return name


#: The name of a dtype, such as `float32`.
Dtype = Annotated[str, AfterValidator(_is_dtype)]


class Entry(BaseModel):
    """A part of the manifest: no other fields than these, and never changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class File(Entry):
    """One file of the bundle, by its path inside the folder; `details` are its target's."""

    sha256: str
    bytes: Count
    holds: str
    details: dict[str, Any] = Field(default_factory=dict)


class Quantized(Entry):
    """How weights were quantised, and what that did to the logits: the program against the float model, on random
    tokens.

    `compared_in` is the dtype of the float model. `accuracy_before` and `accuracy_after` are shares of `questions` of
    the demo model's task, for that model only.
    """

    linear: str | None
    group_size: int | None
    embeddings: str | None
    # None in bundles of releases that had `absmax` only.
    scales: str | None = None
    # Bytes of the integers with their scales, and of all weights that stay in float32; None in bundles of earlier
    # releases.
    quantized_bytes: int | None = None
    other_bytes: int | None = None
    positions: int | None = None
    max_difference: float | None = None
    argmax_agreement: float | None = None
    compared_in: str | None = None
    questions: int | None = None
    accuracy_before: float | None = None
    accuracy_after: float | None = None


class RoundedCache(Entry):
    """A cache that keeps fewer bits than the model writes: what it would take otherwise, and how far the logits moved.

    The differences are between the program and the float model over an exact cache, so where weights are quantised as
    well they are of both; None where nothing was compared.
    """

    dtype: str
    float_bytes: Count
    positions: int | None = None
    max_difference: float | None = None
    argmax_agreement: float | None = None


class RankedProgram(Entry):
    """A program in parts, one for each of `size` processes (tensor parallelism), in a folder of its own, `rank-0`.

    Layers and bytes of the cache are one rank's, `weights_bytes` those of the rank that has most; the manifest's own
    are of the whole model. `parts_of_heads` says of each layer into how many parts its heads are cut.
    """

    size: int = Field(ge=2)
    parts_of_heads: list[int]
    weights_bytes: Count


def rank_folder(rank: int) -> str:
    """Name of a rank's folder in a bundle."""
    return f"rank-{rank}"


def names_of(names: Iterable[str]) -> str:
    """Names for a message."""
    return ", ".join(names) or "none"


class Tensor(Entry):
    """One state tensor of a layer; `dims` names the dimensions of `shape`."""

    shape: list[Count]
    dims: list[str]
    dtype: Dtype
    bytes: Count

    @model_validator(mode="after")
    def _one_name_per_dimension(self) -> Tensor:
        if len(self.shape) != len(self.dims):
            raise ValueError(f"shape {self.shape} and dims {self.dims} differ in length")
        return self


class Layer(Entry):
    """One cache layer: `layer_type` is the model's name for it, the parts of `CacheLayer.config` say what ours is
    composed of.

    `states` and `indexer` are there where a layer keeps more than keys and values, `storage` where it keeps those.
    """

    layer_type: str
    policy: dict[str, Any]
    storage: dict[str, Any] | None = None
    kernel: dict[str, Any]
    states: dict[str, Any] | None = None
    indexer: dict[str, Any] | None = None
    tensors: dict[str, Tensor]
    bytes: Count

    @model_validator(mode="after")
    def _fits_its_parts(self) -> Layer:
        problem = self.problem()
        if problem is not None:
            raise ValueError(problem)
        return self

    @property
    def config(self) -> dict[str, Any]:
        """What `layer_from` takes."""
        parts = {name: getattr(self, name) for name in ("policy", "storage", "kernel", "states", "indexer")}
        return {name: part for name, part in parts.items() if part is not None}

    def problem(self) -> str | None:
        """What keeps the layer from being rebuilt of this, or None.

        A kernel that no one has imported yet is not judged: a target may bring it, so ask again when the target is
        there.
        """
        if not Kernel.has_kind(self.kernel.get("kind")):
            return None
        try:
            layer = layer_from(self.config, {})
        except InputError as error:
            return str(error)
        for name, tensor in self.tensors.items():
            declared = layer.state.get(name)
            if declared is not None and tuple(tensor.dims) != declared.dims:
                return (
                    f"tensors.{name}.dims: are {names_of(tensor.dims)}, those of a layer of {layer.label} are "
                    f"{names_of(declared.dims)}"
                )
        return layer.misfit({name: (tensor.shape, tensor.dtype) for name, tensor in self.tensors.items()})


# What the names of an explicit program's state tensors begin with, among the inputs and outputs of its methods.
STATE_PREFIX = "cache."

#: Name of a step's first output.
LOGITS = "logits"


class MethodIO(Entry):
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
    inputs: list[MethodIO]
    outputs: list[MethodIO]
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
        for io in self.inputs:
            unknown = [size for size in io.shape if isinstance(size, str) and size not in known]
            if unknown:
                raise ValueError(f"input {io.name!r} has a size {unknown[0]!r}, ranges has {names_of(self.ranges)}")
        return self

    @property
    def is_step(self) -> bool:
        """Whether it feeds tokens over the cache and gives logits."""
        return any(io.name == LOGITS for io in self.outputs)

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
            takes = any(io.name == ROPE_LENGTHS.name for io in method.inputs)
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
            explicit = any(io.name.startswith(STATE_PREFIX) for io in method.inputs)
            if method.is_step and explicit is not (self.form is Form.EXPLICIT):
                takes = "takes" if explicit else "does not take"
                raise ValueError(f"form is {self.form.value!r}, but method {name!r} {takes} the cache as an input")
        return self
