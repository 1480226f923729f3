"""What a bundle says about itself: manifest.json, its fields and their meaning."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, computed_field, field_validator, model_validator
from transformers import GenerationConfig
from transformers.utils import logging as transformers_logging

from ..backends.base import ProgramDescription
from ..cache.kernel import Kernel
from ..cache.layers import layer_from
from ..common.files import PARTIAL, retired_folder
from ..common.tensor_spec import TensorSpec
from ..errors import BundleError, InputError, first_line
from ..program.entry_points import Method as ProgramMethod
from ..program.spec import Form, Logits

# 2: layers by their parts, not by a class.
SCHEMA_VERSION = 2
MANIFEST_FILE = "manifest.json"

# What the names of an explicit program's state tensors begin with, among the inputs and outputs of its methods.
STATE_PREFIX = "cache."

#: Name of a step's first output.
LOGITS = "logits"


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Signature(_Entry):
    """One input or output: `shape` has numbers, and names of sizes: "batch", "length" and those of the method's
    `ranges`.
    """

    name: str
    dtype: str
    shape: list[int | str]


class Method(_Entry):
    """One entry point of the program, see `methods.Method`."""

    min_length: int = Field(ge=1)
    max_length: int = Field(ge=1)
    read_length: int | None = Field(default=None, ge=1)
    scores: bool = False
    # Least and most of every size named in a shape, besides "batch" and "length".
    ranges: dict[str, tuple[int, int]] = {}
    inputs: list[Signature]
    outputs: list[Signature]
    # image_grid_thw of every image that it takes.
    grid: tuple[int, int, int] | None = None
    # Of what "length" is a multiple.
    multiple: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _range(self) -> Method:
        if self.min_length > self.max_length:
            raise ValueError(f"min_length is {self.min_length}, above max_length {self.max_length}")
        return self

    @model_validator(mode="after")
    def _every_size_is_known(self) -> Method:
        known = {"batch", "length", *self.ranges}
        for signature in self.inputs:
            unknown = [size for size in signature.shape if isinstance(size, str) and size not in known]
            if unknown:
                raise ValueError(
                    f"input {signature.name!r} has a size {unknown[0]!r}, ranges has {_names(self.ranges)}"
                )
        return self

    @property
    def is_step(self) -> bool:
        """Whether it feeds tokens over the cache and gives logits."""
        return any(signature.name == LOGITS for signature in self.outputs)

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
            self.scores,
            self.grid,
            self.multiple,
        )


class ProgramEntry(_Entry):
    """The program's form and methods."""

    form: Form
    logits: Logits
    batch_size: int = Field(ge=1)
    max_cache_len: int = Field(ge=1)
    methods: dict[str, Method]
    # Whether all rows have to hold as many tokens, see `row_lengths.needs_equal_rows`.
    equal_rows: bool = False

    @field_validator("methods")
    @classmethod
    def _can_decode(cls, methods: dict[str, Method]) -> dict[str, Method]:
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


class Tensor(_Entry):
    """One state tensor of a layer; `dims` names the dimensions of `shape`."""

    shape: list[int]
    dims: list[str]
    dtype: str
    bytes: int

    @model_validator(mode="after")
    def _one_name_per_dimension(self) -> Tensor:
        if len(self.shape) != len(self.dims):
            raise ValueError(f"shape {self.shape} and dims {self.dims} differ in length")
        return self


class Layer(_Entry):
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
    bytes: int

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
        if self.kernel.get("kind") not in Kernel.kinds:
            return None
        try:
            layer = layer_from(self.config, {})
        except InputError as error:
            return str(error)
        if set(self.tensors) != set(layer.state):
            return f"tensors: has {_names(self.tensors)}, a layer of {layer.label} has {_names(layer.state)}"
        sizes = {} if layer.storage is None else dict(layer.kernel.sizes(layer.policy))
        for name, tensor in self.tensors.items():
            declared = layer.state[name]
            if tuple(tensor.dims) != declared.dims:
                return (
                    f"tensors.{name}.dims: are {_names(tensor.dims)}, those of a layer of {layer.label} are "
                    f"{_names(declared.dims)}"
                )
            if tensor.dtype != str(declared.dtype).removeprefix("torch."):
                return f"tensors.{name}.dtype: is {tensor.dtype}, a layer of {layer.label} keeps {declared.dtype}"
            for dim, size in zip(tensor.dims, tensor.shape, strict=True):
                if sizes.setdefault(dim, size) != size:
                    return (
                        f"tensors.{name}.shape: {dim} is {size}, it is {sizes[dim]} by the policy or in another tensor"
                    )
        return None


class File(_Entry):
    """One file of the bundle, by its path inside the folder; `details` are its target's."""

    sha256: str
    bytes: int
    holds: str
    details: dict[str, Any] = Field(default_factory=dict)


class Quantized(_Entry):
    """How weights were quantised, and what that did to the logits: the program against the float model, on random
    tokens.

    `compared_in` is the dtype of the float model. `accuracy_before` and `accuracy_after` are shares of `questions` of
    the demo model's task, for that model only.
    """

    linear: str | None
    group_size: int | None
    embeddings: str | None
    positions: int | None = None
    max_difference: float | None = None
    argmax_agreement: float | None = None
    compared_in: str | None = None
    questions: int | None = None
    accuracy_before: float | None = None
    accuracy_after: float | None = None


