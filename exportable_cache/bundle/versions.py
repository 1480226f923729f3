"""Versions of the packages that a bundle depends on, and the check that they are those it was made with."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING

from ..errors import BundleError

if TYPE_CHECKING:
    from .manifest import Manifest

_PACKAGES = ("exportable-cache", "torch", "transformers")


def installed_versions(packages: tuple[str, ...] = ()) -> dict[str, str]:
    """Versions of Python, of the packages every program depends on, and of `packages`, where installed."""
    versions = {"python": platform.python_version()}
    for name in dict.fromkeys((*_PACKAGES, *packages)):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def check_versions(manifest: Manifest, packages: Sequence[str]) -> None:
    """Refuse a bundle that was made with other versions of `packages` than those installed.

    Raises:
        BundleError: If one differs by more than a patch release. A build label, such as `+cpu`, makes no other version.
    """
    installed = installed_versions(tuple(packages))
    for name in packages:
        recorded, found = manifest.packages.get(name), installed.get(name)
        if recorded is None or found is None or _series(recorded) != _series(found):
            # A release of executorch goes with one series of torch, so both are named.
            wanted = [one for one in dict.fromkeys((name, "torch")) if _differs(manifest.packages, installed, one)]
            releases = " ".join(f"{one}=={_public(manifest.packages[one])}" for one in wanted)
            remedy = f"pip install {releases}, " if recorded and releases else ""
            raise BundleError(
                f"the bundle was made with {name} {recorded or '(not recorded)'}, installed is {found or 'none'}; "
                f"{remedy}export the model again, or try anyway with check_versions=False (--ignore-versions)"
            )


def _differs(recorded: Mapping[str, str], installed: Mapping[str, str], name: str) -> bool:
    return name in recorded and _series(recorded[name]) != _series(installed.get(name, ""))


def _public(version: str) -> str:
    return version.partition("+")[0]


def _series(version: str) -> list[str]:
    """Major and minor number: patch releases of one series read each other's files."""
    return _public(version).split(".")[:2]
