"""Download bundles from repositories of the Hugging Face hub.

A repository holds a bundle in a folder named like its target, such as `executorch/manifest.json`, or one bundle at its
root. Files are copied to the user's folder without links and then opened like those of any stranger.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.fs.files import atomic_path, retired_folder
from ..common.fs.user_files import home_folder
from ..common.progress import silent
from ..errors import BundleError, InputError
from .manifest_file import MANIFEST_FILE
from .signing import SIGNATURE_FILE

if TYPE_CHECKING:
    from ..common.progress import Progress

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
#: Names of folders that may hold a bundle; others could lead outside.
_FOLDER = re.compile(r"[A-Za-z0-9][\w-]*")


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
    folder = Path(name)
    return not (folder.exists() or folder.parent.is_dir() or retired_folder(folder) is not None)


def local_folder(name: str | os.PathLike, choice: HubChoice, progress: Progress = silent) -> Path:
    """Return the folder of a bundle; that of a repository is downloaded first.

    Raises:
        InputError: If an option of the hub is given for a folder, or as `download` does.
        BundleError: See `download`.
    """
    if is_repository(name):
        return download(str(name), choice, progress)
    for option, value in (("target", choice.target), ("revision", choice.revision), ("token", choice.token)):
        if value is not None:
            raise InputError(
                f"{option} must be left out for the path {os.fspath(name)!r}; it is for a repository of the hub such "
                "as 'user/name'"
            )
    if not os.fspath(name):
        # As a path, "" would mean the working folder.
        raise InputError("path must be a folder that export wrote, got an empty name; pass its path")
    return Path(name)


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
    return name


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
    if not isinstance(revision, str) or not revision or revision.startswith(("/", ".")) or ".." in revision:
        raise InputError(f"revision must be a branch, tag or commit, got {revision!r:.100}; pass one")
    progress(f"asking the hub for {repository}", 0, None)
    home = home_folder() / "hub" / repository.replace("/", "--")
    reachable, problem = hub_answers()
    if not reachable:
        return _downloaded(home, repository, target, revision, problem)
    with hub_errors(repository, revision):
        info = api_of(token).model_info(repository, revision=revision)
        names, commit = [one.rfilename for one in info.siblings or ()], str(info.sha)
        if not _COMMIT.fullmatch(commit):
            raise InputError(f"the hub must name a commit for {repository!r}, got {commit!r:.80}; check HF_ENDPOINT")
        folder, home = _folder_of(names, repository, target), home / commit
        _fetch(repository, commit, home, [_inside(folder, MANIFEST_FILE)], token)
        wanted = [_inside(folder, name) for name in _whole(home / folder)]
        signature = _inside(folder, SIGNATURE_FILE)
        progress(f"downloading {repository}", 0, None)
        _fetch(repository, commit, home, [*wanted, *([signature] if signature in names else ())], token)
    _remember(home.parent, revision, commit)
    return home / folder


def api_of(token: str | bool | None) -> Any:
    """Return the hub's client."""
    from huggingface_hub import HfApi

    return HfApi(token=token, library_name="exportable_cache")


def _inside(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _folder_of(names: Sequence[str], repository: str, target: str | None) -> str:
    """Return the folder of the bundle of `target` in a repository with these files; "" for the root.

    Raises:
        BundleError: If there is no bundle.
        InputError: If there is none for the target, or the target must be given.
    """
    parents = (name.rpartition("/")[0] for name in names if name.rpartition("/")[2] == MANIFEST_FILE)
    folders = sorted(parent for parent in parents if not parent or _FOLDER.fullmatch(parent))
    if not folders:
        raise _NoBundleError(f"{repository!r} on the hub has no {MANIFEST_FILE}, so it is not a bundle; export it")
    if target is None and (len(folders) == 1 or folders[0] == ""):
        return folders[0]
    found = ", ".join(folder or "one at its root" for folder in folders)
    if target is None:
        raise InputError(f"target must be one of {found} for {repository!r}; pass target= (--target)")
    if target not in folders:
        raise InputError(f"{repository!r} has no bundle for target {target!r}, but {found}; pass another target")
    return target


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


def _whole(folder: Path) -> list[str]:
    """Return the names of the files in a downloaded manifest, and remove those that were cut after their download."""
    from .checked import CheckedBundle

    files = CheckedBundle.read(folder).files
    for name, file in files.items():
        path = folder / name
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
        commit = reference.read_text(encoding="utf-8").strip()
    found = None if commit is None or not _COMMIT.fullmatch(commit) else home / commit
    if found is None or not found.is_dir():
        raise _NoBundleError(
            f"{repository!r} is not a folder, was not downloaded before at revision {revision!r}, and the hub cannot "
            f"be reached ({problem}); check the path, or connect"
        )
    names = [path.relative_to(found).as_posix() for path in found.glob(f"**/{MANIFEST_FILE}")]
    return found / _folder_of(names, repository, target)


def _remember(home: Path, revision: str, commit: str) -> None:
    """Record the commit of a revision, for later use without the hub."""
    reference = home / "refs" / revision
    try:
        reference.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(reference) as temporary:
            temporary.write_text(commit, encoding="utf-8")
    except OSError:  # the bundle is complete; only a later use without the hub does not find it by this name
        return
