"""Machine code runs for who trusts it only; a signature says who made a bundle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from exportable_cache import Session, export, load
from exportable_cache.backends import TARGETS, backend_for
from exportable_cache.backends.pt2.target import Pt2Backend
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.bundle.signing import SIGNATURE_FILE
from exportable_cache.cli.app import app
from exportable_cache.errors import BundleError, InputError, MissingDependencyError
from exportable_cache.verification.verify import verify

from ..support import fake_target
from ..support.models import tiny_model
from .conftest import reseal

ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
from cryptography.hazmat.primitives import serialization  # noqa: E402  after the skip
from cryptography.hazmat.primitives.asymmetric import rsa  # noqa: E402


@pytest.fixture
def machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pt2Backend, "machine_code", "machine code")


def test_targets_that_hold_machine_code_say_so() -> None:
    assert backend_for("aoti").machine_code
    assert not backend_for("pt2").machine_code
    for target in ("executorch", "tensorrt"):
        try:
            assert bool(backend_for(target).machine_code) is (target == "tensorrt")
        except MissingDependencyError:
            pass


@pytest.mark.usefixtures("machine_code")
def test_machine_code_is_refused_until_it_is_trusted(bundle: Path) -> None:
    with pytest.raises(BundleError, match=r"machine code, which can do anything that you can.*trust=True \(--trust\)"):
        load(bundle)
    with pytest.raises(BundleError, match="trust=True"):
        Session.from_bundle(Bundle.open(bundle))
    with pytest.raises(BundleError, match="trust=True"):
        verify(bundle, "demo", prompts=[3])
    assert load(bundle, trust=True).target == "pt2"
    assert verify(bundle, "demo", trust=True, prompts=[3], decode_steps=1).passed


@pytest.mark.usefixtures("machine_code")
@pytest.mark.parametrize(
    "command",
    [("generate", "-p", "amber?", "--max-new-tokens", "1"), ("bench", "--steps", "1"), ("verify", "--model", "demo")],
    ids=lambda command: command[0],
)
def test_so_do_the_commands(bundle: Path, command: tuple[str, ...]) -> None:
    arguments = [command[0], str(bundle), *command[1:]]
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 2
    assert "--trust" in refused.stderr
    if command[0] == "generate":
        assert CliRunner().invoke(app, [*arguments, "--trust"]).exit_code == 0
    # Nothing of it runs.
    assert CliRunner().invoke(app, ["inspect", str(bundle)]).exit_code == 0


@pytest.mark.usefixtures("machine_code")
def test_what_this_process_has_made_is_trusted(tmp_path: Path) -> None:
    made = export(tiny_model("llama"), "pt2", 32, tmp_path / "bundle", prefill_chunk=8)
    assert made.manifest.verification["passed"]
    assert Session.from_bundle(made).target == "pt2"


# -- signatures ------------------------------------------------------------------------------------------------------


def _key(folder: Path, name: str, ssh: bool = False) -> tuple[Path, Path]:
    """Files of a new private key and of its public one."""
    key = ed25519.Ed25519PrivateKey.generate()
    encoding = serialization.Encoding
    private_format = serialization.PrivateFormat.OpenSSH if ssh else serialization.PrivateFormat.PKCS8
    public_as = (
        (encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        if ssh
        else (encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    private, public = folder / name, folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(encoding.PEM, private_format, serialization.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(*public_as))
    return private, public


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return _key(tmp_path, "key")


@pytest.fixture
def signed(keys: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(TARGETS, "fake", fake_target.ENTRY)
    export(tiny_model("llama"), "fake", 32, tmp_path / "signed", sign=keys[0], verify=False)
    return tmp_path / "signed"


def test_a_signed_bundle_opens_with_the_key_of_who_signed_it(signed: Path, keys: tuple[Path, Path]) -> None:
    for key in keys:
        opened = Bundle.open(signed, key=key)
        assert opened.signed_by.startswith("SHA256:")
    assert load(signed, key=keys[1]).target == "fake"
    assert Bundle.open(signed).signed_by is None
    shown = CliRunner().invoke(app, ["inspect", str(signed), "--key", str(keys[1])])
    assert shown.exit_code == 0
    assert opened.signed_by in "".join(shown.stdout.split("\n"))


def test_keys_of_openssh_do_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, "fake", fake_target.ENTRY)
    private, public = _key(tmp_path, "id_ed25519", ssh=True)
    export(tiny_model("llama"), "fake", 32, tmp_path / "bundle", sign=private, verify=False)
    assert Bundle.open(tmp_path / "bundle", key=public).signed_by


def test_another_key_no_signature_and_a_changed_bundle_are_refused(
    signed: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    _, other = _key(tmp_path, "other")
    with pytest.raises(BundleError, match=r"must be signed by the given key SHA256:.*, got a signature by 'SHA256:"):
        load(signed, key=other)
    # Somebody changes a config and makes every checksum right again.
    (signed / "config.json").write_text("{}")
    reseal(signed)
    assert Bundle.open(signed)
    with pytest.raises(BundleError, match="was changed after it was signed"):
        load(signed, key=keys[1])
    # Or puts the name of the right key onto a signature of their own.
    forged = json.loads((signed / SIGNATURE_FILE).read_text())
    forged["signature"] = "A" * 86 + "=="
    (signed / SIGNATURE_FILE).write_text(json.dumps(forged))
    with pytest.raises(BundleError, match="was changed after it was signed"):
        load(signed, key=keys[1])
    for content in ("", "[]", "{}", "[" * 100_000, json.dumps({**forged, "signature": 3})):
        (signed / SIGNATURE_FILE).write_text(content)
        with pytest.raises(BundleError, match="get the bundle again"):
            load(signed, key=keys[1])
    (signed / SIGNATURE_FILE).unlink()
    with pytest.raises(BundleError, match=r"must be signed by .*key=, --key.*it has no "):
        load(signed, key=keys[1])


def test_a_changed_file_of_a_signed_bundle_is_refused(bundle: Path, tmp_path: Path, keys: tuple[Path, Path]) -> None:
    from exportable_cache.bundle import signing

    signing.sign(bundle, (bundle / "manifest.json").read_bytes(), signing.private_key(keys[0]))
    assert load(bundle, key=keys[1])
    content = bytearray((bundle / "program.pt2").read_bytes())
    content[len(content) // 2] ^= 1
    (bundle / "program.pt2").write_bytes(content)
    with pytest.raises(BundleError, match="is damaged: its sha256"):
        load(bundle, key=keys[1])
    with pytest.raises(InputError, match="check_files=False"):
        Bundle.open(bundle, check_files=False, key=keys[1])


@pytest.mark.parametrize("content", [None, b"", b"no key", b"ssh-ed25519 AAAA", b"-----BEGIN PRIVATE KEY-----\n"])
def test_what_is_no_key_is_one_sentence(bundle: Path, tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match="key"):
        load(bundle, key=path)
    # Before anything else of an export.
    with pytest.raises(InputError, match="key"):
        export("no/such-model", "pt2", 32, tmp_path / "out", sign=path)


def test_other_kinds_of_key_are_refused(bundle: Path, tmp_path: Path) -> None:
    key = rsa.generate_private_key(65537, 2048)
    path = tmp_path / "key"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"x")
        )
    )
    with pytest.raises(InputError, match="encrypted"):
        load(bundle, key=path)
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    with pytest.raises(InputError, match="Ed25519"):
        load(bundle, key=path)


def test_without_the_library_the_extra_is_named(bundle: Path, keys: tuple[Path, Path], monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cryptography.hazmat.primitives", None)
    with pytest.raises(MissingDependencyError, match=r"exportable-cache\[sign\]"):
        load(bundle, key=keys[1])
    assert torch.is_tensor(load(bundle).length)
