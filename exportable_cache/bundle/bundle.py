"""The folder an export writes: program files, tokenizer, configs, and the manifest that makes it a bundle."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from ..backends import backend_for
from ..backends.base import LoweredFile, Runner
from ..cache.kernel import Kernel
from ..cache.layers import CacheLayer, layer_from
from ..common.files import PARTIAL, atomic_folder
from ..common.progress import Progress, silent
from ..errors import BundleError
from ..program.inputs.multimodal import kinds_taken
from ..program.program import Program
from .describe import Provenance, config_fields, describe, generation_config_fields, installed_versions
from .manifest import MANIFEST_FILE, SCHEMA_VERSION, File, Manifest

if TYPE_CHECKING:
    from ..models.loading import LoadedModel

__all__ = [
    "MANIFEST_FILE",
    "SCHEMA_VERSION",
    "Bundle",
    "Manifest",
    "Provenance",
    "check_free",
    "new_folder",
    "write_bundle",
]

TOKENIZER_FOLDER = "tokenizer"
#: What the manifest says that its files are; they lie beside the tokenizer's.
PROCESSOR = "processor"

_HASH_PIECE = 1 << 20


@dataclass(frozen=True)
class Bundle:
    """A folder and its manifest.

    Attributes:
        path: The folder.
        manifest: What it holds.
    """

    path: Path
    manifest: Manifest

    @classmethod
    def open(
        cls,
        path: str | os.PathLike,
        check_versions: bool = True,
        check_files: bool = True,
        *,
        progress: Progress = silent,
    ) -> Bundle:
        """Open a bundle; its program is not loaded yet.

        Args:
            path: The folder.
            check_versions: Refuse other versions of the packages its target depends on. A build label, such as `+cpu`,
                makes no other version.
            check_files: Compare every file with its recorded size and checksum.
            progress: Told about bytes read.

        Raises:
            BundleError: If there is no manifest, it cannot be read or is of another schema version, a file is missing,
                truncated or changed, or a version differs.
            InputError: If versions are checked and this release has no such target.
            MissingDependencyError: If they are and the target needs a package that is not installed.
        """
        folder = Path(path)
        manifest = Manifest.read(folder)
        if check_versions:
            _check_versions(manifest, backend_for(manifest.target).packages)
        if check_files:
            _check_files(folder, manifest, progress)
        return cls(folder, manifest)

    def open_runner(self) -> tuple[Runner, list[CacheLayer]]:
        """The program, ready to run, and its cache layers without tensors."""
        layers = self.layers()
        return backend_for(self.manifest.target).open(self.path, self.manifest.description()), layers

    def layers(self) -> list[CacheLayer]:
        """The cache layers, without tensors.

        Raises:
            BundleError: If one has a kernel that this release does not have, or its tensors do not fit its parts.
        """
        # A target may bring kernels of its own.
        backend_for(self.manifest.target)
        layers = []
        for index, layer in enumerate(self.manifest.layers):
            if layer.kernel.get("kind") not in Kernel.kinds:
                raise BundleError(
                    f"layer {index} of {self.path} has the kernel {layer.kernel.get('kind')!r}, this release has {', '.join(Kernel.kinds)}; "
                    "install the release that wrote it, or export the model again"
                )
            # Read did so for the kernels known then, not for those the target has just brought.
            problem = layer.problem()
            if problem is not None:
                raise BundleError(
                    f"{self.path / MANIFEST_FILE} is damaged: layers.{index}: {problem}; export the model again"
                )
            layers.append(layer_from(layer.config, {}))
        return layers

    @property
    def has_processor(self) -> bool:
        """Whether it holds the model's processor of images or sound."""
        return any(file.holds == PROCESSOR for file in self.manifest.files.values())

    def processor(self) -> ProcessorMixin:
        """The model's processor of images or sound.

        Raises:
            BundleError: If the model was exported without one, or it cannot be read.
            MissingDependencyError: If it needs a package that is not installed, such as Pillow for images.
        """
        from ..models.loading import load_processor

        if not self.has_processor:
            raise BundleError(
                f"{self.path} holds no processor of images or sound; export the folder of the model with its preprocessor_config.json"
            )
        return load_processor(self.path / TOKENIZER_FOLDER, self.path)

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer with its chat template, or None if the model was exported without one."""
        from ..models.loading import load_tokenizer

        if self.manifest.tokenizer is None:
            return None
        tokenizer = load_tokenizer(self.path / TOKENIZER_FOLDER)
        if tokenizer is None:
            raise BundleError(
                f"{self.path / TOKENIZER_FOLDER} holds no tokenizer, the manifest names a {self.manifest.tokenizer}; "
                "export the model again with tokenizer= a transformers tokenizer"
            )
        return tokenizer


def check_free(path: Path, overwrite: bool) -> None:
    """Refuse a folder that exists, unless it is empty, or a bundle that may be overwritten, and one that cannot be created.

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
        os.rmdir(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=PARTIAL, dir=parent))
    except (OSError, ValueError) as error:
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: Exception) -> BundleError:
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
    elif path.exists() or path.is_symlink():
        raise BundleError(f"{path} exists and is no folder; choose another one")


