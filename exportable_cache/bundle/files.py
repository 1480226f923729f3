"""The files of a bundle: manifest.json as bytes, sizes, checksums, known digests, and a bundle that is read with those.

Nothing here imports torch, pydantic or transformers, which take a second, so that a program can start without them.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..backends.registry import TARGETS, check_target
from ..common.fs.files import PARTIAL, atomic_path, retired_folder
from ..common.fs.user_files import home_folder
from ..common.progress import silent
from ..errors import BundleError, InputError
from . import signing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..common.progress import Progress
    from ..models.tokenizers.text import TextTokenizer

#: The fields of a manifest, or a `Manifest`.
_Read = TypeVar("_Read")
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


def folder_of(path: str | os.PathLike) -> Path:
    """Return the folder of a bundle that a path names.

    Raises:
        InputError: If the path is empty.
    """
    if not os.fspath(path):
        # As a path, "" would mean the working folder.
        raise InputError("path must be a folder that export wrote, got an empty name; pass its path")
    return Path(path)


def read_signed(
    folder: Path, key: str | os.PathLike | None, read: Callable[[Path, Callable[[bytes], None] | None], _Read]
) -> tuple[_Read, str | None]:
    """Read the manifest of a folder, and check its signature if a key is given.

    Args:
        folder: The bundle.
        key: File of the public key that must have signed it; None to skip the check.
        read: Reads the manifest of a folder, and calls a function with the file's bytes before they are parsed.

    Returns:
        What was read, and the fingerprint of the key, or None.

    Raises:
        BundleError: As `read` does; or if the signature is not valid.
        InputError: If the key cannot be read.
        MissingDependencyError: If the check of a signature needs a package that is not installed.
    """
    if key is None:
        return read(folder, None), None
    public = signing.public_key(key)
    return read(folder, lambda content: signing.check(folder, content, public)), signing.fingerprint(public)


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
        if os.path.isfile(folder):
            raise BundleError(f"a bundle must be a folder, got the file {folder}; pass the folder that export wrote")
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


#: Largest number of known digests; the oldest are dropped.
MOST_RECORDS = 4096
#: Age in seconds after which a file's digest is remembered. A younger file can change again within the clock's
#: resolution and keep its time stamp.
SETTLED = 2.0

_FILE = "digests.json"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_HASH_PIECE = 1 << 20
_MOST_THREADS = 8

TOKENIZER_FOLDER = "tokenizer"
#: The file that `tokenizers` reads.
TOKENIZER_FILE = f"{TOKENIZER_FOLDER}/tokenizer.json"
#: Detail of that file: True if it alone gives the same results as transformers' tokenizer.
READS_ALIKE = "reads_alike"
#: Detail of that file: the chat template as texts between turns, see `ChatTurns`.
CHAT_TURNS = "chat_turns"
#: Suffixes of programs and weights. Other unlisted files, such as a README, are never read.
_READ = (".pt", ".pt2", ".pte", ".ptd", ".plan", ".so", ".safetensors")


class ListedFile(Protocol):
    """An entry of a manifest's `files`."""

    @property
    def sha256(self) -> str:
        """Digest in hex."""
        ...

    @property
    def bytes(self) -> int:
        """Size."""
        ...


class Listing(Protocol):
    """The part of a manifest that lists files."""

    @property
    def files(self) -> Mapping[str, ListedFile]:
        """The files by their name inside the folder."""
        ...

    @property
    def ranks(self) -> Any:
        """An object with `size` for a program in several parts, otherwise None."""
        ...


def version_of(status: os.stat_result) -> tuple[int, int, int, int, int]:
    """Return device, inode, size, and the times of the last change of content and inode in ns.

    Users cannot set the last.
    """
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def record_path() -> Path:
    """Return the path of the record of known digests."""
    return home_folder() / _FILE


class KnownDigests:
    """SHA-256 digests of files that this user has checked before, by file version.

    Args:
        records: Digests in hex by version, oldest first.
    """

    def __init__(self, records: dict[str, str]) -> None:
        self._records = records
        self._noted: dict[str, str] = {}

    @classmethod
    def read(cls) -> KnownDigests:
        """Return the user's record; empty if it is missing, damaged, or can be written by other users."""
        try:
            path = record_path()
            with path.open("rb") as file:
                if not _private(os.fstat(file.fileno())) or not _private(path.parent.stat()):
                    return cls({})
                records = json.loads(file.read())
        except (OSError, ValueError, RuntimeError, RecursionError):  # RuntimeError: there is no home
            return cls({})
        fits = isinstance(records, dict) and all(
            isinstance(digest, str) and _SHA256.fullmatch(digest) for digest in records.values()
        )
        return cls(records if fits else {})

    def of(self, path: Path) -> str | None:
        """Return the digest of a file, or None if this version of it is unknown."""
        return self._records.get(_key(version_of(path.stat())))

    def note(self, version: tuple[int, ...], digest: str) -> None:
        """Remember the digest of a version, unless it is too recent. Threads may call this."""
        if time.time_ns() - max(version[-2:]) > SETTLED * 1e9:
            self._noted[_key(version)] = digest

    def write(self) -> None:
        """Add the new digests to the user's record. If that fails, the files are read again next time."""
        if not self._noted:
            return
        records = {**self._records, **self._noted}
        kept = dict(list(records.items())[-MOST_RECORDS:])
        try:
            path = record_path()
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with atomic_path(path) as temporary:
                temporary.write_text(json.dumps(kept), encoding="ascii")
        except (OSError, RuntimeError, InputError):
            return


