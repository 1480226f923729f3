"""The manifest of a bundle: the fields of manifest.json, and their checks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, computed_field, field_validator, model_validator
from transformers import GenerationConfig
from transformers.utils import logging as transformers_logging

from ..backends.base import ProgramDescription
from ..errors import BundleError, first_line
from .entries import (
    AppliedRecipe,
    Count,
    Drafted,
    Dtype,
    Entry,
    File,
    Layer,
    ProgramEntry,
    Quantized,
    RankedProgram,
    RoundedCache,
)
from .manifest_file import MANIFEST_FILE, check_file_name, checksum_of, rank_folder, read_fields


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
