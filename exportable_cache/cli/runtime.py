"""Opening of bundles in the native runner, for the commands that run them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..common.process.tuning import no_collections

if TYPE_CHECKING:
    from ..decoding.completion import AnyCompleter
    from ..session.native import NativeSession
    from .output.terminal import Terminal


def open_natively(
    terminal: Terminal, folder: Path, ignore_versions: bool, check: bool, key: Path | None, text: bool = True
) -> NativeSession | None:
    """Return the bundle's session in the native runner; None if torch's runtime has to run it, with a note why.

    Raises:
        BundleError, InputError: See `open_native`.
    """
    with terminal.progress(f"opening {folder}") as progress, no_collections():
        from ..session.native import NotNative, open_native

        try:
            return open_native(
                folder, check_versions=not ignore_versions, known=not check, key=key, text=text, progress=progress
            )
        except NotNative as left:
            reason = left.reason
    _note(terminal, reason)
    return None


def leave_to_torch(terminal: Terminal, folder: Path, reason: str) -> None:
    """Note why torch's runtime runs a bundle that the native runner runs otherwise.

    Raises:
        BundleError: If the folder is not a bundle.
        InputError: If the user chose the native runner.
    """
    from ..bundle.checked import CheckedBundle
    from ..session.native import NotNative, runtime_chosen

    try:
        with runtime_chosen(folder):
            raise NotNative(reason if CheckedBundle.read(folder).target == "executorch" else "")
    except NotNative as left:
        _note(terminal, left.reason)


def _note(terminal: Terminal, reason: str) -> None:
    if reason:
        terminal.note(f"using torch's runtime, which starts more slowly: {reason}")


class BundleChecks(NamedTuple):
    """Options of commands for the checks of a bundle that is opened; see `load`."""

    ignore_versions: bool
    trust: bool
    check: bool
    key: Path | None


def open_completer(terminal: Terminal, folder: Path, checks: BundleChecks, split_special_tokens: bool) -> AnyCompleter:
    """Open a bundle, and return what completes prompts over it; settings that are not followed are noted.

    Args:
        terminal: Shows progress and notes.
        folder: Folder of the bundle.
        checks: How it is checked.
        split_special_tokens: See `AnyCompleter`.

    Raises:
        BundleError, InputError, MissingDependencyError: See `load` and `Completer`.
    """
    completer: AnyCompleter
    native = open_natively(terminal, folder, checks.ignore_versions, checks.check, checks.key)
    if native is not None:
        from ..decoding.native_completion import NativeCompleter

        completer = NativeCompleter(native, split_special_tokens)
    else:
        with terminal.opening(folder):
            from ..decoding.completion import Completer
            from ..session.session import load

            versions = not checks.ignore_versions
            session = load(folder, check_versions=versions, trust=checks.trust, key=checks.key, check=checks.check)
            completer = Completer(session, split_special_tokens)
    terminal.note_all(completer.settings.remarks())
    return completer
