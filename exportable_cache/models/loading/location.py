"""Locations of models: the packaged demo, a local folder or file, or a hub id. Nothing here imports model code."""

from __future__ import annotations

import json
import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Any

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.utils import HFValidationError, get_session, validate_repo_id
from transformers.utils import logging as transformers_logging

from ...common.compat.transformers import file_or_none
from ...demo import demo_path
from ...errors import ExportableCacheError, InputError, first_line

if TYPE_CHECKING:
    import torch

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_TIMEOUT = 10.0
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Location:
    """A location to load from: `Location("/models/tiny", "tiny", True)` or `Location("org/name", "org/name", False)`.

    Attributes:
        path: Folder or hub id.
        source: Name in messages and manifests.
        local: True if the hub is not used.
        gguf: File name of a GGUF model, which includes its config and tokenizer; None for a folder.
    """

    path: str
    source: str
    local: bool
    gguf: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of every `from_pretrained`."""
        found: dict[str, Any] = {"local_files_only": self.local, "trust_remote_code": False}
        return found if self.gguf is None else {**found, "gguf_file": self.gguf}


def locate(model_or_path: str | os.PathLike) -> Location:
    """Return the location of `demo`, a local folder or GGUF file, or a hub id.

    Raises:
        InputError: If there is no such folder, file or id.
    """
    if not isinstance(model_or_path, (str, os.PathLike)):
        raise InputError(
            f"model must be 'demo', a local folder, a hub id or a transformers causal LM, got "
            f"{type(model_or_path).__name__}; pass one of these"
        )
    name = os.fspath(model_or_path)
    if not name:
        # Because as a path it would mean the working folder.
        raise InputError("model must not be an empty string; pass 'demo', a local folder, or a hub id")
    if name == "demo":
        return Location(str(demo_path()), "demo", True)
    folder = Path(name).expanduser()
    # Not by pathlib, which raises an error for a name that is too long.
    if os.path.isdir(folder):
        return Location(str(folder), folder.resolve().name, True)
    if os.path.isfile(folder) and folder.suffix == ".gguf":
        return Location(str(folder.parent), folder.name, True, gguf=folder.name)
    if os.path.exists(folder):
        raise InputError(
            f"model must be a folder or a .gguf file, got {name!r}; pass the folder with config.json and the weights"
        )
    if not isinstance(model_or_path, str) or not _HUB_ID.fullmatch(name):
        raise InputError(
            f"model must be an existing folder or a hub id (like 'org/name'), got {name!r}; check the path"
        )
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise InputError(
            f"model must be an existing folder or an id that the hub allows, got {name!r:.100} "
            f"({first_line(error):.200}); check the path"
        ) from error
    reachable, problem = hub_answers()
    if not reachable:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            raise InputError(
                f"{name!r} is not a local folder, is not in the local hub cache, and the hub cannot be reached "
                f"({problem}); check the path, or connect, or download the model and pass its folder"
            )
        return Location(name, name, True)
    return Location(name, name, False)


def hub_answers() -> tuple[bool, str]:
    """Return True if the hub can be reached, and otherwise why it cannot."""
    # Checked once in advance, because the hub's client retries every file for half a minute.
    if constants.HF_HUB_OFFLINE:
        return False, "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_TIMEOUT)
    except Exception as error:  # the hub's client uses different HTTP libraries in different releases
        return False, first_line(error)
    return True, ""


@contextmanager
def hub_errors(repository: str, revision: str | None = None) -> Iterator[None]:
    """Replace errors of the hub's client, and of transformers over it, by one sentence within the block.

    Raises:
        InputError: If the hub, or the connection to it, failed.
    """
    try:
        yield
    except ExportableCacheError:
        raise
    except Exception as error:  # the hub's client uses different HTTP libraries in different releases
        raise InputError(_hub_failure(error, repository, revision)) from error


def _hub_failure(error: BaseException, repository: str, revision: str | None) -> str:
    """Return why the hub refused a request, with the remedy."""
    login = "log in with `hf auth login`, or pass a token (HF_TOKEN)"
    causes = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    kinds = {kind.__name__ for one in causes for kind in type(one).__mro__}
    statuses = {getattr(getattr(one, "response", None), "status_code", None) for one in causes}
    if "GatedRepoError" in kinds:
        return f"{repository!r} is gated: accept its terms at {constants.ENDPOINT}/{repository}, and {login}"
    if "RevisionNotFoundError" in kinds:
        return f"{repository!r} has no revision {revision!r}; pass one of its branches, tags or commits"
    if "RepositoryNotFoundError" in kinds:
        return f"the hub has no repository {repository!r}, or it is private; check the id, or {login}"
    if statuses & {401, 403}:
        return f"the hub denies access to {repository!r}; {login}"
    # The client's error for a connection that broke is a ValueError, too.
    if (404 in statuses or "ValueError" in kinds) and "LocalEntryNotFoundError" not in kinds:
        return f"the hub cannot serve the request for {repository!r} ({first_line(error)}); check its files and names"
    return f"the transfer of {repository!r} failed ({first_line(error)}); run it again, and it continues"


def file_in(location: Location, name: str) -> Path | None:
    """Return the path of a file of the model, or None; a GGUF file has no others."""
    if location.gguf is not None:
        return None
    if Path(location.path).is_dir():
        path = Path(location.path) / name
        return path if path.is_file() else None
    with hub_errors(location.source):
        found = file_or_none(location.path, name, local_files_only=location.local)
    return None if found is None else Path(found)


def json_in(path: Path, location: Location, remedy: str = "download it again") -> Any:
    """Return the content of a file of JSON.

    Args:
        path: The file, as `file_in` returns it.
        location: Names the model in the error.
        remedy: What to do if the file cannot be read.

    Raises:
        InputError: If it cannot.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read {path.name} of {location.source!r}: {first_line(error)}; {remedy}") from error


