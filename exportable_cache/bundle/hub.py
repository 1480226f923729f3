"""Download bundles from repositories of the Hugging Face hub.

A repository holds a bundle in a folder named like its target, such as `executorch/manifest.json`, or one bundle at its
root. Files are copied to the user's folder without links and then opened like those of any stranger.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..backends.registry import TARGETS
from ..common.fs.files import atomic_path, retired_folder
from ..common.fs.user_files import home_folder
from ..common.progress import silent
from ..errors import BundleError, InputError, first_line
from .files import MANIFEST_FILE, folder_of
from .signing import SIGNATURE_FILE

if TYPE_CHECKING:
    from ..common.progress import Progress

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
#: Longest name that is looked for on the disk, and longest revision.
_LONGEST_NAME = 255
_COMMIT = re.compile(r"[0-9a-f]{40}")
#: Largest manifest that is downloaded; those of large models have less than a megabyte.
_MOST_MANIFEST = 8 << 20


@dataclass(frozen=True)
class HubChoice:
    """The choice of a bundle in a repository.

    Attributes:
        target: Target of the bundle; None if the repository has one bundle only.
        revision: Branch, tag or commit; None for `main`.
        token: Token of the hub; None for that of `hf auth login`.
    """

    target: str | None = None
    revision: str | None = None
    token: str | bool | None = None


def is_repository(name: str | os.PathLike) -> bool:
    """Return True for names like `user/name`, unless this machine has a folder of that name, or one named `user`."""
    if not isinstance(name, str) or not _REPOSITORY.fullmatch(name):
        return False
    # Not by pathlib, which raises an error for a name that is too long.
    if os.path.exists(name) or os.path.isdir(os.path.dirname(name)):
        return False
    return len(name) > _LONGEST_NAME or retired_folder(Path(name)) is None


def local_folder(name: str | os.PathLike, choice: HubChoice, progress: Progress = silent) -> Path:
    """Return the folder of a bundle; that of a repository is downloaded first.

    Raises:
        InputError: If an option of the hub is given for a folder, or as `download` does.
        BundleError: See `download`.
    """
    if not isinstance(name, (str, os.PathLike)):
        raise InputError(f"path must be a folder or a repository of the hub, got {name!r:.100}; pass its name")
    if is_repository(name):
        return download(str(name), choice, progress)
    for option, value in (("target", choice.target), ("revision", choice.revision), ("token", choice.token)):
        if value is not None:
            raise InputError(
                f"{option} must be left out for the path {os.fspath(name)!r}; it is for a repository of the hub such "
                "as 'user/name'"
            )
    return folder_of(name)


def bundle_of(name: str, choice: HubChoice, progress: Progress = silent) -> str:
    """Return the folder of a bundle on the hub, which is downloaded; the name of anything else is returned unchanged.

    Raises:
        InputError, BundleError: See `local_folder`.
    """
    if not is_repository(name) and choice == HubChoice():
        return name
    try:
        return str(local_folder(name, choice, progress))
    except _NoBundleError:
        if choice.revision is not None:
            raise
        return name


class _NoBundleError(BundleError):
    """A repository has no bundle, or none was downloaded before and the hub cannot be reached."""


def check_repository(name: str) -> str:
    """Return the id of a repository.

    Raises:
        InputError: If it is not one.
    """
    if not isinstance(name, str) or not _REPOSITORY.fullmatch(name):
        raise InputError(f"repository must be an id like 'user/name', got {name!r:.100}; pass one")
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise InputError(
            f"repository must be an id that the hub allows, got {name!r:.100} ({first_line(error):.200}); pass another"
        ) from error
    return name


def check_revision(revision: str) -> None:
    """Check the name of a branch, a tag or a commit.

    Raises:
        InputError: If it is not a valid one.
    """
    odd = not isinstance(revision, str) or not revision.isprintable() or len(revision.encode()) > _LONGEST_NAME
    if odd or not revision or revision.startswith(("/", ".")) or ".." in revision:
        raise InputError(f"revision must be a branch, tag or commit, got {revision!r:.100}; pass one")


def download(repository: str, choice: HubChoice | None = None, progress: Progress = silent) -> Path:
    """Download one bundle of a repository, or find an earlier download if the hub cannot be reached.

    Only files that the bundle's manifest lists are downloaded.

    Args:
        repository: Id such as `user/name`.
        choice: Target, revision and token.
        progress: Called with each stage.

    Returns:
        The folder of the bundle. Its files are not checked.

    Raises:
        InputError: If there is no such repository, revision or target, or access is denied.
        BundleError: If the repository holds no bundle, or the hub cannot be reached.
    """
    from ..models.loading.location import hub_answers, hub_errors

    check_repository(repository)
    choice = choice or HubChoice()
    target, token, revision = choice.target, choice.token, "main" if choice.revision is None else choice.revision
    check_revision(revision)
    progress(f"asking the hub for {repository}", 0, None)
    home = home_folder() / "hub" / repository.replace("/", "--")
    reachable, problem = hub_answers()
    if not reachable:
        return _downloaded(home, repository, target, revision, problem)
    with hub_errors(repository, revision):
        info = api_of(token).model_info(repository, revision=revision, files_metadata=True)
        sizes, commit = {one.rfilename: one.size for one in info.siblings or ()}, str(info.sha)
        if not _COMMIT.fullmatch(commit):
            raise InputError(f"the hub must name a commit for {repository!r}, got {commit!r:.80}; check HF_ENDPOINT")
        home /= commit
        if (sizes.get(MANIFEST_FILE, _MOST_MANIFEST + 1) or 0) <= _MOST_MANIFEST:
            # Other programs have a file of this name, too.
            _fetch_manifest(repository, commit, home, MANIFEST_FILE, sizes, token)
        folder = _folder_of(list(sizes), home, repository, target)
        _fetch_manifest(repository, commit, home, _inside(folder, MANIFEST_FILE), sizes, token)
        wanted = [_inside(folder, name) for name in _whole(home, folder, repository, sizes)]
        signature = _inside(folder, SIGNATURE_FILE)
        progress(f"downloading {repository}", 0, None)
        _fetch(repository, commit, home, [*wanted, *([signature] if signature in sizes else ())], token)
    _remember(home.parent, revision, commit)
    return home / folder


def api_of(token: str | bool | None) -> Any:
    """Return the hub's client."""
    from huggingface_hub import HfApi

    return HfApi(token=token, library_name="exportable_cache")


