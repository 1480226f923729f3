"""Files, releases and targets for which a bundle is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from exportable_cache import load
from exportable_cache.backends import TARGETS
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.cache.layout import Layout, PortableLayout
from exportable_cache.errors import BundleError, InputError, MissingDependencyError
from exportable_cache.session.session import Session

from ..support import fake_target
from .editing import edit, refused


@pytest.mark.parametrize("name", ["program.fake", "config.json", "tokenizer/tokenizer.json"])
def test_missing_file(folder: Path, name: str) -> None:
    (folder / name).unlink()
    refused(folder, name, "is missing")


@pytest.mark.parametrize("name", ["program.fake", "tokenizer/tokenizer.json"])
def test_truncated_file(folder: Path, name: str) -> None:
    size = (folder / name).stat().st_size
    os.truncate(folder / name, size - 1)
    refused(folder, name, f"has {size - 1} bytes, the manifest says {size}", "copy the bundle again")


def test_changed_byte(folder: Path) -> None:
    path = folder / "program.fake"
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)
    refused(folder, "program.fake is damaged", "sha256", "copy the bundle again")
    with pytest.raises(BundleError, match="is damaged"):
        load(folder)
    assert Bundle.open(folder, check_files=False).manifest.target == "fake"


def test_other_package_version(folder: Path) -> None:
    edit(folder, lambda fields: fields["packages"].update(torch="1.0.0+cpu"))
    refused(folder, "made with torch 1.0.0+cpu, but ", "install torch==1.0.0", "check_versions=False")
    with pytest.raises(BundleError, match="made with torch 1.0.0"):
        load(folder)
    assert load(folder, check_versions=False).target == "fake"


def test_another_patch_release(folder: Path) -> None:
    major, minor = torch.__version__.split(".")[:2]
    edit(folder, lambda fields: fields["packages"].update(torch=f"{major}.{minor}.99"))
    assert Bundle.open(folder).manifest.packages["torch"].endswith(".99")
    edit(folder, lambda fields: fields["packages"].update(torch=f"{major}.{int(minor) + 1}.0"))
    refused(folder, f"made with torch {major}.{int(minor) + 1}.0", "check_versions=False")


def test_other_build_of_the_same_version(folder: Path) -> None:
    edit(folder, lambda fields: fields["packages"].update(torch=torch.__version__.partition("+")[0] + "+other"))
    assert Bundle.open(folder).manifest.packages["torch"].endswith("+other")


def test_version_that_was_not_recorded(folder: Path) -> None:
    edit(folder, lambda fields: fields["packages"].pop("torch"))
    refused(folder, "torch (not recorded)")


def test_packages_the_target_does_not_need_may_differ(folder: Path) -> None:
    edit(folder, lambda fields: fields["packages"].update(transformers="1.0", python="3.1"))
    Bundle.open(folder)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "tokenizer/../../secret"])
def test_file_outside_the_folder(folder: Path, name: str) -> None:
    edit(folder, lambda fields: fields["files"].update({name: fields["files"]["config.json"]}))
    refused(folder, "is damaged", "outside the bundle")


def test_unknown_target(folder: Path) -> None:
    edit(folder, lambda fields: fields.update(target="abacus"))
    refused(folder, "unknown target 'abacus'", error=InputError)


def test_target_that_is_not_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, "fake", (fake_target.__name__, ("no_such_package",), "extra"))
    refused(folder, "needs no_such_package", "exportable-cache[extra]", error=MissingDependencyError)


def test_unknown_policy(folder: Path) -> None:
    edit(folder, lambda fields: fields["layers"][1]["policy"].update(kind="spiral"))
    refused(folder, "layers.1: policy is of kind 'spiral', known are", "full")


def test_unknown_kernel(folder: Path) -> None:
    edit(folder, lambda fields: fields["layers"][1]["kernel"].update(kind="late"))
    with pytest.raises(BundleError, match="layer 1 .* has the layout 'late', this release has .*portable"):
        load(folder)


def test_a_layer_of_a_kernel_that_the_target_brings_is_checked_then(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(folder, lambda fields: fields["layers"][1].update(kernel={"kind": "late"}, policy={"kind": "full"}))
    bundle = Bundle.open(folder)
    monkeypatch.setitem(Layout.kinds, "late", PortableLayout)
    with pytest.raises(
        BundleError, match="is damaged: layers.1: policy has none, one of kind 'full' has capacity; export"
    ):
        Session.from_bundle(bundle)
