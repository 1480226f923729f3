"""Opening a bundle on disk as a session."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..common.process.quiet import quietly
from ..common.progress import silent
from .session import Session

if TYPE_CHECKING:
    from ..common.progress import Progress


@quietly
def load(
    path: str | Path,
    *,
    check_versions: bool = True,
    trust: bool = False,
    key: str | Path | None = None,
    check: bool = False,
    progress: Progress = silent,
) -> Session:
    """Open a bundle that `export` wrote, ready to run.

    Args:
        path: The folder.
        check_versions: Refuse a bundle made with other versions of the packages its target depends on.
        check: Read and check every file. By default those that this user has not checked as they are, going by size,
            time stamps, inode and device.
        trust: Let machine code in it run, as targets `aoti` and `tensorrt` have it: it can do what you can.
        key: File of the public key that must have signed it (`export(..., sign=)`); None for no check of who made it.
        progress: Told about bytes checked.

    Raises:
        BundleError: If it is missing, damaged, of another schema version or of other package versions, not signed with
            the key, or machine code that is not trusted.
        InputError: If the key cannot be read.
        MissingDependencyError: If its target, or the check of a signature, needs a package that is not installed.
    """
    from ..bundle.bundle import Bundle

    bundle = Bundle.open(
        path, check_versions=check_versions, trust=trust, key=key, known=not check, to_run=True, progress=progress
    )
    return Session.from_bundle(bundle)
