"""The manifest of a bundle: the fields of manifest.json by part (files, layers, methods), and their checks."""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    computed_field,
    field_validator,
    model_validator,
)
from transformers import GenerationConfig
from transformers.utils import logging as transformers_logging

from ..backends.base import ProgramDescription
from ..cache.layers import layer_from
from ..cache.layout import Layout
from ..common.tensors import TensorSpec
from ..errors import BundleError, InputError, first_line
from ..models.lora import ADAPTERS, WRITE_ADAPTER, LoraSlots, LoraTarget
from ..models.positions import RopeRule
from ..program.inputs.kinds import MOST_SAMPLES, MOST_SIDE
from ..program.methods import ROPE_LENGTHS, FixedInput, ItemFacts, ProgramMethod
from ..program.spec import Form, Logits
from .files import MANIFEST_FILE, check_file_name, checksum_of, rank_folder, read_fields

#: A size or a number of bytes that fits into 64 bits.
Count = Annotated[int, Field(ge=0, lt=2**63)]


def _is_dtype(name: str) -> str:
    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise ValueError(f"must be the name of a dtype of torch, got {name!r}")
    return name


#: The name of a dtype, such as `float32`.
Dtype = Annotated[str, AfterValidator(_is_dtype)]


class Entry(BaseModel):
    """A part of the manifest: unknown fields are refused, and it is immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class File(Entry):
    """A file of the bundle, by its path inside the folder; `details` are set by its target."""

    sha256: str
    bytes: Count
    holds: str
    details: dict[str, Any] = Field(default_factory=dict)


class Calibrated(Entry):
    """A record of the text that weights were calibrated on, by the digest of its tokens.

    `distance_before` and `distance_after` are those of layers' outputs on held-out text, with weights rounded to
    nearest and with the stored ones, relative to their magnitude. They are None for schemes that only scale inputs.
    """

    tokens: Count
    sha256: str
    layers: int = 0
    distance_before: float | None = None
    distance_after: float | None = None


class Quantized(Entry):
    """A record of quantized weights, and of how far the logits moved from the float model on random tokens.

    `compared_in` is the dtype of the float model. `accuracy_before` and `accuracy_after` are shares of correct answers
    to `questions` of the demo model's task, for that model only.
    """

    linear: str | None
    group_size: int | None
    embeddings: str | None
    # None in bundles of releases that only had `absmax`.
    scales: str | None = None
    # None in bundles whose experts, if any, are not quantized.
    experts: str | None = None
    # The form of integers that are those of the checkpoint; None for other schemes.
    kept: str | None = None
    # Largest number of weights that share a stored scale; None for whole rows, or groups of `group_size`.
    largest_group: int | None = None
    # None if no text was given.
    calibration: Calibrated | None = None
    # Bytes of the integers with their scales, and of the weights that are not quantized; None in older bundles.
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
    """A cache that stores fewer bits than the model computes: its size without rounding, and the change of the logits.

    The differences compare the program with the model that has the same weights, and rounds neither keys and values nor
    activations. They are None if nothing was compared.
    """

    dtype: str
    float_bytes: Count
    positions: int | None = None
    max_difference: float | None = None
    argmax_agreement: float | None = None


class Acceptance(Entry):
    """Tokens that a draft head proposed after pieces of a text, and how many of them the model accepted, greedily.

    `tokens` were generated in `steps` steps of the model. `proposed` and `accepted` are counts by position in a
    proposal. The text is known from the digest of its tokens.
    """

    text_tokens: Count
    sha256: str
    tokens: Count
    steps: Count
    proposed: list[Count]
    accepted: list[Count]

    @model_validator(mode="after")
    def _at_most_the_proposed_tokens(self) -> Acceptance:
        if len(self.proposed) != len(self.accepted) or any(map(operator.gt, self.accepted, self.proposed)):
            raise ValueError(f"accepted {self.accepted} must be at most proposed {self.proposed} at each position")
        return self

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step of the model gives; 1 without a draft."""
        return self.tokens / max(1, self.steps)

    def __str__(self) -> str:
        shares = ", ".join(f"{a / p:.0%}" for a, p in zip(self.accepted, self.proposed, strict=True) if p)
        return (
            f"{self.tokens_per_step:.2f} tokens per step of the model over {self.tokens:,} generated tokens; accepted "
            f"proposals by position {shares or 'none'}"
        )


