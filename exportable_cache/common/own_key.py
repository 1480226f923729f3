"""The key of a user: what was written with it is the user's own, and what anybody else put in its place is not.

A digest alone is no proof, as anybody can compute one; nor is the owner of a file where the system names none. The key
is a file that nobody but the user can read, beside what else this package notes for the user.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

from ..errors import InputError
from .own_files import HOME_VARIABLE, home_folder, is_private_file

_FILE = "key"
_BYTES = 32


def own_key() -> bytes:
    """The user's key of 32 bytes, which is made when it is first asked for.

    Raises:
        InputError: If there is no place for it, it is damaged, or others can read or change it.
    """
    try:
        path = home_folder() / _FILE
        if not path.exists():
            _make(path)
        with path.open("rb") as file:
            is_private, key = is_private_file(file.fileno()), file.read()
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        raise InputError(
            f"compiled graphs are kept under a key of your own, which cannot be read or made: {error}; name a folder "
            f"that you can write to by {HOME_VARIABLE}"
        ) from error
    if not is_private:
        raise InputError(f"{path} is a key that others may know or have put there; remove it, a new one is made then")
    if len(key) != _BYTES:
        raise InputError(f"{path} has {len(key)} bytes, a key has {_BYTES}; remove it, a new one is made then")
    return key


def _make(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Readable by the user alone from its first byte on.
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(_BYTES))
        try:
            # Unlike a rename, it fails where another process was first, whose key counts.
            os.link(name, path)
        except FileExistsError:
            return
        except OSError:  # a file system without links
            os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
