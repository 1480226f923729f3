"""Bundles on the hub, which a local server stands in for: upload, card, download, and what goes wrong."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, file_download

from exportable_cache import export, load
from exportable_cache.bundle.bundle import Manifest
from exportable_cache.bundle.hub import HubChoice, bundle_of, download, is_repository
from exportable_cache.errors import BundleError, ExportableCacheError, InputError
from exportable_cache.pipeline.upload import Uploaded, updated_card, upload

from ..support.hub import TOKEN, Hub
from .editing import CAPACITY

NAME = "user/tiny"
PROMPT = "hello"


def files_of(folder: Path, root: str) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {f"{root}{path.relative_to(folder).as_posix()}": path.read_bytes() for path in paths}


def one_sentence(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text
    return text


def test_an_uploaded_bundle_generates_the_same_text(hub: Hub, original: Path) -> None:
    url = upload(original, NAME)
    assert url.startswith(f"{hub.url}/{NAME}/commit/")
    loaded = load(NAME)
    assert loaded.generate_text(PROMPT, 6) == load(original).generate_text(PROMPT, 6)
    assert not [path for path in (Path("home") / "hub").rglob("*") if path.is_symlink()]


def test_the_second_load_downloads_nothing(hub: Hub, original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upload(original, NAME)
    load(NAME)
    hub.downloads.clear()
    load(NAME)
    assert hub.downloads == []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert load(NAME).generate_text(PROMPT, 3) == load(original).generate_text(PROMPT, 3)


def test_only_the_files_of_the_target_are_downloaded(hub: Hub, original: Path) -> None:
    other = {name.replace("fake/", "pt2/"): content for name, content in files_of(original, "fake/").items()}
    more = {"fake/notes.bin": b"x" * 100, "README.md": b"# mine\n"}
    hub.add(NAME, files_of(original, "fake/") | other | more)
    with pytest.raises(InputError, match="target must be one of fake, pt2"):
        load(NAME)
    with pytest.raises(InputError, match="no bundle for target 'aoti', but fake, pt2"):
        load(NAME, target="aoti")
    hub.downloads.clear()
    load(NAME, target="fake")
    assert set(hub.downloads) <= set(files_of(original, "fake/"))
    assert "fake/manifest.json" in hub.downloads


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: Hub, original: Path) -> None:
    repository = hub.add(NAME, files_of(original, ""))
    first = repository.branches["main"]
    repository.commit({"README.md": b"nothing else"})
    for revision in (first, "v1"):
        repository.branches["v1"] = first
        assert load(NAME, revision=revision).generate_text(PROMPT, 3)
    with pytest.raises(BundleError, match=f"{NAME!r} on the hub has no manifest.json") as raised:
        load(NAME)
    one_sentence(raised.value)
    with pytest.raises(InputError, match="no revision 'v2'"):
        load(NAME, revision="v2")


def test_a_second_upload_replaces_the_files_and_keeps_the_rest(hub: Hub, original: Path) -> None:
    hub.add(NAME, {"README.md": b"---\nlicense: mit\n---\n\n# Mine\n", "fake/old.pte": b"1", "other/file": b"2"})
    upload(original, NAME)
    files = hub.repositories[NAME].files
    assert "fake/old.pte" not in files and files["other/file"] == b"2"
    first = files["README.md"].decode()
    assert first.startswith("---\nlicense: mit\n---\n\n# Mine\n")
    upload(original, NAME)
    assert hub.repositories[NAME].files["README.md"].decode() == first


def test_the_card_tells_what_the_manifest_records(hub: Hub, original: Path) -> None:
    upload(original, NAME)
    card = ModelCard(hub.repositories[NAME].files["README.md"].decode())
    manifest = Path(original, "manifest.json").read_text()
    assert card.data.library_name == "exportable_cache"
    assert {"exportable_cache", "fake", "gemma3_text"} <= set(card.data.tags)
    assert f"load('{NAME}')" in card.content and f"exportable-cache generate {NAME} " in card.content
    difference = re.search(r'"max_difference": ([0-9.e-]+)', manifest)
    assert difference is not None and f"{float(difference[1]):.1e}" in card.content
    assert f"| {CAPACITY} |" in card.content
    assert f"torch {torch.__version__}" in card.content
    assert "not signed" in card.content


def test_the_card_lists_the_other_targets(hub: Hub, original: Path) -> None:
    other = {name.replace("fake/", "pt2/"): content for name, content in files_of(original, "fake/").items()}
    hub.add(NAME, other)
    upload(original, NAME)
    content = hub.repositories[NAME].files["README.md"].decode()
    assert "\n| fake | " in content and "\n| pt2 | " in content
    assert f"load('{NAME}', target='fake')" in content


def test_the_card_says_what_to_run(original: Path) -> None:
    """Machine code needs the reader's trust."""
    manifest = Manifest.read(original).model_copy(update={"source": "org/model", "target": "aoti"})
    card = ModelCard(updated_card("", NAME, {"aoti": Uploaded(manifest, "SHA256:key")}))
    assert card.data.base_model == "org/model"
    assert f"load('{NAME}', trust=True)" in card.content and f"generate {NAME} --trust --prompt" in card.content
    assert "`SHA256:key`" in card.content