def shards(location: Location) -> list[Path]:
    """Return the safetensors files of a checkpoint, downloaded if they have to be; none if it has others.

    Other files next to them do not count: Mistral's folders have the weights in a second layout, too.

    Raises:
        InputError: If the index is damaged, or names files that are missing or outside the checkpoint.
    """
    whole = file_in(location, _WEIGHTS)
    if whole is not None:
        return [whole]
    index = file_in(location, _INDEX)
    if index is None:
        return []
    try:
        names = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise InputError(
            f"cannot read {_INDEX} of {location.source!r}: {first_line(error)}; download it again"
        ) from error
    # By the rules of Windows, because they include the separators of other systems.
    paths = ((name, PureWindowsPath(name)) for name in names)
    outside = next((name for name, path in paths if path.anchor or ".." in path.parts), None)
    if outside is not None:
        raise InputError(
            f"{_INDEX} of {location.source!r} must name files of the checkpoint, got {outside!r:.99}; download it again"
        )
    found = {name: file_in(location, name) for name in names}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        raise InputError(f"{location.source!r} has no file {missing[0]}, which {_INDEX} names; download it again")
    return [path for path in found.values() if path is not None]


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress progress bars, log lines and warnings of the libraries that load models inside the block."""
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


#: Names of torch's dtypes by those of safetensors.
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip


def header_of(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a safetensors file on the meta device, except those of other dtypes.

    Raises:
        InputError: If it is truncated, or is not such a file.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                part = file.get_slice(name)
                dtype = _DTYPES.get(part.get_dtype())
                if dtype is not None:
                    yield name, torch.empty(part.get_shape(), dtype=getattr(torch, dtype), device="meta")
    # The others are torch's, of shapes that no tensor has.
    except (SafetensorError, OSError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(
            f"cannot read {path.name}: {first_line(error)}; it is truncated or damaged, download it again"
        ) from error