class Drafted(Entry):
    """The draft head of a program: `mtp`, or the name of an EAGLE-3 head. `acceptance` is None if not measured."""

    head: str
    acceptance: Acceptance | None = None


class AppliedRecipe(Entry):
    """The recipe of an export, and the options that were given and differ from it."""

    name: str
    changed: dict[str, Any] = Field(default_factory=dict)


class RankedProgram(Entry):
    """A program in `size` parts for tensor parallelism, each in a folder such as `rank-0`.

    Layers and cache bytes of the manifest are those of one rank. `weights_bytes` is the largest of any rank, while the
    manifest's field counts the whole model. `parts_of_heads` is the number of parts of each layer's heads.
    """

    size: int = Field(ge=2)
    parts_of_heads: list[int]
    weights_bytes: Count


def names_of(names: Iterable[str]) -> str:
    """Return names for a message."""
    return ", ".join(names) or "none"


class Tensor(Entry):
    """A state tensor of a layer; `dims` names the dimensions of `shape`."""

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
    """A cache layer. `layer_type` is the model's name for it; the other parts are those of `CacheLayer.config`.

    `storage` is set if the layer keeps keys and values, `states` and `indexer` if it keeps more.
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
        """Argument of `layer_from`."""
        parts = {name: getattr(self, name) for name in ("policy", "storage", "kernel", "states", "indexer")}
        return {name: part for name, part in parts.items() if part is not None}

    def problem(self) -> str | None:
        """Return why the layer cannot be rebuilt from this entry, or None.

        Layers with an unknown layout give None, because their target may not be imported yet; call this again
        afterwards.
        """
        if not Layout.has_kind(self.kernel.get("kind")):
            return None
        try:
            layer = layer_from(self.config, {})
        except InputError as error:
            return str(error)
        for name, tensor in self.tensors.items():
            declared = layer.state.get(name)
            if declared is not None and tuple(tensor.dims) != declared.dims:
                return (
                    f"tensors.{name}.dims: must be {names_of(declared.dims)} for a {layer.label} layer, got "
                    f"{names_of(tensor.dims)}"
                )
        return layer.misfit({name: (tensor.shape, tensor.dtype) for name, tensor in self.tensors.items()})


# Prefix of state tensors among the inputs and outputs of an explicit program's methods.
STATE_PREFIX = "cache."

#: Name of a step's first output.
LOGITS = "logits"


class MethodIO(Entry):
    """An input or output of a method.

    `shape` has numbers and names of sizes: "batch", "length" and those in `ranges`.
    """

    name: str
    dtype: Dtype
    shape: list[Count | str]


class FixedEntry(Entry):
    """A fixed input, see `FixedInput`."""

    dtype: Dtype
    shape: list[Count]
    values: list[int | bool | float]


#: Height or width of an image in pixels.
Side = Annotated[int, Field(ge=1, le=MOST_SIDE)]


class ItemEntry(Entry):
    """Properties of the items that a method encodes, such as images, see `ItemFacts`."""

    token_id: int
    fixed: dict[str, FixedEntry] = {}
    positions: list[list[int]] = []
    advance: int = 0
    sees: Literal["", "item", "sliding item", "whole item", "items", "prompt"] = ""
    apart: bool = False
    tiles: int = Field(0, ge=0)
    tokens: int = Field(0, ge=0)
    size: tuple[Side, Side] | None = None
    samples: int = Field(0, ge=0, le=MOST_SAMPLES)

    def described(self) -> ItemFacts:
        """Return the entry as a program's `ItemFacts`."""
        fixed = {name: FixedInput(one.dtype, tuple(one.shape), tuple(one.values)) for name, one in self.fixed.items()}
        positions = tuple(map(tuple, self.positions))
        told = self.advance, self.sees, self.apart, self.tiles, self.tokens, self.size, self.samples
        return ItemFacts(self.token_id, fixed, positions, *told)


