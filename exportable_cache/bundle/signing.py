"""Who made a bundle: an Ed25519 signature over its manifest, which lists the digest of every file.

A checksum finds damage; whoever changes a file can compute it anew. A signature cannot be made without the private key.
Keys are files of OpenSSL (`openssl genpkey -algorithm ed25519`) or of OpenSSH (`ssh-keygen -t ed25519`).
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BundleError, InputError, MissingDependencyError, first_line

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SIGNATURE_FILE = "manifest.sig"
#: Before what is signed, so that no signature made for something else fits.
_CONTEXT = b"exportable_cache bundle manifest 1\n"
_MOST_BYTES = 1 << 16


def private_key(path: str | os.PathLike) -> Ed25519PrivateKey:
    """The private key in a file, to sign with.

    Raises:
        InputError: If it cannot be read, is encrypted, or is of another kind.
        MissingDependencyError: If `cryptography` is not installed.
    """
    keys, serialization = _library()
    data = _read(path)
    load = serialization.load_ssh_private_key if b"OPENSSH PRIVATE" in data else serialization.load_pem_private_key
    try:
        key = load(data, password=None)
    except TypeError as error:
        raise InputError(
            f"the key in {path} is encrypted; pass one that is not, kept where others cannot read"
        ) from error
    except Exception as error:  # the library has errors of several classes
        raise InputError(
            f"{path} holds no private key ({first_line(error)}); make one: openssl genpkey -algorithm ed25519 -out FILE"
        ) from error
    if not isinstance(key, keys.Ed25519PrivateKey):
        raise InputError(f"the key in {path} is a {type(key).__name__}; bundles are signed with Ed25519 keys")
    return key


def public_key(path: str | os.PathLike) -> Ed25519PublicKey:
    """The public key in a file, to check with; a private key's file has it, too.

    Raises:
        InputError: If it cannot be read, or is of another kind.
        MissingDependencyError: If `cryptography` is not installed.
    """
    keys, serialization = _library()
    data = _read(path)
    if b"PRIVATE KEY" in data:
        return private_key(path).public_key()
    load = serialization.load_ssh_public_key if data.startswith(b"ssh-") else serialization.load_pem_public_key
    try:
        key = load(data)
    except Exception as error:  # the library has errors of several classes
        raise InputError(
            f"{path} holds no public key ({first_line(error)}); ask who signs for theirs, a file in PEM or OpenSSH form"
        ) from error
    if not isinstance(key, keys.Ed25519PublicKey):
        raise InputError(f"the key in {path} is a {type(key).__name__}; bundles are signed with Ed25519 keys")
    return key


def sign(folder: Path, manifest: bytes, key: Ed25519PrivateKey) -> None:
    """Write the signature of a manifest beside it.

    Args:
        manifest: The bytes of its file.
    """
    content = {
        "algorithm": "ed25519",
        "key": fingerprint(key.public_key()),
        "signature": base64.b64encode(key.sign(_CONTEXT + manifest)).decode(),
    }
    (folder / SIGNATURE_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def check(folder: Path, manifest: bytes, key: Ed25519PublicKey) -> None:
    """Refuse a manifest that the owner of a key has not signed.

    Args:
        manifest: The bytes that were read, and no others read later.

    Raises:
        BundleError: If there is no signature, it is by another key, or of another manifest.
    """
    path, wanted = folder / SIGNATURE_FILE, fingerprint(key)
    try:
        # Opening a pipe would wait for ever.
        if path.exists() and not path.is_file():
            raise OSError("it is no regular file")
        with path.open("rb") as file:
            content = json.loads(file.read(_MOST_BYTES))
        algorithm, signer = content["algorithm"], content["key"]
        signature = base64.b64decode(content["signature"], validate=True)
    except FileNotFoundError as error:
        raise BundleError(
            f"{folder} is not signed: it has no {SIGNATURE_FILE}, and key= (--key) asks for the signature of {wanted}; "
            "get a signed copy, or leave the key out if you trust where it came from"
        ) from error
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise BundleError(f"cannot read {path}: {first_line(error)}; get the bundle again") from error
    if algorithm != "ed25519" or signer != wanted:
        raise BundleError(
            f"{folder} is signed by {signer!r:.80}, not by the key that was given, {wanted}; do not trust it, or pass "
            "the key of who made it"
        )
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, _CONTEXT + manifest)
    except InvalidSignature as error:
        raise BundleError(
            f"the signature in {path} is not one of this manifest: the bundle was changed after it was signed; "
            "do not trust it, get it again from who made it"
        ) from error


def fingerprint(key: Ed25519PublicKey) -> str:
    """A short name of a public key: `SHA256:` and the digest of its 32 bytes."""
    from cryptography.hazmat.primitives import serialization

    raw = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return "SHA256:" + base64.b64encode(hashlib.sha256(raw).digest()).decode().rstrip("=")


def _read(path: str | os.PathLike) -> bytes:
    try:
        with Path(path).expanduser().open("rb") as file:
            return file.read(_MOST_BYTES)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the key in {path}: {first_line(error)}; pass the path of a key file") from error


def _library() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise MissingDependencyError(
            "signatures need cryptography, which is not installed; pip install 'exportable-cache[sign]'"
        ) from error
    return ed25519, serialization
