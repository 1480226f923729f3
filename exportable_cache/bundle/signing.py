"""Ed25519 signatures of bundles: the manifest is signed, and it lists the digest of every file.

A checksum detects damage, but anyone who changes a file can compute a new one. A signature requires the private key.
Keys are files of OpenSSL (`openssl genpkey -algorithm ed25519`) or OpenSSH (`ssh-keygen -t ed25519`).
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
#: Prefix of the signed bytes, so that signatures made for other purposes do not match.
_CONTEXT = b"exportable_cache bundle manifest 1\n"
_MOST_BYTES = 1 << 16


def private_key(path: str | os.PathLike) -> Ed25519PrivateKey:
    """Return the private key in a file.

    Raises:
        InputError: If the file cannot be read, or the key is encrypted or not an Ed25519 key.
        MissingDependencyError: If `cryptography` is not installed.
    """
    keys, serialization = _library()
    data = _read(path)
    load = serialization.load_ssh_private_key if b"OPENSSH PRIVATE" in data else serialization.load_pem_private_key
    try:
        key = load(data, password=None)
    except TypeError as error:
        raise InputError(
            f"the key in {path} must not be encrypted; pass an unencrypted key that only you can read"
        ) from error
    except Exception as error:  # the library raises errors of several classes
        raise InputError(
            f"{path} holds no private key ({first_line(error)}); make one: openssl genpkey -algorithm ed25519 -out FILE"
        ) from error
    if not isinstance(key, keys.Ed25519PrivateKey):
        raise InputError(f"the key in {path} is a {type(key).__name__}; bundles are signed with Ed25519 keys")
    return key


def public_key(path: str | os.PathLike) -> Ed25519PublicKey:
    """Return the public key in a file, which may also be a private key's file.

    Raises:
        InputError: If the file cannot be read, or the key is not an Ed25519 key.
        MissingDependencyError: If `cryptography` is not installed.
    """
    keys, serialization = _library()
    data = _read(path)
    if b"PRIVATE KEY" in data:
        return private_key(path).public_key()
    load = serialization.load_ssh_public_key if data.startswith(b"ssh-") else serialization.load_pem_public_key
    try:
        key = load(data)
    except Exception as error:  # the library raises errors of several classes
        raise InputError(
            f"{path} holds no public key ({first_line(error)}); pass the signer's public key in PEM or OpenSSH format"
        ) from error
    if not isinstance(key, keys.Ed25519PublicKey):
        raise InputError(f"the key in {path} is a {type(key).__name__}; bundles are signed with Ed25519 keys")
    return key


def sign(folder: Path, manifest: bytes, key: Ed25519PrivateKey, name: str = SIGNATURE_FILE) -> None:
    """Write the signature of a manifest next to it.

    Args:
        folder: The bundle.
        manifest: Bytes of the manifest's file, or other bytes that do not begin as a JSON object.
        key: The private key.
        name: Name of the signature's file.
    """
    content = {
        "algorithm": "ed25519",
        "key": fingerprint(key.public_key()),
        "signature": base64.b64encode(key.sign(_CONTEXT + manifest)).decode(),
    }
    (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def check(folder: Path, manifest: bytes, key: Ed25519PublicKey, name: str = SIGNATURE_FILE) -> None:
    """Check that a manifest is signed with a key.

    Args:
        folder: The bundle.
        manifest: Bytes that were read from the manifest; the file is not read again.
        key: The public key.
        name: Name of the signature's file.

    Raises:
        BundleError: If the signature is missing, was made with another key, or does not match the manifest.
    """
    path, wanted = folder / name, fingerprint(key)
    try:
        # Checked first, because opening a pipe would block.
        if path.exists() and not path.is_file():
            raise OSError("it is not a regular file")
        with path.open("rb") as file:
            content = json.loads(file.read(_MOST_BYTES))
        algorithm, signer = content["algorithm"], content["key"]
        signature = base64.b64decode(content["signature"], validate=True)
    except FileNotFoundError as error:
        raise BundleError(
            f"{folder} must be signed by {wanted} (key=, --key), but it has no {name}; get a signed copy, or "
            "leave the key out if you trust its origin"
        ) from error
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise BundleError(f"cannot read {path}: {first_line(error)}; get the bundle again") from error
    if algorithm != "ed25519" or signer != wanted:
        raise BundleError(
            f"{folder} must be signed by the given key {wanted}, got a signature by {signer!r:.80}; do not trust it, "
            "or pass its author's key"
        )
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, _CONTEXT + manifest)
    except InvalidSignature as error:
        what = "the manifest, so the bundle" if name == SIGNATURE_FILE else "the file, so it"
        raise BundleError(
            f"the signature in {path} does not match {what} was changed after it was signed; "
            "do not trust it, and get it again from its author"
        ) from error


def fingerprint(key: Ed25519PublicKey) -> str:
    """Return a short name of a public key: `SHA256:` and the digest of its 32 bytes."""
    from cryptography.hazmat.primitives import serialization

    raw = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return "SHA256:" + base64.b64encode(hashlib.sha256(raw).digest()).decode().rstrip("=")


def signer(folder: Path) -> str | None:
    """Return the fingerprint that a bundle's signature names, None without one; the signature is not checked."""
    try:
        named = json.loads((folder / SIGNATURE_FILE).read_bytes()[:_MOST_BYTES])["key"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return named if isinstance(named, str) else None


def _read(path: str | os.PathLike) -> bytes:
    try:
        with Path(path).expanduser().open("rb") as file:
            return file.read(_MOST_BYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise InputError(f"cannot read the key in {path}: {reason}; pass the path of a key file") from error


def _library() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise MissingDependencyError(
            "signatures need cryptography, which is not installed; pip install 'exportable-cache[sign]'"
        ) from error
    return ed25519, serialization
