"""Registry of targets by name, without importing any."""

from __future__ import annotations

from importlib import import_module, metadata, util
from typing import TYPE_CHECKING

from ..common.compat.executorch import check_pair
from ..errors import InputError, MissingDependencyError

if TYPE_CHECKING:
    from .base import Backend


#: Target -> (module that defines `backend`, packages it needs, extra that installs them).
TARGETS: dict[str, tuple[str, tuple[str, ...], str | None]] = {
    "pt2": ("exportable_cache.backends.pt2.target", (), None),
    "aoti": ("exportable_cache.backends.aoti.target", (), None),
    "executorch": ("exportable_cache.backends.executorch.target", ("executorch",), "executorch"),
    "tensorrt": ("exportable_cache.backends.tensorrt.target", ("torch_tensorrt",), "tensorrt-rtx"),
    "coreai": ("exportable_cache.backends.coreai.target", ("coreai_torch", "coreai"), "coreai"),
}


#: Oldest series of torch whose exporter is known. `pyproject.toml` accepts older ones for live sessions.
EXPORTER_TORCH = (2, 13)


def backend_for(target: str) -> Backend:
    """Return the backend of a target.

    Raises:
        InputError: If the target is unknown.
        MissingDependencyError: If a package it needs is not installed, or two versions are incompatible.
    """
    check_target(target)
    module, packages, extra = TARGETS[target]
    missing = [package for package in packages if util.find_spec(package) is None]
    if missing:
        raise MissingDependencyError(
            f"target {target!r} needs {', '.join(missing)}, which is not installed; pip install "
            f"'exportable-cache[{extra}]'"
        )
    check_torch(metadata.version("torch"))
    if "executorch" in packages:
        check_pair()
    return import_module(module).backend


def check_torch(version: str) -> None:
    """Check that a release of torch exports programs; live sessions also run on older ones.

    Raises:
        MissingDependencyError: If it is too old.
    """
    series = tuple(int(number) for number in version.split(".")[:2])
    if series < EXPORTER_TORCH:
        oldest = ".".join(map(str, EXPORTER_TORCH))
        raise MissingDependencyError(
            f"exported programs need torch {oldest} or newer, and {version} is installed, which only runs live "
            f"sessions; pip install 'torch>={oldest}'"
        )


def check_target(target: str) -> None:
    """Check the name of a target without importing any.

    Raises:
        InputError: If the target is unknown.
    """
    if target not in TARGETS:
        raise InputError(f"unknown target {target!r}; choose one of {', '.join(TARGETS)}")
