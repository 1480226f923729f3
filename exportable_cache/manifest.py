"""What a bundle says about itself: manifest.json, its fields and their meaning."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from transformers import GenerationConfig, PreTrainedModel

from .backends.base import ProgramDescription
from .errors import BundleError
from .files import PARTIAL
from .layout import layer_types_and_windows
from .program import Form, Logits, Program
from .program import Method as ProgramMethod

SCHEMA_VERSION = 1
MANIFEST_FILE = "manifest.json"

_PACKAGES = ("exportable-cache", "torch", "transformers")


class _Entry(BaseModel):
    # `class` is a keyword, so that field goes by an alias; files and dumps both use it.
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, serialize_by_alias=True)


class Signature(_Entry):
    """One input or output: `shape` has numbers, and "batch" and "length" where a method takes any length of its range."""

    name: str
    dtype: str
    shape: list[int | str]


class Method(_Entry):
    """One entry point of the program."""

    min_length: int = Field(ge=1)
    max_length: int = Field(ge=1)
    inputs: list[Signature]
    outputs: list[Signature]


class ProgramEntry(_Entry):
    """The program's form and methods."""

    form: Form
    logits: Logits
    batch_size: int = Field(ge=1)
    max_cache_len: int = Field(ge=1)
    methods: dict[str, Method]


class Tensor(_Entry):
    """One state tensor of a layer; `dims` names the dimensions of `shape`."""

    shape: list[int]
    dims: list[str]
    dtype: str
    bytes: int


class Layer(_Entry):
    """One cache layer: `layer_type` is the model's name for it, `class` ours, `config` rebuilds it."""

    layer_type: str
    class_name: str = Field(alias="class")
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    bytes: int


class File(_Entry):
    """One file of the bundle, by its path inside the folder."""

    sha256: str
    bytes: int
    holds: str


