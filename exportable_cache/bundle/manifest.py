"""The manifest of a bundle, manifest.json: its fields, checks, and the package versions it requires."""

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

# Version 2 describes layers by their parts instead of a class name.
SCHEMA_VERSION = 2
MANIFEST_FILE = "manifest.json"
#: Packages that every program depends on.
_PACKAGES = ("exportable-cache", "torch", "transformers")


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
    # Set if the program has one part for each of several processes.
    ranks: RankedProgram | None = None

    @field_validator("files")
    @classmethod
    def _inside(cls, files: dict[str, File]) -> dict[str, File]:
        for name in files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts:
                raise ValueError(f"file {name!r} lies outside the bundle")
            # Other names raise errors in file systems, or are shortened to another file's name.
            if not name.isprintable() or any(len(part.encode()) > 255 for part in path.parts) or len(name) > 1024:
                raise ValueError(f"file {name[:64]!r}... must have a name of printable characters, at most 255 bytes")
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
        """Read manifest.json.

        Args:
            folder: The bundle.
            check: Called with the file's bytes before they are parsed; raises to refuse them.

        Raises:
            BundleError: If the file is missing, unreadable, damaged, or of another schema version.
        """
        path = folder / MANIFEST_FILE
        if not folder.is_dir():
            retired = retired_folder(folder)
            if retired is not None:
                raise BundleError(
                    f"there is no folder {folder}, but an export that was killed while replacing it left the previous "
                    f"bundle; rename {retired} to {folder.name}, or export the model again"
                )
            raise BundleError(f"there is no folder {folder}; export a model to it first")
        if not path.is_file():
            raise BundleError(f"{folder} is not a bundle: it has no {MANIFEST_FILE}; pass a folder that export wrote")
        # Killed between writing the manifest and the rename, an export leaves a folder that looks whole.
        if folder.name.startswith(".") and folder.name.endswith(PARTIAL):
            raise BundleError(
                f"{folder} is the remainder of an interrupted export; delete it, and export the model again"
            )
        try:
            content = path.read_bytes()
            if check is not None:
                check(content)
            fields = json.loads(content)
            # Refuse lone surrogates, which JSON can spell but UTF-8 cannot.
            json.dumps(fields, ensure_ascii=False).encode()
        except (OSError, ValueError, RecursionError, MemoryError) as error:
            raise BundleError(f"cannot read {path}: {error}; export the model again") from error
        if not isinstance(fields, dict):
            raise BundleError(f"{path} is damaged: it must hold a JSON object; export the model again")
        # Checked first, because other versions have other fields.
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
    """Return the sha256 of a manifest's fields except `checksum`, as sorted JSON without white space."""
    content = {name: value for name, value in fields.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode("ascii")).hexdigest()


def installed_versions(packages: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the installed versions of Python, of packages that every program depends on, and of `packages`."""
    versions = {"python": platform.python_version()}
    for name in dict.fromkeys((*_PACKAGES, *packages)):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def check_versions(manifest: Manifest, packages: Sequence[str]) -> None:
    """Check that the installed `packages` have the versions that a bundle was made with.

    Raises:
        BundleError: If a version differs by more than a patch release. A build label such as `+cpu` is ignored.
    """
    installed = installed_versions(tuple(packages))
    for name in packages:
        recorded, found = manifest.packages.get(name), installed.get(name)
        if recorded is None or found is None or _series(recorded) != _series(found):
            # Name torch as well, because a release of executorch needs one series of it.
            wanted = [one for one in dict.fromkeys((name, "torch")) if _differs(manifest.packages, installed, one)]
            releases = " ".join(f"{one}=={_public(manifest.packages[one])}" for one in wanted)
            remedy = f"pip install {releases}, " if recorded and releases else ""
            raise BundleError(
                f"the bundle was made with {name} {recorded or '(not recorded)'}, but {found or 'no version'} is "
                f"installed; {remedy}export the model again, or try anyway with check_versions=False "
                "(--ignore-versions)"
            )


def _differs(recorded: Mapping[str, str], installed: Mapping[str, str], name: str) -> bool:
    return name in recorded and _series(recorded[name]) != _series(installed.get(name, ""))


def _public(version: str) -> str:
    return version.partition("+")[0]


def _series(version: str) -> list[str]:
    """Return major and minor version, because patch releases of one series read each other's files."""
    return _public(version).split(".")[:2]
