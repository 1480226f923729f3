"""Writing the folder that an export makes: a new folder in place of none, and what goes in beside the program."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..backends.registry import backend_for
from ..common.files import LOCK_FILE, PARTIAL, atomic_folder, clear_leftovers
from ..common.progress import Progress, silent
from ..errors import BundleError
from ..generation.chat_turns import chat_turns
from ..models.text_tokenizer import reads_alike
from ..program.inputs.multimodal import kinds_taken
from .bundle import PROCESSOR, TOKENIZER_FOLDER, Bundle
from .describe import Provenance, config_fields, describe, generation_config_fields
from .digests import digests_of
from .entries import File
from .listed import CHAT_TURNS, READS_ALIKE, TOKENIZER_FILE
from .manifest import MANIFEST_FILE
from .signature import SIGNATURE_FILE

if TYPE_CHECKING:
    from ..backends.base import LoweredFile
    from ..models.loading import LoadedModel
    from ..program.program import Program


def check_free(path: Path, overwrite: bool) -> None:
    """Refuse a folder that exists, unless it is empty, or a bundle that may be overwritten, and one that cannot be
    created.

    A folder is created beside it, or in the nearest parent that exists, and removed again: permissions alone do not
    tell, neither to root nor on file systems that are no storage.

    Raises:
        BundleError: If it may not be written to.
    """
    try:
        _check_unused(path, overwrite)
        # Where a link leads: that is the folder to be replaced.
        real = Path(os.path.realpath(path))
        parent = next(parent for parent in real.parents if parent.exists())
        if not parent.is_dir():
            raise BundleError(f"cannot write {path}: {parent} is no folder one may write to; choose another")
        made = tempfile.mkdtemp(prefix=f".{path.name}.", suffix=PARTIAL, dir=parent)
        with suppress(FileNotFoundError):  # another export has cleared it up
            os.rmdir(made)
    except (OSError, ValueError) as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: Exception) -> BundleError:
    """What is said of a folder that cannot be written."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return BundleError(f"cannot write {path}: {reason}; choose a folder one may write to")


def _check_unused(path: Path, overwrite: bool) -> None:
    if path.is_dir():
        if not any(path.iterdir()):
            return
        if not (path / MANIFEST_FILE).is_file():
            raise BundleError(f"{path} exists and is no bundle, so it is never overwritten; choose another folder")
        if not overwrite:
            raise BundleError(f"{path} exists; choose another folder, or overwrite it (overwrite=True, --overwrite)")
        ours, others = _files_of(path)
        if others or not ours:
            found = f"it holds {others[0]}, which" if others else "its manifest.json is one that"
            raise BundleError(
                f"{path} exists, and {found} no export wrote, so it is not overwritten; choose another folder, or move "
                "that away"
            )
    elif path.exists() or path.is_symlink():
        raise BundleError(f"{path} exists and is no folder; choose another one")


def _files_of(folder: Path) -> tuple[list[Path], list[str]]:
    """Files in a folder that its manifest says an export wrote, and the names of all others.

    There are none of the former where the manifest is not ours, as other programs have files of that name.
    """
    try:
        fields = json.loads((folder / MANIFEST_FILE).read_bytes())
        is_ours = isinstance(fields["schema_version"], int) and all(
            isinstance(fields[name], str) for name in ("target", "fingerprint")
        )
        listed = {*fields["files"], MANIFEST_FILE, SIGNATURE_FILE, LOCK_FILE} if is_ours else set()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        listed = set()
    ours: list[Path] = []
    others: list[str] = []
    for place, folders, files in os.walk(folder):
        for file in [*files, *(name for name in folders if Path(place, name).is_symlink())]:
            path = Path(place, file)
            name = path.relative_to(folder).as_posix()
            if name in listed:
                ours.append(path)
            else:
                others.append(name)
    return ours, sorted(others)


def remove_bundle(folder: Path) -> None:
    """Remove what an export wrote into a folder, and the folder if that is all."""
    # The manifest last, which says what else is ours.
    for path in sorted(_files_of(folder)[0], key=lambda path: path == folder / MANIFEST_FILE):
        path.unlink(missing_ok=True)
    for place, _, _ in sorted(os.walk(folder), reverse=True):
        try:
            os.rmdir(place)
        except OSError:  # something else is in it
            pass


@contextmanager
def new_folder(path: Path, overwrite: bool) -> Iterator[Path]:
    """A temporary folder that becomes `path` when the block ends well, and is removed when it does not.

    Raises:
        BundleError: If `path` may not be written to, see `check_free`, now or at the end of the block, or the temporary
            folder cannot be created.
    """
    # A link is followed first: renaming onto it would replace the link.
    real = Path(os.path.realpath(path))
    try:
        clear_leftovers(real, remove_bundle)
    except OSError as error:
        raise cannot_write(path, error) from error
    check_free(path, overwrite)
    path = real
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(atomic_folder(path, remove_bundle))
        except OSError as error:
            raise cannot_write(path, error) from error
        yield folder
        check_free(path, overwrite)


def write_bundle(
    folder: Path,
    program: Program,
    lowered: Sequence[LoweredFile],
    *,
    provenance: Provenance,
    loaded: LoadedModel,
    progress: Progress = silent,
) -> Bundle:
    """Add configs and tokenizer to the lowered files and describe them all.

    The manifest is not written, so that nothing loads until the caller has checked the bundle: `bundle.manifest.write`.

    Args:
        folder: Where the backend has written `lowered`.
        program: What was lowered.
        provenance: Of it.
        loaded: What it was made from: its tokenizer is saved with the chat template; its processor's files are copied
            beside it, where there is one and the program takes more than text.
        progress: Told about bytes read.
    """
    tokenizer = loaded.tokenizer
    holds = {file.name: file.holds for file in lowered}
    details = {file.name: dict(file.details) for file in lowered}
    configs = {
        "config.json": ("model config", config_fields(program.model)),
        "generation_config.json": ("generation defaults", generation_config_fields(program.model, tokenizer)),
    }
    for name, (what, fields) in configs.items():
        (folder / name).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        holds[name] = what
    if tokenizer is not None:
        tokenizer.save_pretrained(folder / TOKENIZER_FOLDER)
        details[TOKENIZER_FILE] = {READS_ALIKE: reads_alike(folder / TOKENIZER_FOLDER, tokenizer)}
        turns = chat_turns(tokenizer)
        if turns is not None:
            details[TOKENIZER_FILE][CHAT_TURNS] = turns.to_dict()
        for path in loaded.processor_files if set(kinds_taken(program.methods)) != {"text"} else ():
            shutil.copyfile(path, folder / TOKENIZER_FOLDER / path.name)
            holds[f"{TOKENIZER_FOLDER}/{path.name}"] = PROCESSOR
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != LOCK_FILE)
    files = {}
    for path, digest in zip(paths, digests_of(paths, progress), strict=True):
        name = path.relative_to(folder).as_posix()
        files[name] = File(
            sha256=digest,
            bytes=path.stat().st_size,
            holds=holds.get(name, "tokenizer"),
            details=details.get(name, {}),
        )
    manifest = describe(
        program,
        provenance,
        packages=tuple(backend_for(provenance.target).packages),
        tokenizer=tokenizer,
        files=files,
    )
    return Bundle(folder, manifest, trusted=True)
