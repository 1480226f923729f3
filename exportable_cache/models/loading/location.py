"""Where a model is: the shipped demo, a local folder or file, or a hub id. Looking it up imports no model code."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.utils import get_session
from transformers.utils import logging as transformers_logging

from ...common.compat.transformers import file_or_none
from ...demo import demo_path
from ...errors import InputError, first_line

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_TIMEOUT = 10.0


@dataclass(frozen=True)
class Place:
    """Where to load from: `Place("/models/tiny", "tiny", True)` or `Place("org/name", "org/name", False)`.

    Attributes:
        path: Folder or hub id.
        source: What messages and manifests call it.
        local: Whether the hub is not asked.
        gguf: Name of the one file in the folder that is the model, with its config and tokenizer; None for a folder.
    """

    path: str
    source: str
    local: bool
    gguf: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """What every `from_pretrained` is told beside the path."""
        found: dict[str, Any] = {"local_files_only": self.local, "trust_remote_code": False}
        return found if self.gguf is None else {**found, "gguf_file": self.gguf}


def place_of(model_or_path: str | os.PathLike) -> Place:
    if not isinstance(model_or_path, (str, os.PathLike)):
        raise InputError(
            f"model is a {type(model_or_path).__name__}; pass 'demo', a local folder, a hub id, or a transformers "
            "causal LM"
        )
    name = os.fspath(model_or_path)
    if not name:
        # As a path it would stand for the working folder.
        raise InputError("model is an empty name; pass 'demo', a local folder, or a hub id")
    if name == "demo":
        return Place(str(demo_path()), "demo", True)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return Place(str(folder), folder.resolve().name, True)
    if folder.is_file() and folder.suffix == ".gguf":
        return Place(str(folder.parent), folder.name, True, gguf=folder.name)
    if folder.exists():
        raise InputError(f"{name!r} is a file; pass the folder that holds config.json and the weights, or a .gguf file")
    if not isinstance(model_or_path, str) or not _HUB_ID.fullmatch(name):
        raise InputError(f"there is no folder {name!r}, and it is no hub id (like 'org/name') either; check the path")
    reachable, problem = _hub_answers()
    if not reachable:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            raise InputError(
                f"{name!r} is no local folder, is not in the local hub cache, and the hub cannot be reached "
                f"({problem}); check the path, or connect, or download the model and pass its folder"
            )
        return Place(name, name, True)
    return Place(name, name, False)


def _hub_answers() -> tuple[bool, str]:
    # Asked once beforehand: the hub's client would retry every file for half a minute.
    if constants.HF_HUB_OFFLINE:
        return False, "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_TIMEOUT)
    except Exception as error:  # the HTTP library behind the client differs between its releases
        return False, first_line(error)
    return True, ""


def file_in(place: Place, name: str) -> Path | None:
    """A file beside the model's; a GGUF file has none."""
    if place.gguf is not None:
        return None
    if Path(place.path).is_dir():
        path = Path(place.path) / name
        return path if path.is_file() else None
    found = file_or_none(place.path, name, local_files_only=place.local)
    return None if found is None else Path(found)


@contextmanager
def quiet() -> Iterator[None]:
    """Run a block without the progress bars, log lines and warnings of the libraries that load models."""
    bars, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    hub_logger = logging.getLogger("huggingface_hub")
    hub_level = hub_logger.level
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    hub_logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hub_logger.setLevel(hub_level)
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