class RoundedCache(_Entry):
    """A cache that keeps fewer bits than the model writes: what it would take otherwise, and how far the logits moved.

    The differences are between the program and the float model over an exact cache, so where weights are quantised as
    well they are of both; None where nothing was compared.
    """

    dtype: str
    float_bytes: int
    positions: int | None = None
    max_difference: float | None = None
    argmax_agreement: float | None = None


class Manifest(_Entry):
    """The whole of manifest.json.

    Two exports of one model differ in `created` and so in `checksum` only, if the target's files do not.
    """

    schema_version: int
    created: str
    target: str
    source: str
    model_type: str
    architecture: str
    program: ProgramEntry
    vocab_size: int = Field(ge=1)
    dtype: str
    layers: list[Layer] = Field(min_length=1)
    cache_bytes: int
    weights_bytes: int
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
    # Of the weights before they were converted to `dtype`; None in bundles of releases that always kept it.
    stored_dtype: str | None = None
    # What was done to the weights as they came, such as merging an adapter, a line each.
    remarks: list[str] = Field(default_factory=list)

    @field_validator("files")
    @classmethod
    def _inside(cls, files: dict[str, File]) -> dict[str, File]:
        for name in files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts:
                raise ValueError(f"file {name!r} lies outside the bundle")
        return files

    @field_validator("generation_config")
    @classmethod
    def _can_be_read(cls, fields: dict[str, Any]) -> dict[str, Any]:
        for name in ("eos_token_id", "pad_token_id"):
            given = fields.get(name)
            ids = given if name == "eos_token_id" and isinstance(given, list) else [] if given is None else [given]
            # By type: True is an int, too, and these are compared with tokens unconverted.
            if not all(type(token) is int for token in ids):
                raise ValueError(f"{name} is {given!r}; it must be a token id")
        verbosity = transformers_logging.get_verbosity()
        # What it would advise on is for who loads the config to use it, not for who reads a manifest.
        transformers_logging.set_verbosity_error()
        try:
            GenerationConfig.from_dict(dict(fields))
        except Exception as error:  # fields are checked with errors of several classes
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
                        f"program.batch_size: is {self.program.batch_size}, layers.{index}.tensors.{name} has {rows} "
                        "rows"
                    )
        return self

    @computed_field
    @property
    def checksum(self) -> str:
        """sha256 of every other field, see `checksum_of`."""
        return checksum_of(self.model_dump(mode="json", exclude={"checksum"}))

    def description(self) -> ProgramDescription:
        """What the target's runner is told."""
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
            details={name: file.details for name, file in self.files.items()},
        )

    def write(self, folder: Path) -> bytes:
        """Write manifest.json: from then on the folder is a bundle. Returns what the file holds."""
        content = (json.dumps(self.model_dump(mode="json"), indent=2) + "\n").encode()
        (folder / MANIFEST_FILE).write_bytes(content)
        return content

    @classmethod
    def read(cls, folder: Path, check: Callable[[bytes], None] | None = None) -> Manifest:
        """Read manifest.json.

        Args:
            check: Given the bytes that are read, before anything is made of them; raises where they are refused.

        Raises:
            BundleError: If it is missing, unreadable, of another schema version, or is not what was written.
        """
        path = folder / MANIFEST_FILE
        if not folder.is_dir():
            retired = retired_folder(folder)
            if retired is not None:
                raise BundleError(
                    f"there is no folder {folder}, but an export that was killed while it replaced it left the earlier "
                    f"one: rename {retired} to it, or export the model again"
                )
            raise BundleError(f"there is no folder {folder}; export a model to it first")
        if not path.is_file():
            raise BundleError(f"{folder} is no bundle: it has no {MANIFEST_FILE}; pass a folder that export wrote")
        # Killed between writing the manifest and the rename, an export leaves a folder that looks whole.
        if folder.name.startswith(".") and folder.name.endswith(PARTIAL):
            raise BundleError(f"{folder} is what an interrupted export left; delete it, and export the model again")
        try:
            content = path.read_bytes()
            if check is not None:
                check(content)
            fields = json.loads(content)
        except (OSError, ValueError, RecursionError, MemoryError) as error:
            raise BundleError(f"cannot read {path}: {error}; export the model again") from error
        # Before anything else is looked at: other versions have other fields.
        version = fields.get("schema_version") if isinstance(fields, dict) else None
        if version != SCHEMA_VERSION:
            raise BundleError(
                f"{path} has schema version {version!r}, this release reads {SCHEMA_VERSION}; "
                "export the model again, or install the release that wrote it"
            )
        recorded, found = fields.pop("checksum", None), checksum_of(fields)
        if recorded != found:
            says = f"it records {recorded[:12]}..." if isinstance(recorded, str) else "it records none"
            raise BundleError(
                f"{path} is damaged: checksum: its content has sha256 {found[:12]}..., {says}; "
                "copy the bundle again, or export the model again"
            )
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            what = first["msg"].removeprefix("Value error, ")
            what = f"{where}: {what}" if where else what
            raise BundleError(f"{path} is damaged: {what}; export the model again") from error


def checksum_of(fields: Mapping[str, Any]) -> str:
    """sha256 of a manifest's fields, all but `checksum`, as JSON that does not depend on their order
    or on white space.
    """
    content = {name: value for name, value in fields.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode("ascii")).hexdigest()


def _names(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
