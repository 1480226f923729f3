"""What a bundle says about itself: manifest.json, its fields and their meaning."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import Field, ValidationError, computed_field, field_validator, model_validator
from transformers import GenerationConfig
from transformers.utils import logging as transformers_logging

from ..backends.base import ProgramDescription
from ..common.fs.files import PARTIAL, retired_folder
from ..errors import BundleError, first_line
from .entries import Count, Dtype, Entry, File, Layer, ProgramEntry, Quantized, RankedProgram, RoundedCache, rank_folder

# 2: layers by their parts, not by a class.
SCHEMA_VERSION = 2
MANIFEST_FILE = "manifest.json"
#: Packages that every program depends on.
_PACKAGES = ("exportable-cache", "torch", "transformers")


class Manifest(Entry):
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
    vocab_size: int = Field(ge=1, lt=2**63)
    #: Tokens that have a logit, where that is another number.
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
    # Of the weights before they were converted to `dtype`; None in bundles of releases that always kept it.
    stored_dtype: Dtype | None = None
    # What was done to the weights as they came, such as merging an adapter, a line each.
    remarks: list[str] = Field(default_factory=list)
    # Of a program in parts, one for each of several processes.
    ranks: RankedProgram | None = None

    @field_validator("files")
    @classmethod
    def _inside(cls, files: dict[str, File]) -> dict[str, File]:
        for name in files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts:
                raise ValueError(f"file {name!r} lies outside the bundle")
            # What file systems take; others raise errors of their own, or take another file's name.
            if not name.isprintable() or any(len(part.encode()) > 255 for part in path.parts) or len(name) > 1024:
                raise ValueError(f"file {name[:64]!r}... must have a name of printable characters, at most 255 bytes")
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

    @model_validator(mode="after")
    def _a_part_for_each_rank(self) -> Manifest:
        if self.ranks is not None:
            if len(self.ranks.parts_of_heads) != len(self.layers):
                raise ValueError(f"ranks: parts of {len(self.ranks.parts_of_heads)} layers, of {len(self.layers)}")
            if any(parts < 1 or self.ranks.size % parts for parts in self.ranks.parts_of_heads):
                raise ValueError(f"ranks: {self.ranks.size} ranks have no equal parts of {self.ranks.parts_of_heads}")
            for rank in range(self.ranks.size):
                if not any(name.startswith(f"{rank_folder(rank)}/") for name in self.files):
                    raise ValueError(f"ranks: size is {self.ranks.size}, but no file is in {rank_folder(rank)}")
        return self

    @computed_field  # type: ignore[prop-decorator]
    @property
    def checksum(self) -> str:
        """sha256 of every other field, see `checksum_of`."""
        return checksum_of(self.model_dump(mode="json", exclude={"checksum"}))

    @property
    def parts_of_heads(self) -> tuple[int, ...]:
        """Of each layer, into how many parts its heads are cut over ranks; nothing of a program in one part."""
        return () if self.ranks is None else tuple(self.ranks.parts_of_heads)

    def files_of(self, rank: int | None) -> list[str]:
        """Names of the files of one rank's part, or, of None, of those that no rank has for itself."""
        if rank is not None:
            return [name for name in self.files if name.startswith(f"{rank_folder(rank)}/")]
        parts = tuple(f"{rank_folder(one)}/" for one in range(0 if self.ranks is None else self.ranks.size))
        return [name for name in self.files if not name.startswith(parts)]

    def description(self, rank: int | None = None) -> ProgramDescription:
        """What the target's runner is told, of a program for ranks the one of `rank`."""
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
        )

    def content(self) -> bytes:
        """Return the content of manifest.json."""
        return (json.dumps(self.model_dump(mode="json"), indent=2) + "\n").encode()

    def write(self, folder: Path) -> bytes:
        """Write manifest.json, which makes the folder a bundle, and return the content of the file."""
        content = self.content()
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
            # Half a character, which JSON can spell, is none that a name or a message can have.
            json.dumps(fields, ensure_ascii=False).encode()
        except (OSError, ValueError, RecursionError, MemoryError) as error:
            raise BundleError(f"cannot read {path}: {error}; export the model again") from error
        if not isinstance(fields, dict):
            raise BundleError(f"{path} is damaged: it holds no JSON object; export the model again")
        # Before anything else is looked at: other versions have other fields.
        version = fields.get("schema_version")
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


def installed_versions(packages: tuple[str, ...] = ()) -> dict[str, str]:
    """Versions of Python, of the packages every program depends on, and of `packages`, where installed."""
    versions = {"python": platform.python_version()}
    for name in dict.fromkeys((*_PACKAGES, *packages)):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def check_versions(manifest: Manifest, packages: Sequence[str]) -> None:
    """Refuse a bundle that was made with other versions of `packages` than those installed.

    Raises:
        BundleError: If one differs by more than a patch release. A build label, such as `+cpu`, makes no other version.
    """
    installed = installed_versions(tuple(packages))
    for name in packages:
        recorded, found = manifest.packages.get(name), installed.get(name)
        if recorded is None or found is None or _series(recorded) != _series(found):
            # A release of executorch goes with one series of torch, so both are named.
            wanted = [one for one in dict.fromkeys((name, "torch")) if _differs(manifest.packages, installed, one)]
            releases = " ".join(f"{one}=={_public(manifest.packages[one])}" for one in wanted)
            remedy = f"pip install {releases}, " if recorded and releases else ""
            raise BundleError(
                f"the bundle was made with {name} {recorded or '(not recorded)'}, installed is {found or 'none'}; "
                f"{remedy}export the model again, or try anyway with check_versions=False (--ignore-versions)"
            )


def _differs(recorded: Mapping[str, str], installed: Mapping[str, str], name: str) -> bool:
    return name in recorded and _series(recorded[name]) != _series(installed.get(name, ""))


def _public(version: str) -> str:
    return version.partition("+")[0]


def _series(version: str) -> list[str]:
    """Major and minor number: patch releases of one series read each other's files."""
    return _public(version).split(".")[:2]
