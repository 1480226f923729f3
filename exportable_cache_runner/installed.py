"""Find the native libraries that `exportable-cache native build` or a wheel installed, without reading metadata."""

from __future__ import annotations

import sys
from pathlib import Path

#: Folder next to the installed packages. It has one folder for each release of executorch, because the libraries
#: depend on its binary interface.
FOLDER = "exportable_cache_native"


def executorch_release() -> str | None:
    """Return the release of the installed executorch, or None.

    The name of the metadata's folder has it. `importlib.metadata` would take longer than opening a small bundle.
    """
    for entry in sys.path:
        found = sorted(Path(entry).glob("executorch-*.dist-info"))
        if found:
            return found[0].name.removeprefix("executorch-").removesuffix(".dist-info")
    return None


def release_folder() -> str:
    """Return the path of the libraries, relative to the folder of installed packages."""
    return f"{FOLDER}/executorch-{executorch_release() or 'none'}"


def installed_library(file: str) -> Path | None:
    """Return the installed library of this name for the installed executorch, or None."""
    folder = release_folder()
    paths = (Path(entry, folder, file) for entry in sys.path)
    return next((path for path in paths if path.is_file()), None)
