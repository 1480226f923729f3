"""The folder an export writes, opened: program files, tokenizer, configs, and the manifest that makes it a bundle."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..backends import backend_for
from ..cache.kernel import Kernel
from ..cache.layers import layer_from
from ..common.progress import silent
from ..errors import BundleError
from .digests import check_files as check_digests
from .manifest import MANIFEST_FILE, SCHEMA_VERSION, Manifest
from .versions import check_versions as check_installed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from ..backends.base import Runner
    from ..cache.layers import CacheLayer
    from ..common.progress import Progress

__all__ = ["MANIFEST_FILE", "SCHEMA_VERSION", "Bundle", "Manifest"]

TOKENIZER_FOLDER = "tokenizer"
#: What the manifest says that its files are; they lie beside the tokenizer's.
PROCESSOR = "processor"


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
        known: bool = False,
        progress: Progress = silent,
    ) -> Bundle:
        """Open a bundle; its program is not loaded yet.

        Args:
            path: The folder.
            check_versions: Refuse other versions of the packages its target depends on. A build label, such as `+cpu`,
                makes no other version.
            check_files: Compare every file with its recorded size and checksum.
            known: Go by what this user's earlier checks found of the same file versions, and read the other files
                only, see `known_digests`.
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
            check_installed(manifest, backend_for(manifest.target).packages)
        if check_files:
            check_digests(folder, manifest, progress, known)
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
                    f"layer {index} of {self.path} has the kernel {layer.kernel.get('kind')!r}, this release has "
                    f"{', '.join(Kernel.kinds)}; install the release that wrote it, or export the model again"
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
                f"{self.path} holds no processor of images or sound; export the folder of the model with its "
                "preprocessor_config.json"
            )
        return load_processor(self.path / TOKENIZER_FOLDER, self.path)

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer with its chat template, or None if the model was exported without one."""
        from ..models.tokenizers import load_tokenizer

        if self.manifest.tokenizer is None:
            return None
        tokenizer = load_tokenizer(self.path / TOKENIZER_FOLDER)
        if tokenizer is None:
            raise BundleError(
                f"{self.path / TOKENIZER_FOLDER} holds no tokenizer, the manifest names a {self.manifest.tokenizer}; "
                "export the model again with tokenizer= a transformers tokenizer"
            )
        return tokenizer