def test_names_in_a_manifest_do_not_break_the_card(hub: Hub, original: Path) -> None:
    manifest = Manifest.read(original)
    odd = manifest.model_copy(update={"source": "a`|\n---\nb: c", "remarks": ["<script> | [x](y)"]})
    card = ModelCard(updated_card("", NAME, {"fake": Uploaded(odd)}))
    assert "b" not in card.data.to_dict()
    assert card.data.pipeline_tag == "text-generation" and card.data.base_model is None
    assert "<script>" not in card.content.replace("\\<script\\>", "")


def test_export_pushes_to_the_hub(hub: Hub, model: Any, tmp_path: Path) -> None:
    export(model, "fake", CAPACITY, tmp_path / "out", prefill_chunk=13, verify=False, push_to_hub=NAME)
    assert "fake/manifest.json" in hub.repositories[NAME].files
    with pytest.raises(InputError, match="repository must be an id like 'user/name', got 'a b'"):
        export(model, "fake", CAPACITY, tmp_path / "out2", push_to_hub="a b")
    assert not (tmp_path / "out2").exists()


def test_a_bundle_at_the_root_refuses_an_upload(hub: Hub, original: Path) -> None:
    """`load` would still open the bundle at the root; the file of another program is none."""
    hub.add(NAME, files_of(original, ""))
    with pytest.raises(InputError, match=f"repository must have no bundle at its root, got {NAME!r}") as raised:
        upload(original, NAME)
    one_sentence(raised.value)
    assert "fake/manifest.json" not in hub.repositories[NAME].files
    hub.add(NAME, {"manifest.json": b'{"name": "web app"}', "web/manifest.json": b"{}"})
    upload(original, NAME)
    assert f"load('{NAME}')" in hub.repositories[NAME].files["README.md"].decode()
    assert load(NAME).generate_text(PROMPT, 2)


def test_manifests_of_other_programs_are_no_bundles(hub: Hub) -> None:
    hub.add(NAME, {"manifest.json": b'{"name": "web app"}', "web/manifest.json": b'{"schema_version": 2}'})
    with pytest.raises(BundleError, match="has no manifest.json of a bundle"):
        load(NAME)
    assert bundle_of(NAME, HubChoice()) == NAME
    hub.add(NAME, {"manifest.json": b" " * 9_000_000})
    assert bundle_of(NAME, HubChoice()) == NAME


def test_a_card_whose_end_was_deleted_keeps_its_text(original: Path) -> None:
    bundles = {"fake": Uploaded(Manifest.read(original))}
    whole = updated_card("", NAME, bundles)
    end = whole.rstrip().splitlines()[-1]
    cut = whole.replace(end, "") + "mine\n"
    first = updated_card(cut, NAME, bundles)
    assert first.startswith(cut) and first.count(end) == 1
    assert updated_card(first, NAME, bundles) == first


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_a_missing_repository(hub: Hub) -> None:
    with pytest.raises(InputError, match="the hub has no repository 'user/none', or it is private; check the id"):
        load("user/none")