def _key(version: tuple[int, ...]) -> str:
    return "-".join(map(str, version))


def _private(status: os.stat_result) -> bool:
    if not hasattr(os, "geteuid"):
        return True
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def untrusted(folder: Path, machine_code: str) -> BundleError:
    """Return the error for a bundle with machine code that the caller has not declared trusted."""
    return BundleError(
        f"{folder} holds {machine_code}, which can do anything that you can on this machine and cannot be checked; if "
        "you trust its author, load it with trust=True (--trust)"
    )


def check_files(
    folder: Path, manifest: Listing, progress: Progress, known: bool = False, names: Sequence[str] | None = None
) -> None:
    """Check files against their size and SHA-256 in the manifest.

    Args:
        folder: The bundle.
        manifest: Its manifest.
        progress: Called with the bytes read.
        known: Rely on this user's earlier checks of unchanged files, see `KnownDigests`, and read only the others.
        names: Files to check; all by default.

    Raises:
        BundleError: If a file is missing, truncated or changed.
    """
    files = {name: manifest.files[name] for name in (manifest.files if names is None else names)}
    for name, file in files.items():
        path = folder / name
        if not path.is_file():
            raise BundleError(f"{path} is missing; {remedy(folder)}")
        size = path.stat().st_size
        if size != file.bytes:
            raise BundleError(f"{path} has {size} bytes, the manifest says {file.bytes}; {remedy(folder)}")
    paths = [folder / name for name in files]
    records = KnownDigests.read()
    found = {path: digest for path in paths if (digest := records.of(path) if known else None) is not None}
    unread = [path for path in paths if path not in found]
    found.update(zip(unread, digests_of(unread, progress, records), strict=True))
    for file, path in zip(files.values(), paths, strict=True):
        if found[path] != file.sha256:
            raise BundleError(
                f"{path} is damaged: its sha256 is {found[path][:12]}..., the manifest says {file.sha256[:12]}...; "
                f"{remedy(folder)}"
            )
    if unread:
        records.write()


def digests_of(paths: Sequence[Path], progress: Progress, records: KnownDigests | None = None) -> list[str]:
    """Return the SHA-256 digests of files, in hex.

    Args:
        paths: The files.
        progress: Called with the bytes read.
        records: Record to add the digests to, for `KnownDigests.write`.
    """
    total, done, lock = sum(path.stat().st_size for path in paths), 0, threading.Lock()

    def read(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            progress("checking files", done, total)

    def digest_of(path: Path) -> str:
        digest, piece = hashlib.sha256(), bytearray(_HASH_PIECE)
        with path.open("rb", buffering=0) as file:
            version = version_of(os.fstat(file.fileno()))
            while count := file.readinto(piece):
                digest.update(memoryview(piece)[:count])
                read(count)
        if records is not None:
            # The version from before reading, because a file that changes meanwhile gets another version.
            records.note(version, digest.hexdigest())
        return digest.hexdigest()

    with ThreadPoolExecutor(max_workers=min(_MOST_THREADS, os.cpu_count() or 1)) as threads:
        return list(threads.map(digest_of, paths))


def check_listed(folder: Path, manifest: Listing) -> None:
    """Refuse links, and files that would be read although the manifest does not list them.

    A tokenizer reads every known file in its folder: an `added_tokens.json` changes tokens, a `chat_template.jinja` the
    prompt.

    Raises:
        BundleError: If there is such a file.
    """
    folders = (
        [""] if manifest.ranks is None else ["", *(f"{rank_folder(rank)}/" for rank in range(manifest.ranks.size))]
    )
    try:
        names = [
            root + entry.name
            for root in folders
            if os.path.isdir(folder / root)
            for entry in os.scandir(folder / root)
            if entry.name.endswith(_READ)
        ]
    except OSError as error:
        raise BundleError(f"cannot read {folder}: {error.strerror or error}; check its permissions") from error
    for root, inside, files in os.walk(folder):
        for name in (*inside, *files):
            if os.path.islink(os.path.join(root, name)):
                raise BundleError(
                    f"{Path(root, name)} is a link and may lead outside the bundle; replace it by the file"
                )
    for root, _, files in os.walk(folder / TOKENIZER_FOLDER):
        names += [Path(root, file).relative_to(folder).as_posix() for file in files]
    unlisted = sorted(name for name in names if name not in manifest.files)
    if unlisted:
        raise BundleError(
            f"{folder / unlisted[0]} would be read, but the manifest does not list it, so it cannot be checked; "
            "remove it, or export the model again"
        )


@dataclass(frozen=True)
class _File:
    """See `manifest.File`."""

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
        folder = folder_of(path)
        fields, signed_by = read_signed(folder, key, read_fields)
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
