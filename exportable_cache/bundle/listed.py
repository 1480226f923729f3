"""Files of a bundle that its manifest does not list: those that something would read are refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import BundleError
from .entries import rank_folder

if TYPE_CHECKING:
    from .manifest import Manifest

TOKENIZER_FOLDER = "tokenizer"
#: What `tokenizers` reads by itself.
TOKENIZER_FILE = f"{TOKENIZER_FOLDER}/tokenizer.json"
#: Detail of that file: whether it gives, by itself, what transformers' tokenizer gives.
READS_ALIKE = "reads_alike"
#: Another: the chat template as texts between turns, see `ChatTurns`.
CHAT_TURNS = "chat_turns"
#: Of files that hold programs or weights. Others, such as a README of who copied the folder, are not read.
_READ = (".pt", ".pt2", ".pte", ".ptd", ".plan", ".so", ".safetensors")


def check_listed(folder: Path, manifest: Manifest) -> None:
    """Refuse files that would be read and whose digest nobody checks, and links.

    A tokenizer reads whatever its folder has: an `added_tokens.json` there changes tokens, a `chat_template.jinja` what
    the model is asked.

    Raises:
        BundleError: If there is one.
    """
    folders = (
        [""] if manifest.ranks is None else ["", *(f"{rank_folder(rank)}/" for rank in range(manifest.ranks.size))]
    )
    try:
        names = [
            place + entry.name
            for place in folders
            if os.path.isdir(folder / place)
            for entry in os.scandir(folder / place)
            if entry.name.endswith(_READ)
        ]
    except OSError as error:
        raise BundleError(f"cannot read {folder}: {error.strerror or error}; check its permissions") from error
    for place, inside, files in os.walk(folder):
        for name in (*inside, *files):
            if os.path.islink(os.path.join(place, name)):
                raise BundleError(
                    f"{Path(place, name)} is a link, so what it shows can lie anywhere; put the file there instead"
                )
    for place, _, files in os.walk(folder / TOKENIZER_FOLDER):
        names += [Path(place, file).relative_to(folder).as_posix() for file in files]
    unlisted = sorted(name for name in names if name not in manifest.files)
    if unlisted:
        raise BundleError(
            f"{folder / unlisted[0]} would be read, but the manifest does not list it, so nobody has checked it; "
            "remove it, or export the model again"
        )
