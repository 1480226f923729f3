"""Targets by name, as dotted paths, so that importing the package imports no target."""

from __future__ import annotations

from importlib import import_module, util
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
}


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
    if "executorch" in packages:
        check_pair()
    return import_module(module).backend


def check_target(target: str) -> None:
    """Check the name of a target without importing any.

    Raises:
        InputError: If the target is unknown.
    """
    if target not in TARGETS:
        raise InputError(f"unknown target {target!r}; choose one of {', '.join(TARGETS)}")