def test_a_gated_repository(hub: Hub, original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, files_of(original, "fake/"), gated=True)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(InputError, match=f"'{NAME}' is gated: accept its terms at {hub.url}/{NAME}, and log in"):
        load(NAME)
    assert load(NAME, token=TOKEN).generate_text(PROMPT, 2)


def test_an_upload_without_a_token(
    hub: Hub, original: Path, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export is not begun without one, and its bundle stays if the upload is refused later."""
    monkeypatch.delenv("HF_TOKEN")
    out = tmp_path / "out"
    for call in (lambda: upload(original, NAME), lambda: export(model, "fake", CAPACITY, out, push_to_hub=NAME)):
        with pytest.raises(InputError, match="an upload to 'user/tiny' needs a token; log in with `hf auth login`"):
            call()
    assert not out.exists()
    monkeypatch.setenv("HF_TOKEN", "hf_guest")
    with pytest.raises(InputError, match=f"the hub denies access to 'user/tiny'; log in .*; the bundle is in {out}: "):
        export(model, "fake", CAPACITY, out, prefill_chunk=13, verify=False, push_to_hub=NAME)
    assert (out / "manifest.json").is_file() and NAME not in hub.repositories


def test_without_a_network(hub: Hub, original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(BundleError, match="not downloaded before at revision 'main', and the hub cannot be reached"):
        load(NAME)
    with pytest.raises(InputError, match="the hub must be reachable to upload to 'user/tiny'"):
        upload(original, NAME)


def test_a_download_that_breaks_off_continues(hub: Hub, original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It waits for a second before each of five retries.
    without_waiting = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
    monkeypatch.setattr(file_download, "time", without_waiting)
    hub.add(NAME, files_of(original, "fake/"))
    largest = max(files_of(original, "fake/").values(), key=len)
    hub.breaks_after = len(largest) // 2
    with pytest.raises(ExportableCacheError, match=f"the transfer of '{NAME}' failed.*; run it again") as raised:
        load(NAME)
    one_sentence(raised.value)
    hub.breaks_after = None
    assert load(NAME).generate_text(PROMPT, 2)


def test_a_file_that_was_cut_on_this_disk(hub: Hub, original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, files_of(original, "fake/"))
    path = download(NAME, HubChoice()) / "tokenizer" / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:-1])
    with monkeypatch.context() as offline:
        offline.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(BundleError, match="bytes, the manifest says") as raised:
            load(NAME)
    one_sentence(raised.value)
    # With the hub, the file is downloaded again.
    assert load(NAME).generate_text(PROMPT, 2)


def test_a_file_that_was_damaged_on_this_disk(hub: Hub, original: Path) -> None:
    """The damaged file has the size and the time of the right one, so it is not downloaded again."""
    hub.add(NAME, files_of(original, "fake/"))
    folder = download(NAME, HubChoice())
    for name in ("config.json", "manifest.json"):
        path = folder / name
        content, status = path.read_bytes(), path.stat()
        path.write_bytes(content[:-3] + b"?" + content[-2:])
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        with pytest.raises(
            BundleError, match=f"remove the folder .*{folder}, and load it from the hub again"
        ) as raised:
            load(NAME, check=True)
        one_sentence(raised.value)
        shutil.rmtree(folder)
        assert load(NAME).generate_text(PROMPT, 2)


def test_a_manifest_that_was_cut_on_this_disk(hub: Hub, original: Path) -> None:
    hub.add(NAME, files_of(original, ""))
    (download(NAME, HubChoice()) / "manifest.json").write_bytes(b"")
    assert load(NAME).generate_text(PROMPT, 2)


def test_files_that_do_not_fit_their_manifest_are_not_downloaded(hub: Hub, original: Path) -> None:
    files = files_of(original, "fake/")
    name = "fake/config.json"
    hub.add(NAME, {**files, name: files[name] + b" "})
    with pytest.raises(BundleError, match=f"{name} of '{NAME}' must have {len(files[name])} bytes") as raised:
        load(NAME)
    one_sentence(raised.value)
    hub.add(NAME, {other: content for other, content in files.items() if other != name})
    with pytest.raises(BundleError, match="as its manifest says, the hub has none"):
        load(NAME)
    assert set(hub.downloads) == {"fake/manifest.json"}
    hub.downloads.clear()
    hub.add(NAME, {"fake/manifest.json": b" " * 9_000_000})
    with pytest.raises(BundleError, match="must have at most 8388608 bytes, got 9000000"):
        load(NAME)
    assert hub.downloads == []


def test_a_target_that_was_not_downloaded(hub: Hub, original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, files_of(original, "fake/") | files_of(original, "pt2/"))
    folder = download(NAME, HubChoice("fake"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(BundleError, match="for target 'pt2' was not downloaded before, and the hub cannot be reached"):
        load(NAME, target="pt2")
    (folder.parent.parent / "refs" / "main").write_bytes(b"\xff")
    with pytest.raises(BundleError, match="not downloaded before at revision 'main'"):
        load(NAME)


def test_a_revision_that_changed_under_a_signature(hub: Hub, model: Any, tmp_path: Path) -> None:
    signing = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = tmp_path / "key.pem"
    made = signing.Ed25519PrivateKey.generate()
    key.write_bytes(made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    signed, unsigned = tmp_path / "signed", tmp_path / "unsigned"
    export(model, "fake", CAPACITY, signed, prefill_chunk=13, verify=False, sign=key)
    export(model, "fake", CAPACITY, unsigned, prefill_chunk=12, verify=False)
    upload(signed, NAME)
    assert "SHA256:" in hub.repositories[NAME].files["README.md"].decode()
    load(NAME, key=key)
    files = hub.repositories[NAME].files
    hub.repositories[NAME].commit({**files, **files_of(unsigned, "fake/")})
    with pytest.raises(BundleError, match="does not match the manifest, so the bundle was changed after it was signed"):
        load(NAME, key=key)


def test_a_repository_that_lists_files_outside(hub: Hub, original: Path, tmp_path: Path) -> None:
    hub.add(NAME, {"../manifest.json": b"{}", "a/b/manifest.json": b"{}"})
    with pytest.raises(BundleError, match="has no manifest.json"):
        load(NAME)


@pytest.mark.parametrize("revision", ["../x", "/etc", "", "a..b", "x" * 300, "a\0b", 3])
def test_a_revision_that_is_none(hub: Hub, original: Path, revision: Any) -> None:
    for call in (lambda: load(NAME, revision=revision), lambda: upload(original, NAME, revision=revision)):
        with pytest.raises(InputError, match="revision must be a branch, tag or commit, got"):
            call()


@pytest.mark.parametrize("name", ["user/" + "x" * 300, "x" * 300 + "/user", "user/a--b", "user/x."])
def test_ids_that_the_hub_does_not_allow(hub: Hub, original: Path, name: str) -> None:
    for call in (lambda: load(name), lambda: upload(original, name), lambda: bundle_of(name, HubChoice())):
        with pytest.raises(InputError, match="repository must be an id that the hub allows") as raised:
            call()
        one_sentence(raised.value)


def test_names_that_no_folder_has(hub: Hub) -> None:
    with pytest.raises(BundleError, match="there is no folder xxx"):
        load("x" * 300)
    for name in (3, None, b"x"):
        with pytest.raises(InputError, match="path must be a folder or a repository of the hub, got"):
            load(name)


def test_what_is_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "artifacts").mkdir()
    found = [name for name in ("user/name", "artifacts/x", "./x", "x", "a/b/c", "/a/b", "~/x") if is_repository(name)]
    assert found == ["user/name"]
    with pytest.raises(InputError, match="revision must be left out for the path 'artifacts/x'"):
        load("artifacts/x", revision="main")
    with pytest.raises(BundleError, match="there is no folder artifacts/x"):
        load("artifacts/x")
    shutil.rmtree(tmp_path / "artifacts")
