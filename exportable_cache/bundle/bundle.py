"""An opened bundle: program files, tokenizer, configs, and the manifest."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..backends import backend_for
from ..cache.layers import layer_from
from ..cache.layout import Layout
from ..common.fs.files import atomic_path
from ..common.progress import silent
from ..errors import BundleError, InputError
from . import signing
from .files import (
    MANIFEST_FILE,
    READS_ALIKE,
    SCHEMA_VERSION,
    TOKENIZER_FILE,
    TOKENIZER_FOLDER,
    check_listed,
    folder_of,
    rank_folder,
    read_signed,
    untrusted,
)
from .files import check_files as check_digests
from .files import check_versions as check_installed
from .manifest import Manifest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from ..backends.base import Runner
    from ..cache.layers import CacheLayer
    from ..common.progress import Progress
    from ..models.tokenizers.text import TextTokenizer

__all__ = ["MANIFEST_FILE", "SCHEMA_VERSION", "TOKENIZER_FOLDER", "Bundle", "Manifest"]

#: Content of the processor's files in the manifest. They are in the tokenizer's folder.
PROCESSOR = "processor"


@dataclass(frozen=True)
class Bundle:
    """A folder that an export wrote, and its manifest.

    Attributes:
        path: The folder.
        manifest: Its content and checks.
        trusted: True if machine code in it may run, because the caller said so or this process made it.
        signed_by: Fingerprint of the key whose signature was checked, or None.
        unread: How the files of ranks are checked when the runner is opened: True to rely on earlier checks, False to
            read them, None if nothing is left to check.
    """

    path: Path
    manifest: Manifest
    trusted: bool = False
    signed_by: str | None = None
    unread: bool | None = None

    @classmethod
    def open(
        cls,
        path: str | os.PathLike,
        check_versions: bool = True,
        check_files: bool = True,
        *,
        known: bool = False,
        trust: bool = False,
        key: str | os.PathLike | None = None,
        to_run: bool = False,
        progress: Progress = silent,
    ) -> Bundle:
        """Open a bundle without loading its program.

        Args:
            path: The folder.
            check_versions: Refuse other versions of the packages that the target depends on. A build label such as
                `+cpu` is ignored.
            check_files: Compare every file with its recorded size and checksum.
            known: Rely on this user's earlier checks of unchanged files, and read only the others, see `KnownDigests`.
            trust: Allow machine code in the bundle to run (targets `aoti` and `tensorrt`). It can do anything you can.
            key: File of the public key that must have signed it; None to skip the check.
            to_run: True if `open_runner` follows. Of a program for several ranks, only shared files are then checked
                here, and each process checks its own part later.
            progress: Called with the bytes read.

        Raises:
            BundleError: If the manifest is missing, unreadable or of another schema version, a file is missing,
                truncated, changed or not listed, a version differs, or the signature is not valid.
            InputError: If versions are checked and this release has no such target, or the key cannot be read or is
                given without `check_files`.
            MissingDependencyError: If the target or the check of a signature needs a package that is not installed.
        """
        folder = folder_of(path)
        if key is not None and not check_files:
            raise InputError("key cannot be combined with check_files=False, because a signature covers checksums")
        manifest, signed_by = read_signed(folder, key, Manifest.read)
        check_listed(folder, manifest)
        if check_versions:
            check_installed(manifest.packages, backend_for(manifest.target).packages)
        unread = None
        if check_files:
            # Read every file if a key is given, because a signature vouches for the current content.
            known = known and key is None
            unread = known if to_run and manifest.ranks is not None else None
            check_digests(folder, manifest, progress, known, None if unread is None else manifest.files_of(None))
        return cls(folder, manifest, trust, signed_by, unread)

    def open_runner(self) -> tuple[Runner, list[CacheLayer]]:
        """Return the program ready to run, and its cache layers without tensors.

        Of a program for ranks, return this process's part.

        Raises:
            InputError: If the number of processes differs from the program's.
            BundleError: If the program is machine code that is not trusted, or cannot be opened.
        """
        self.check_trusted()
        backend = backend_for(self.manifest.target)
        layers, ranked = self.layers(), self.manifest.ranks
        if ranked is None:
            return backend.open(self.path, self.manifest.description()), layers
        # Imported here, because most programs run in one process.
        from ..backends.wrappers import RankedRunner
        from ..parallel.ranks import ranks_of_program

        ranks = ranks_of_program(ranked.size, str(self.path))
        ranks.check_same("load", bundle=self.manifest.checksum)
        runner, error = None, None
        try:
            folder = self.path / rank_folder(ranks.rank)
            if self.unread is not None:
                check_digests(self.path, self.manifest, silent, self.unread, self.manifest.files_of(ranks.rank))
            runner = backend.open(folder, self.manifest.description(ranks.rank))
        except BundleError as refused:
            error = refused
        # Fail on all ranks together, because a single rank would wait for the others in its first step.
        ranks.check_all(error)
        return RankedRunner(runner, ranks), layers  # type: ignore[arg-type]

    def record_verification(self, report: Mapping[str, Any], sign: str | os.PathLike | None = None) -> Bundle:
        """Replace the verification report in the manifest on disk.

        Args:
            report: Result of `VerifyReport.to_dict`.
            sign: File of the private key to sign the new manifest with; required if the bundle is signed.

        Returns:
            The bundle with the new manifest.

        Raises:
            BundleError: If the bundle is signed and `sign` is missing, or the manifest cannot be written.
            InputError: If the key cannot be read.
        """
        signed = (self.path / signing.SIGNATURE_FILE).exists()
        if signed and sign is None:
            raise BundleError(
                f"{self.path} is signed, and recording a verification changes the manifest that the signature covers; "
                "pass the private key to sign it again with sign= (--sign)"
            )
        key = None if sign is None else signing.private_key(sign)
        manifest = self.manifest.model_copy(update={"verification": dict(report)})
        content = manifest.content()
        try:
            if key is not None:
                signing.sign(self.path, content, key)
            with atomic_path(self.path / MANIFEST_FILE) as temporary:
                temporary.write_bytes(content)
        except OSError as error:
            raise BundleError(
                f"cannot write {self.path / MANIFEST_FILE}: {error.strerror or error}; copy the bundle to a folder "
                "that you can write to"
            ) from error
        return replace(self, manifest=manifest)

    def check_trusted(self) -> None:
        """Refuse machine code that the caller has not declared trusted.

        Raises:
            BundleError: If the bundle holds such code.
        """
        backend = backend_for(self.manifest.target)
        if backend.machine_code and not self.trusted:
            raise untrusted(self.path, backend.machine_code)

    def layers(self) -> list[CacheLayer]:
        """Return the cache layers, without tensors.

        Raises:
            BundleError: If this release lacks a layer's layout, or a layer's tensors do not fit its parts.
        """
        # Importing the target registers its layouts.
        backend_for(self.manifest.target)
        layers = []
        for index, layer in enumerate(self.manifest.layers):
            if not Layout.has_kind(layer.kernel.get("kind")):
                raise BundleError(
                    f"layer {index} of {self.path} has the layout {layer.kernel.get('kind')!r}, this release has "
                    f"{', '.join(Layout.kinds)}; install the release that wrote it, or export the model again"
                )
            # `Manifest.read` could not check layouts that the target has just registered.
            problem = layer.problem()
            if problem is not None:
                raise BundleError(
                    f"{self.path / MANIFEST_FILE} is damaged: layers.{index}: {problem}; export the model again"
                )
            layers.append(layer_from(layer.config, {}))
        return layers

    @property
    def has_processor(self) -> bool:
        """True if the bundle has the model's processor of images or audio."""
        return any(file.holds == PROCESSOR for file in self.manifest.files.values())

    def processor(self) -> ProcessorMixin:
        """Return the model's processor of images or audio.

        Raises:
            BundleError: If the model was exported without one, or it cannot be read.
            MissingDependencyError: If it needs a package that is not installed, such as Pillow for images.
        """
        from ..models.loading.loading import load_processor

        if not self.has_processor:
            raise BundleError(
                f"{self.path} holds no processor of images or audio; export the folder of the model with its "
                "preprocessor_config.json"
            )
        return load_processor(self._tokenizer_folder, self.path)

    def text_tokenizer(self) -> PreTrainedTokenizerBase | TextTokenizer | None:
        """Return what encodes and decodes text: the tokenizer's file alone if the export found it sufficient."""
        file = self.manifest.files.get(TOKENIZER_FILE)
        if file is None or file.details.get(READS_ALIKE) is not True:
            return self.tokenizer()
        from ..models.tokenizers.text import TextTokenizer

        return TextTokenizer(self._tokenizer_folder, self._whole_tokenizer)

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Return the tokenizer with its chat template, or None if the model was exported without one."""
        return None if self.manifest.tokenizer is None else self._whole_tokenizer()

    @cached_property
    def _tokenizer_folder(self) -> Path:
        """Folder of the tokenizer, after checking that its config names no file outside it."""
        from ..models.tokenizers.text import check_tokenizer_config

        folder = self.path / TOKENIZER_FOLDER
        check_tokenizer_config(folder)
        return folder

    def _whole_tokenizer(self) -> PreTrainedTokenizerBase:
        from ..models.loading.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(self._tokenizer_folder)
        if tokenizer is None:
            raise BundleError(
                f"{self._tokenizer_folder} holds no tokenizer, the manifest names a {self.manifest.tokenizer}; "
                "export the model again with tokenizer= a transformers tokenizer"
            )
        return tokenizer