class MethodEntry(Entry):
    """A method of the program, see `ProgramMethod`."""

    min_length: int = Field(ge=1, lt=2**63)
    max_length: int = Field(ge=1, lt=2**63)
    # `ProgramMethod.kv_read_len`, under the name in the file format.
    read_length: int | None = Field(default=None, ge=1, lt=2**63)
    # Set in files from before `scored_tokens`, which then equals max_length.
    scores: bool = False
    scored_tokens: Count = 0
    # Smallest and largest value of every size named in a shape, besides "batch" and "length".
    ranges: dict[str, tuple[Count, Count]] = {}
    inputs: list[MethodIO]
    outputs: list[MethodIO]
    # image_grid_thw of every image that the method takes.
    grid: tuple[int, int, int] | None = None
    # Items that the method encodes; older bundles have a grid only.
    item: ItemEntry | None = None
    # "length" must be a multiple of this.
    multiple: int = Field(default=1, ge=1, lt=2**63)

    @model_validator(mode="after")
    def _range(self) -> MethodEntry:
        if self.min_length > self.max_length:
            raise ValueError(f"min_length must be at most max_length {self.max_length}, got {self.min_length}")
        return self

    @model_validator(mode="after")
    def _every_size_is_known(self) -> MethodEntry:
        known = {"batch", "length", *self.ranges}
        for io in self.inputs:
            unknown = [size for size in io.shape if isinstance(size, str) and size not in known]
            if unknown:
                raise ValueError(
                    f"input {io.name!r} must have sizes of ranges ({names_of(self.ranges)}), got {unknown[0]!r}"
                )
        return self

    @model_validator(mode="after")
    def _tokens_and_positions_come_first(self) -> MethodEntry:
        names = [io.name for io in self.inputs]
        twice = [name for index, name in enumerate(names) if name in names[:index]]
        if twice:
            raise ValueError(f"inputs must have different names, got {twice[0]!r} twice")
        if self.is_step and names[1:2] != ["input_pos"]:
            raise ValueError(f"a step's second input must be 'input_pos', got {names_of(names[1:2])}")
        codebooks = self.inputs[0].shape[2:] if names[:1] == ["input_ids"] else []
        if len(codebooks) > 1 or any(isinstance(size, str) for size in codebooks):
            raise ValueError(
                "input 'input_ids' must have the shape batch, length and at most a number of codebooks, got "
                f"{self.inputs[0].shape}"
            )
        return self

    @property
    def is_step(self) -> bool:
        """True if the method feeds tokens over the cache and returns logits."""
        return any(io.name == LOGITS for io in self.outputs)

    @property
    def only_scores(self) -> bool:
        """True if the method only scores tokens, see `ProgramMethod.only_scores`."""
        return self.described("").only_scores

    def described(self, name: str) -> ProgramMethod:
        """Return the method as a runner's `ProgramMethod`, without state tensors."""
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
        """Value of `read_length`, under the name that `ProgramMethod` uses."""
        return self.read_length


class RopeEntry(Entry):
    """The lengths at which the factors of the model's RoPE change, see `RopeRule`."""

    kind: Literal["longrope", "dynamic"]
    borders: list[int] = Field(min_length=1, max_length=64)
    recomputes: bool = False

    @field_validator("borders")
    @classmethod
    def _ascend(cls, borders: list[int]) -> list[int]:
        if borders[0] < 1 or any(before >= after for before, after in itertools.pairwise(borders)):
            raise ValueError(f"borders must ascend from 1 on, got {borders}")
        return borders

    def described(self) -> RopeRule:
        """Return the entry as a session's `RopeRule`."""
        return RopeRule(self.kind, tuple(self.borders), self.recomputes)


class LoraTargetEntry(Entry):
    """A linear layer with slots for adapters: its name in the model and its sizes."""

    name: str
    inputs: Count
    outputs: Count


class LoraEntry(Entry):
    """The slots for LoRA adapters of a program, see `LoraSlots`."""

    slots: int = Field(ge=1, lt=2**31)
    rank: int = Field(ge=1, lt=2**31)
    dtype: Dtype
    targets: list[LoraTargetEntry] = Field(min_length=1)

    def described(self) -> LoraSlots:
        """Return the entry as a session's `LoraSlots`."""
        targets = tuple(LoraTarget(one.name, one.inputs, one.outputs) for one in self.targets)
        return LoraSlots(self.slots, self.rank, self.dtype, targets)


