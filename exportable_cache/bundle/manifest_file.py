"""The file manifest.json of a bundle: its bytes, checksum, and the package versions it records.

Nothing here imports torch or pydantic, so that a program can start without them.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from ..common.fs.files import PARTIAL, retired_folder
from ..common.fs.user_files import home_folder
from ..errors import BundleError, InputError

# Version 2 describes layers by their parts instead of a class name.
SCHEMA_VERSION = 2
MANIFEST_FILE = "manifest.json"
#: File that transformers' exporters write next to their programs.
_EXPORTERS_FILE = "export.json"
#: Format of those that hold a bundle, see `pipeline.exporter`.
EXPORTERS_FORMAT = "exportable_cache"
#: Packages that every program depends on.
_PACKAGES = ("exportable-cache", "torch", "transformers")


def rank_folder(rank: int) -> str:
    """Return the name of a rank's folder in a bundle."""
    return f"rank-{rank}"


def check_file_name(name: str) -> None:
    """Check the name of a file in a manifest.

    Raises:
        ValueError: If it is outside the bundle, or no file system has such a name.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"file {name!r} lies outside the bundle")
    # Other names raise errors in file systems, or are shortened to another file's name.
    if not name.isprintable() or any(len(part.encode()) > 255 for part in path.parts) or len(name) > 1024:
        raise ValueError(f"file {name[:64]!r}... must have a name of printable characters, at most 255 bytes")


def remedy(folder: Path) -> str:
    """Return what to do about damaged files of a bundle; those of the hub are downloaded again if they are missing."""
    try:
        downloaded = (home_folder() / "hub").resolve() in folder.resolve().parents
    except (OSError, RuntimeError, InputError):  # there is no home
        downloaded = False
    if downloaded:
        return f"remove the folder {folder}, and load it from the hub again"
    return "copy the bundle again, or export the model again"


def other_export(folder: Path) -> str | None:
    """Return why the export of another package in a folder cannot be opened; None if there is none.

    Args:
        folder: A folder without a manifest.json.
    """
    record = folder / _EXPORTERS_FILE
    if record.is_file():
        try:
            form = json.loads(record.read_bytes())["export_format"]
        except (OSError, ValueError, RecursionError, MemoryError, KeyError, TypeError):
            form = None
        if form == EXPORTERS_FORMAT:
            return (
                f"{folder} is an export of transformers around a bundle; open it with ExportedModel.from_pretrained, "
                "after importing exportable_cache.pipeline.exporter"
            )
        return (
            f"{folder} is an export of transformers in the format {str(form)[:40]!r}: its programs get their cache "
            "from the caller, so there is no cache for a session; export the model with exportable_cache.export"
        )
    programs = sorted(folder.glob("*.pte"))
    if programs:
        return (
            f"{folder} has the program {programs[0].name} of another exporter, and no {MANIFEST_FILE} that describes "
            "its methods and the layers of its cache; export the model with exportable_cache.export, or run the "
            "program with the runner that it was made for"
        )
    return None


def read_fields(folder: Path, check: Callable[[bytes], None] | None = None) -> dict[str, Any]:
    """Read the fields of manifest.json, without its checksum, which is compared.

    Args:
        folder: The bundle.
        check: Called with the file's bytes before they are parsed; raises to refuse them.

    Raises:
        BundleError: If the file is missing, unreadable, damaged, or of another schema version.
    """
    path = folder / MANIFEST_FILE
    if not os.path.isdir(folder):  # unlike pathlib's, False for a name that is too long
        retired = retired_folder(folder)
        if retired is not None:
            raise BundleError(
                f"there is no folder {folder}, but an export that was killed while replacing it left the previous "
                f"bundle; rename {retired} to {folder.name}, or export the model again"
            )
        raise BundleError(f"there is no folder {folder}; export a model to it first")
    if not path.is_file():
        other = other_export(folder)
        raise BundleError(
            other or f"{folder} is not a bundle: it has no {MANIFEST_FILE}; pass a folder that export wrote"
        )
    # Killed between writing the manifest and the rename, an export leaves a folder that looks whole.
    if folder.name.startswith(".") and folder.name.endswith(PARTIAL):
        raise BundleError(f"{folder} is the remainder of an interrupted export; delete it, and export the model again")
    try:
        content = path.read_bytes()
        if check is not None:
            check(content)
        fields = json.loads(content)
        # Refuse lone surrogates, which JSON can spell but UTF-8 cannot.
        json.dumps(fields, ensure_ascii=False).encode()
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise BundleError(f"cannot read {path}: {error}; {remedy(folder)}") from error
    if not isinstance(fields, dict):
        raise BundleError(f"{path} is damaged: it must hold a JSON object; {remedy(folder)}")
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
            f"{path} is damaged: checksum: its content has sha256 {found[:12]}..., {says}; {remedy(folder)}"
        )
    return fields


def checksum_of(fields: Mapping[str, Any]) -> str:
    """Return the sha256 of a manifest's fields except `checksum`, as sorted JSON without white space."""
    content = {name: value for name, value in fields.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode("ascii")).hexdigest()


def installed_versions(packages: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the installed versions of Python, of packages that every program depends on, and of `packages`."""
    names = dict.fromkeys((*_PACKAGES, *packages))
    found = {name: version for name in names if (version := _installed(name)) is not None}
    return {"python": platform.python_version(), **found}


def check_versions(recorded: Mapping[str, str], packages: Sequence[str]) -> None:
    """Check that the installed `packages` have the versions that a bundle was made with.

    Args:
        recorded: Versions in the manifest.
        packages: Packages to compare.

    Raises:
        BundleError: If a version differs by more than a patch release. A build label such as `+cpu` is ignored.
    """
    for name in packages:
        made_with, found = recorded.get(name), _installed(name)
        if made_with is None or found is None or _series(made_with) != _series(found):
            # Name torch as well, because a release of executorch needs one series of it.
            wanted = [one for one in dict.fromkeys((name, "torch")) if _differs(recorded, one)]
            releases = " ".join(f"{one}=={_public(recorded[one])}" for one in wanted)
            remedy = f"pip install {releases}, " if made_with and releases else ""
            raise BundleError(
                f"the bundle was made with {name} {made_with or '(not recorded)'}, but {found or 'no version'} is "
                f"installed; {remedy}export the model again, or try anyway with check_versions=False "
                "(--ignore-versions)"
            )


def _differs(recorded: Mapping[str, str], name: str) -> bool:
    return name in recorded and _series(recorded[name]) != _series(_installed(name) or "")


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _public(version: str) -> str:
    return version.partition("+")[0]


def _series(version: str) -> list[str]:
    """Return major and minor version, because patch releases of one series read each other's files."""
    return _public(version).split(".")[:2]