@contextmanager
def new_folder(path: Path, overwrite: bool) -> Iterator[Path]:
    """A temporary folder that becomes `path` when the block ends well, and is removed when it does not.

    Raises:
        BundleError: If `path` may not be written to, see `check_free`, now or at the end of the block, or the temporary
            folder cannot be created.
    """
    check_free(path, overwrite)
    # A link is followed first: renaming onto it would replace the link.
    path = Path(os.path.realpath(path))
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(atomic_folder(path))
        except OSError as error:
            raise _cannot_write(path, error) from error
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
        "generation_config.json": ("generation defaults", generation_config_fields(program.model)),
    }
    for name, (what, fields) in configs.items():
        (folder / name).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        holds[name] = what
    if tokenizer is not None:
        tokenizer.save_pretrained(folder / TOKENIZER_FOLDER)
        for path in loaded.processor_files if set(kinds_taken(program.methods)) != {"text"} else ():
            shutil.copyfile(path, folder / TOKENIZER_FOLDER / path.name)
            holds[f"{TOKENIZER_FOLDER}/{path.name}"] = PROCESSOR
    files = {}
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    total, done = sum(path.stat().st_size for path in paths), 0
    for path in paths:
        name = path.relative_to(folder).as_posix()
        size = path.stat().st_size
        files[name] = File(
            sha256=_sha256(path, progress, done, total),
            bytes=size,
            holds=holds.get(name, "tokenizer"),
            details=details.get(name, {}),
        )
        done += size
    manifest = describe(
        program,
        provenance,
        packages=tuple(backend_for(provenance.target).packages),
        tokenizer=None if tokenizer is None else type(tokenizer).__name__,
        files=files,
    )
    return Bundle(folder, manifest)


def _check_versions(manifest: Manifest, packages: Sequence[str]) -> None:
    installed = installed_versions(tuple(packages))
    for name in packages:
        recorded, found = manifest.packages.get(name), installed.get(name)
        if recorded is None or found is None or _public(recorded) != _public(found):
            remedy = f"install {name}=={_public(recorded)}, " if recorded else ""
            raise BundleError(
                f"the bundle was made with {name} {recorded or '(not recorded)'}, installed is {found or 'none'}; "
                f"{remedy}export the model again, or try anyway with check_versions=False (--ignore-versions)"
            )


def _public(version: str) -> str:
    return version.partition("+")[0]


def _check_files(folder: Path, manifest: Manifest, progress: Progress) -> None:
    total, done = sum(file.bytes for file in manifest.files.values()), 0
    for name, file in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise BundleError(f"{path} is missing; copy the bundle again, or export the model again")
        size = path.stat().st_size
        if size != file.bytes:
            raise BundleError(
                f"{path} has {size} bytes, the manifest says {file.bytes}; copy the bundle again, or export the model again"
            )
        digest = _sha256(path, progress, done, total)
        if digest != file.sha256:
            raise BundleError(
                f"{path} is damaged: its sha256 is {digest[:12]}..., the manifest says {file.sha256[:12]}...; "
                "copy the bundle again, or export the model again"
            )
        done += size


def _sha256(path: Path, progress: Progress, done: int, total: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_HASH_PIECE):
            digest.update(piece)
            done += len(piece)
            progress("checking files", done, total)
    return digest.hexdigest()