class ProgramEntry(Entry):
    """The program's form and methods."""

    form: Form
    logits: Logits
    batch_size: int = Field(ge=1, lt=2**63)
    max_cache_len: int = Field(ge=1, lt=2**63)
    methods: dict[str, MethodEntry]
    # True if all rows must have the same length, see `needs_equal_rows`.
    equal_rows: bool = False
    # Set if steps take the lengths that select RoPE's factors.
    rope: RopeEntry | None = None
    # Length whose factors RoPE has at every position, see `fix_rope`; None for those of each sequence.
    rope_length: int | None = Field(default=None, ge=1, lt=2**63)
    # Set if steps take adapters.
    lora: LoraEntry | None = None

    @model_validator(mode="after")
    def _lengths_have_a_rule(self) -> ProgramEntry:
        for name, method in self.methods.items():
            takes = any(io.name == ROPE_LENGTHS.name for io in method.inputs)
            if takes and self.rope is None:
                raise ValueError(f"method {name!r} takes {ROPE_LENGTHS.name}, but rope is missing")
            adapted = any(io.name == ADAPTERS.name for io in method.inputs)
            if adapted and self.lora is None:
                raise ValueError(f"method {name!r} takes {ADAPTERS.name}, but lora is missing")
        if self.lora is not None:
            writer = self.methods.get(WRITE_ADAPTER)
            if writer is None or writer.described(WRITE_ADAPTER).inputs != self.lora.described().inputs:
                raise ValueError(f"lora: method {WRITE_ADAPTER!r} must take the tensors of its targets")
        return self

    @field_validator("methods")
    @classmethod
    def _can_decode(cls, methods: dict[str, MethodEntry]) -> dict[str, MethodEntry]:
        if not any(
            method.is_step and method.min_length == 1 and method.read_length is None for method in methods.values()
        ):
            raise ValueError(
                f"one of the methods must take one token at every position, got {', '.join(methods) or 'none'}"
            )
        return methods

    @model_validator(mode="after")
    def _state_is_where_the_form_says(self) -> ProgramEntry:
        for name, method in self.methods.items():
            explicit = any(io.name.startswith(STATE_PREFIX) for io in method.inputs)
            if method.is_step and explicit is not (self.form is Form.EXPLICIT):
                takes = "takes" if explicit else "does not take"
                raise ValueError(f"form is {self.form.value!r}, but method {name!r} {takes} the cache as an input")
        return self