def _inside(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def is_manifest(path: Path) -> bool:
    """Return True for the manifest of a bundle, of any schema version; False for another program's file."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError, MemoryError):  # a damaged one, whose error `read_fields` raises
        return b'"schema_version"' in content
    return isinstance(fields, dict) and "schema_version" in fields


def _folder_of(names: Sequence[str], home: Path, repository: str, target: str | None) -> str:
    """Return the folder of the bundle of `target` in a repository with these files; "" for the root.

    Args:
        names: Names of the files.
        home: Folder with the downloaded manifest of the root.
        repository: Id of the repository.
        target: The target, if one was given.

    Raises:
        BundleError: If there is no bundle.
        InputError: If there is none for the target, or the target must be given.
    """
    folders = [name for name in sorted(TARGETS) if f"{name}/{MANIFEST_FILE}" in names]
    if MANIFEST_FILE in names and is_manifest(home / MANIFEST_FILE):
        folders.insert(0, "")
    if not folders:
        raise _NoBundleError(
            f"{repository!r} on the hub has no {MANIFEST_FILE} of a bundle at its root or in the folder of a target; "
            "export the model"
        )
    if target is None and (len(folders) == 1 or folders[0] == ""):
        return folders[0]
    found = ", ".join(folder or "one at its root" for folder in folders)
    if target is None:
        raise InputError(f"target must be one of {found} for {repository!r}; pass target= (--target)")
    if target not in folders:
        raise InputError(f"{repository!r} has no bundle for target {target!r}, but {found}; pass another target")
    return target


def _fetch_manifest(
    repository: str, commit: str, home: Path, name: str, sizes: Mapping[str, int | None], token: str | bool | None
) -> None:
    """Download a manifest, again if it was cut after its download.

    Raises:
        BundleError: If it is too large to be one.
    """
    if (sizes[name] or 0) > _MOST_MANIFEST:
        raise BundleError(
            f"{name} of {repository!r} must have at most {_MOST_MANIFEST} bytes, got {sizes[name]}, so it is not a "
            "manifest; pass another repository"
        )
    path = home / name
    if path.is_file() and sizes[name] not in (None, path.stat().st_size):
        path.unlink()
    _fetch(repository, commit, home, [name], token)


def _fetch(repository: str, commit: str, home: Path, names: Sequence[str], token: str | bool | None) -> None:
    """Download files of a commit into a folder; a download that was interrupted continues."""
    from huggingface_hub import snapshot_download

    from ..models.loading.location import quiet

    with quiet():
        # Copies, because links are refused in bundles.
        snapshot_download(
            repository,
            revision=commit,
            local_dir=home,
            allow_patterns=[glob.escape(name) for name in names],
            token=token,
            library_name="exportable_cache",
        )


def _whole(home: Path, folder: str, repository: str, sizes: Mapping[str, int | None]) -> list[str]:
    """Return the names of the files in a downloaded manifest, and remove those that were cut after their download.

    Raises:
        BundleError: If the hub has no such file, or one of another size.
    """
    from .files import CheckedBundle

    files = CheckedBundle.read(home / folder).files
    for name, file in files.items():
        path, inside = home / folder / name, _inside(folder, name)
        if inside not in sizes or sizes[inside] not in (None, file.bytes):
            found = "none" if inside not in sizes else f"{sizes[inside]}"
            raise BundleError(
                f"{inside} of {repository!r} must have {file.bytes} bytes as its manifest says, the hub has {found}; "
                "ask its author to upload the bundle again"
            )
        if path.is_file() and path.stat().st_size != file.bytes:
            path.unlink()
    return list(files)


def _downloaded(home: Path, repository: str, target: str | None, revision: str, problem: str) -> Path:
    """Return an earlier download.

    Raises:
        BundleError: If there is none.
    """
    commit = revision if _COMMIT.fullmatch(revision) else None
    reference = home / "refs" / revision
    if commit is None and reference.is_file():
        commit = reference.read_text(encoding="utf-8", errors="replace").strip()
    found = None if commit is None or not _COMMIT.fullmatch(commit) else home / commit
    if found is None or not found.is_dir():
        raise _NoBundleError(
            f"{repository!r} is not a folder, was not downloaded before at revision {revision!r}, and the hub cannot "
            f"be reached ({problem}); check the path, or connect"
        )
    names = [path.relative_to(found).as_posix() for path in found.glob(f"**/{MANIFEST_FILE}")]
    if target is not None and f"{target}/{MANIFEST_FILE}" not in names:
        raise BundleError(
            f"the bundle of {repository!r} for target {target!r} was not downloaded before, and the hub cannot be "
            f"reached ({problem}); connect, or pass another target"
        )
    return found / _folder_of(names, found, repository, target)


def _remember(home: Path, revision: str, commit: str) -> None:
    """Record the commit of a revision, for later use without the hub."""
    reference = home / "refs" / revision
    try:
        reference.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(reference) as temporary:
            temporary.write_text(commit, encoding="utf-8")
    except OSError:  # the bundle is complete; only a later use without the hub does not find it by this name
        return
