"""A bundle whose files are checked, without torch, pydantic and transformers, which take a second to import.

`Bundle` does the same and also checks every field of the manifest. The native runner checks those that it reads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..backends.registry import TARGETS, check_target
from ..common.progress import silent
from ..errors import BundleError, InputError
from . import signing
from .files import (
    MANIFEST_FILE,
    READS_ALIKE,
    TOKENIZER_FILE,
    TOKENIZER_FOLDER,
    check_file_name,
    check_files,
    check_listed,
    check_versions,
    read_fields,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..common.progress import Progress
    from ..models.tokenizers.text import TextTokenizer


@dataclass(frozen=True)
class _File:
    """See `entries.File`."""

    sha256: str
    bytes: int
    details: Mapping[str, Any]


@dataclass(frozen=True)
class CheckedBundle:
    """A folder that an export wrote, and the fields of its manifest.

    Attributes:
        path: The folder.
        fields: The manifest as JSON; its checksum is compared, and the fields are not checked.
        files: Its files by name.
        signed_by: Fingerprint of the key whose signature was checked, or None.
    """

    path: Path
    fields: Mapping[str, Any]
    files: Mapping[str, _File]
    signed_by: str | None = None
    #: Programs in several parts are opened by `Bundle` only.
    ranks: None = None

    @classmethod
    def read(cls, path: str | os.PathLike, key: str | os.PathLike | None = None) -> CheckedBundle:
        """Read the manifest of a folder, and check its signature; `check` checks the files.

        Args:
            path: The folder.
            key: File of the public key that must have signed it; None to skip the check.

        Raises:
            BundleError: If the manifest is missing, unreadable or of another schema version, or the signature is not
                valid.
            InputError: If the key cannot be read.
            MissingDependencyError: If the check of a signature needs a package that is not installed.
        """
        if not os.fspath(path):
            # As a path, "" would mean the working folder.
            raise InputError("path must be a folder that export wrote, got an empty name; pass its path")
        folder, signed_by = Path(path), None
        if key is None:
            fields = read_fields(folder)
        else:
            public = signing.public_key(key)
            fields = read_fields(folder, lambda content: signing.check(folder, content, public))
            signed_by = signing.fingerprint(public)
        return cls(folder, fields, _files_of(folder, fields), signed_by)

    def check(self, versions: bool = True, known: bool = False, progress: Progress = silent) -> None:
        """Check the files and the installed packages as `Bundle.open` does.

        Args:
            versions: Refuse other versions of the packages that the target depends on.
            known: Rely on this user's earlier checks of unchanged files; not if the bundle's signature was checked.
            progress: Called with the bytes read.

        Raises:
            BundleError: If a file is missing, truncated, changed or not listed, or a version differs.
            InputError: If versions are checked and this release has no such target.
        """
        check_listed(self.path, self)
        if versions:
            check_target(self.target)
            packages = self.fields.get("packages")
            recorded = packages if isinstance(packages, dict) else {}
            check_versions({str(name): str(one) for name, one in recorded.items()}, self._packages(recorded))
        check_files(self.path, self, progress, known and self.signed_by is None)

    def _packages(self, recorded: Mapping[str, Any]) -> Sequence[str]:
        """Return the packages whose versions matter, see `Backend.packages`."""
        if self.target == "tensorrt":
            return [name for name in ("tensorrt-rtx", "tensorrt") if name in recorded]
        return TARGETS[self.target][1]

    @property
    def target(self) -> str:
        """Name of the target."""
        return str(self.fields.get("target"))

    @property
    def reads_alike(self) -> bool:
        """True if the tokenizer's files alone give what transformers' tokenizer does."""
        file = self.files.get(TOKENIZER_FILE)
        return file is not None and file.details.get(READS_ALIKE) is True

    def text_tokenizer(self) -> TextTokenizer:
        """Return the tokenizer of a bundle that `reads_alike`.

        Raises:
            BundleError: If its config names a file outside the bundle.
            InputError: If it cannot be read.
        """
        from ..models.tokenizers.text import TextTokenizer, check_tokenizer_config

        folder = self.path / TOKENIZER_FOLDER
        check_tokenizer_config(folder)
        return TextTokenizer(folder, lambda: _whole(folder))


def _whole(folder: Path) -> PreTrainedTokenizerBase:
    """Return transformers' tokenizer, for what the files alone do not give."""
    from ..models.loading.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise BundleError(f"{folder} holds no tokenizer; export the model again")
    return tokenizer


def _files_of(folder: Path, fields: Mapping[str, Any]) -> dict[str, _File]:
    """Return the listed files.

    Raises:
        BundleError: If an entry is not one.
    """
    listed, found = fields.get("files"), {}
    try:
        if not isinstance(listed, dict):
            raise ValueError("files must be an object")
        for name, entry in listed.items():
            check_file_name(name)
            known = isinstance(entry, dict) and isinstance(entry.get("sha256"), str) and type(entry.get("bytes")) is int
            if not known:
                raise ValueError(f"file {name!r} must have sha256 and bytes")
            details = entry.get("details")
            found[name] = _File(entry["sha256"], entry["bytes"], details if isinstance(details, dict) else {})
    except ValueError as error:
        raise BundleError(f"{folder / MANIFEST_FILE} is damaged: {error}; export the model again") from error
    return found