class Manifest(Entry):
    """The content of manifest.json.

    Two exports of one model differ only in `created` and `checksum`, if the target's files are reproducible.
    """

    schema_version: int
    created: str
    target: str
    source: str
    model_type: str
    architecture: str
    program: ProgramEntry
    vocab_size: int = Field(ge=1, lt=2**63)
    #: Number of logits, if it differs from `vocab_size`.
    logits_size: int | None = Field(default=None, ge=1, lt=2**63)
    dtype: Dtype
    layers: list[Layer] = Field(min_length=1)
    cache_bytes: Count
    weights_bytes: Count
    fingerprint: str
    tokenizer: str | None
    config: dict[str, Any]
    generation_config: dict[str, Any]
    packages: dict[str, str]
    files: dict[str, File]
    options: dict[str, Any]
    verification: dict[str, Any] | None
    quantization: Quantized | None = None
    kv_cache: RoundedCache | None = None
    # Dtype of the weights before they were converted to `dtype`; None in bundles of releases that did not convert.
    stored_dtype: Dtype | None = None
    # Changes made to the weights before the export, such as merging an adapter, one per line.
    remarks: list[str] = Field(default_factory=list)
    # None in bundles of releases without recipes.
    recipe: AppliedRecipe | None = None
    # None without a draft head, and in bundles of releases that did not record it.
    draft: Drafted | None = None
    # Set if the program has one part for each of several processes.
    ranks: RankedProgram | None = None

    @field_validator("files")
    @classmethod
    def _inside(cls, files: dict[str, File]) -> dict[str, File]:
        for name in files:
            check_file_name(name)
        return files

    @field_validator("generation_config")
    @classmethod
    def _can_be_read(cls, fields: dict[str, Any]) -> dict[str, Any]:
        for name in ("eos_token_id", "pad_token_id"):
            given = fields.get(name)
            ids = given if name == "eos_token_id" and isinstance(given, list) else [] if given is None else [given]
            # Checked by type, because True is also an int.
            if not all(type(token) is int for token in ids):
                raise ValueError(f"{name} must be a token id, got {given!r}")
        verbosity = transformers_logging.get_verbosity()
        # Hide transformers' advice, which is for users of the config, not for readers of a manifest.
        transformers_logging.set_verbosity_error()
        try:
            GenerationConfig.from_dict(dict(fields))
        except Exception as error:  # the config's checks raise errors of several classes
            raise ValueError(first_line(error)) from error
        finally:
            transformers_logging.set_verbosity(verbosity)
        return fields

    @model_validator(mode="after")
    def _one_batch_size(self) -> Manifest:
        for index, layer in enumerate(self.layers):
            for name, tensor in layer.tensors.items():
                rows = dict(zip(tensor.dims, tensor.shape, strict=True)).get("batch_size", self.program.batch_size)
                if rows != self.program.batch_size:
                    raise ValueError(
                        f"program.batch_size: is {self.program.batch_size}, but layers.{index}.tensors.{name} has "
                        f"{rows} rows"
                    )
        return self

    @model_validator(mode="after")
    def _a_part_for_each_rank(self) -> Manifest:
        if self.ranks is not None:
            if len(self.ranks.parts_of_heads) != len(self.layers):
                raise ValueError(
                    f"ranks: parts_of_heads must have {len(self.layers)} entries, got {len(self.ranks.parts_of_heads)}"
                )
            if any(parts < 1 or self.ranks.size % parts for parts in self.ranks.parts_of_heads):
                raise ValueError(
                    f"ranks: parts_of_heads must divide {self.ranks.size}, got {self.ranks.parts_of_heads}"
                )
            for rank in range(self.ranks.size):
                if not any(name.startswith(f"{rank_folder(rank)}/") for name in self.files):
                    raise ValueError(f"ranks: size is {self.ranks.size}, but no file is in {rank_folder(rank)}")
        return self

    @computed_field  # type: ignore[prop-decorator]
    @property
    def checksum(self) -> str:
        """Sha256 of every other field, see `checksum_of`."""
        return checksum_of(self.model_dump(mode="json", exclude={"checksum"}))

    @property
    def parts_of_heads(self) -> tuple[int, ...]:
        """Number of parts of each layer's heads over ranks; empty for a program in one part."""
        return () if self.ranks is None else tuple(self.ranks.parts_of_heads)

    def files_of(self, rank: int | None) -> list[str]:
        """Return the names of one rank's files, or with None the names of the files that all ranks share."""
        if rank is not None:
            return [name for name in self.files if name.startswith(f"{rank_folder(rank)}/")]
        parts = tuple(f"{rank_folder(one)}/" for one in range(0 if self.ranks is None else self.ranks.size))
        return [name for name in self.files if not name.startswith(parts)]

    def description(self, rank: int | None = None) -> ProgramDescription:
        """Return the description that the target's runner takes; of a program for ranks, that of `rank`."""
        folder = "" if rank is None else f"{rank_folder(rank)}/"
        return ProgramDescription(
            methods={name: method.described(name) for name, method in self.program.methods.items()},
            form=self.program.form,
            logits=self.program.logits,
            batch_size=self.program.batch_size,
            layers=[
                {
                    "config": layer.config,
                    "tensors": {
                        name: {"shape": tensor.shape, "dtype": tensor.dtype} for name, tensor in layer.tensors.items()
                    },
                }
                for layer in self.layers
            ],
            details={
                name.removeprefix(folder): file.details for name, file in self.files.items() if name.startswith(folder)
            },
            lora=None if self.program.lora is None else self.program.lora.described(),
        )

    def content(self) -> bytes:
        """Return the bytes of manifest.json."""
        return (json.dumps(self.model_dump(mode="json"), indent=2) + "\n").encode()

    def write(self, folder: Path) -> bytes:
        """Write manifest.json, which makes the folder a bundle, and return its bytes."""
        content = self.content()
        (folder / MANIFEST_FILE).write_bytes(content)
        return content

    @classmethod
    def read(cls, folder: Path, check: Callable[[bytes], None] | None = None) -> Manifest:
        """Read and check manifest.json, see `read_fields`.

        Raises:
            BundleError: If the file is missing, unreadable, damaged, or of another schema version.
        """
        fields = read_fields(folder, check)
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            what = first["msg"].removeprefix("Value error, ")
            what = f"{where}: {what}" if where else what
            raise BundleError(f"{folder / MANIFEST_FILE} is damaged: {what}; export the model again") from error