class Manifest(_Entry):
    """The whole of manifest.json. Two exports of one model differ in `created` only, if the target's files do not."""

    schema_version: int
    created: str
    target: str
    source: str
    model_type: str
    architecture: str
    program: ProgramEntry
    vocab_size: int = Field(ge=1)
    dtype: str
    layers: list[Layer]
    cache_bytes: int
    weights_bytes: int
    tokenizer: str | None
    config: dict[str, Any]
    generation_config: dict[str, Any]
    packages: dict[str, str]
    files: dict[str, File]
    options: dict[str, Any]
    verification: dict[str, Any] | None

    @field_validator("files")
    @classmethod
    def _inside(cls, files: dict[str, File]) -> dict[str, File]:
        for name in files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts:
                raise ValueError(f"file {name!r} lies outside the bundle")
        return files

    def description(self) -> ProgramDescription:
        """What the target's runner is told."""
        return ProgramDescription(
            methods={
                name: ProgramMethod(name, method.min_length, method.max_length) for name, method in self.program.methods.items()
            },
            form=self.program.form,
            logits=self.program.logits,
            batch_size=self.program.batch_size,
            layers=[
                {
                    "class": layer.class_name,
                    "config": layer.config,
                    "tensors": {name: {"shape": tensor.shape, "dtype": tensor.dtype} for name, tensor in layer.tensors.items()},
                }
                for layer in self.layers
            ],
        )

    def write(self, folder: Path) -> None:
        """Write manifest.json: from then on the folder is a bundle."""
        (folder / MANIFEST_FILE).write_text(json.dumps(self.model_dump(mode="json"), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read manifest.json.

        Raises:
            BundleError: If it is missing, unreadable, or of another schema version.
        """
        path = folder / MANIFEST_FILE
        if not folder.is_dir():
            raise BundleError(f"there is no folder {folder}; export a model to it first")
        if not path.is_file():
            raise BundleError(f"{folder} is no bundle: it has no {MANIFEST_FILE}; pass a folder that export wrote")
        # Killed between writing the manifest and the rename, an export leaves a folder that looks whole.
        if folder.name.startswith(".") and folder.name.endswith(PARTIAL):
            raise BundleError(f"{folder} is what an interrupted export left; delete it, and export the model again")
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BundleError(f"cannot read {path}: {error}; export the model again") from error
        # Before anything else is looked at: other versions have other fields.
        version = fields.get("schema_version") if isinstance(fields, dict) else None
        if version != SCHEMA_VERSION:
            raise BundleError(
                f"{path} has schema version {version!r}, this release reads {SCHEMA_VERSION}; "
                "export the model again, or install the release that wrote it"
            )
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise BundleError(f"{path} is damaged: {where}: {first['msg']}; export the model again") from error


def describe(
    program: Program,
    *,
    target: str,
    packages: tuple[str, ...],
    source: str,
    max_cache_len: int,
    tokenizer: str | None,
    files: Mapping[str, File],
    options: Mapping[str, Any],
) -> Manifest:
    """The manifest of a program that has been lowered, not verified yet.

    Args:
        program: What was lowered.
        target: Its target, with the `packages` whose versions decide whether it can be opened.
        source: Where the model came from.
        max_cache_len: As asked for.
        tokenizer: Class name, or None where there is none.
        files: What is in the folder.
        options: Of the target, as given.
    """
    model, cache = program.model, program.cache
    layer_types = [layer_type for layer_type, _ in layer_types_and_windows(model.config)]
    layers = [
        Layer(
            layer_type=layer_type,
            class_name=type(layer).__name__,
            config=layer.config(),
            tensors={
                name: Tensor(
                    shape=list(tensor.shape),
                    dims=list(layer.state[name].dims),
                    dtype=dtype_name(tensor.dtype),
                    bytes=tensor.nbytes,
                )
                for name, tensor in layer.named_state()
            },
            bytes=layer.nbytes,
        )
        for layer_type, layer in zip(layer_types, cache.layers, strict=True)
    ]
    vocab_size = model.get_input_embeddings().weight.shape[0]
    return Manifest(
        schema_version=SCHEMA_VERSION,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        target=target,
        source=source,
        model_type=model.config.model_type,
        architecture=type(model).__name__,
        program=ProgramEntry(
            form=program.form,
            logits=program.logits,
            batch_size=program.batch_size,
            max_cache_len=max_cache_len,
            methods={name: _method(program, method, vocab_size) for name, method in program.methods.items()},
        ),
        vocab_size=vocab_size,
        dtype=dtype_name(model.dtype),
        layers=layers,
        cache_bytes=cache.nbytes,
        weights_bytes=weights_bytes(model),
        tokenizer=tokenizer,
        config=config_fields(model),
        generation_config=generation_config_fields(model),
        packages=installed_versions(packages),
        files=dict(files),
        options=json.loads(json.dumps(dict(options), default=str)),
        verification=None,
    )


def installed_versions(packages: tuple[str, ...] = ()) -> dict[str, str]:
    """Versions of Python, of the packages every program depends on, and of `packages`, where installed."""
    versions = {"python": platform.python_version()}
    for name in dict.fromkeys((*_PACKAGES, *packages)):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def config_fields(model: PreTrainedModel) -> dict[str, Any]:
    """The model's config as JSON, with its class and dtype, without where it was loaded from."""
    fields = json.loads(model.config.to_json_string(use_diff=False))
    fields.pop("_name_or_path", None)
    return {**fields, "architectures": [type(model).__name__], "dtype": dtype_name(model.dtype)}


def generation_config_fields(model: PreTrainedModel) -> dict[str, Any]:
    """What the model's generation config sets, as JSON."""
    return json.loads((model.generation_config or GenerationConfig()).to_json_string(use_diff=True))


def weights_bytes(model: torch.nn.Module) -> int:
    """Bytes of the parameters, tied ones counted once."""
    return sum(parameter.nbytes for parameter in model.parameters())


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def _method(program: Program, method: ProgramMethod, vocab_size: int) -> Method:
    length: int | str = method.min_length if method.min_length == method.max_length else "length"
    inputs = [
        Signature(name="input_ids", dtype="int64", shape=["batch", length]),
        Signature(name="input_pos", dtype="int64", shape=["batch"]),
    ]
    logits_shape: list[int | str] = ["batch", vocab_size] if program.logits is Logits.LAST else ["batch", length, vocab_size]
    outputs = [Signature(name="logits", dtype=dtype_name(program.model.dtype), shape=logits_shape)]
    if program.form is Form.EXPLICIT:
        state = [
            Signature(name=f"cache.{name}", dtype=dtype_name(tensor.dtype), shape=["batch", *tensor.shape[1:]])
            for name, tensor in program.cache.named_state()
        ]
        inputs, outputs = inputs + state, outputs + state
    return Method(min_length=method.min_length, max_length=method.max_length, inputs=inputs, outputs=outputs)
