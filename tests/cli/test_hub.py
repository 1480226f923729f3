"""Commands over the hub, which a local server stands in for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ..support.hub import Hub

PROMPT = "one two"


def test_a_bundle_is_uploaded_and_run_by_its_id(hub: Hub, run: Any, server_bundle: Path) -> None:
    uploaded = run("upload", server_bundle, "user/tiny", "--json")
    assert uploaded.exit_code == 0, uploaded.stderr
    assert json.loads(uploaded.stdout)["url"].startswith(f"{hub.url}/user/tiny/commit/")
    here, there = (run("generate", name, "-p", PROMPT, "--max-new-tokens", 4) for name in (server_bundle, "user/tiny"))
    assert there.exit_code == 0, there.stderr
    assert there.stdout == here.stdout
    shown = run("inspect", "user/tiny")
    assert shown.exit_code == 0 and "all checksums match" in shown.stdout, shown.stderr
    refused = run("generate", server_bundle, "-p", PROMPT, "--revision", "main")
    assert refused.exit_code == 2 and "revision must be left out for the path" in refused.stderr


def test_an_export_is_pushed(hub: Hub, run: Any, tiny_folder: Path) -> None:
    options = ("--target", "fake", "--max-cache-len", 16, "--no-verify", "-o", "out", "--push-to-hub", "user/tiny")
    done = run("export", tiny_folder, *options)
    assert done.exit_code == 0, done.stderr
    assert "fake/manifest.json" in hub.repositories["user/tiny"].files


def test_a_new_process_asks_the_endpoint_of_its_environment(hub: Hub, shell: Any, server_bundle: Path) -> None:
    done = shell(
        "upload", server_bundle, "user/tiny", env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"uploaded {server_bundle} to user/tiny ({hub.url}/user/tiny/commit/")
    assert "fake/manifest.json" in hub.repositories["user/tiny"].files


def sentences(result: Any) -> list[str]:
    """The lines on stderr, except those of progress."""
    return [line for line in result.stderr.splitlines() if not line.endswith("...")]


@pytest.mark.parametrize("name", ["x" * 300, "x" * 300 + "/x", "user/" + "x" * 300, "a/b/" + "x" * 300])
def test_names_that_are_too_long(hub: Hub, run: Any, name: str) -> None:
    refused = run("generate", name, "-p", PROMPT)
    assert refused.exit_code == 2, refused.stderr
    assert len(sentences(refused)) == 1 and "unexpected" not in refused.stderr


@pytest.mark.parametrize("command", [("generate", "-p", PROMPT), ("export", "--max-cache-len", "16", "-o", "out")])
def test_models_that_are_missing_or_gated(
    hub: Hub, run: Any, command: tuple[str, ...], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("user/gated", {path.name: path.read_bytes() for path in tiny_folder.iterdir()}, gated=True)
    monkeypatch.delenv("HF_TOKEN")
    name, *options = command
    refused = run(name, "user/none", *options)
    assert refused.exit_code == 2, (refused.stderr, refused.exception.__context__)
    assert "the hub has no repository 'user/none'" in refused.stderr
    assert len(sentences(refused)) == 1
    refused = run(name, "user/gated", *options)
    assert refused.exit_code == 2, (refused.stderr, refused.exception.__context__)
    assert f"'user/gated' is gated: accept its terms at {hub.url}/user/gated, and log in" in refused.stderr
    assert len(sentences(refused)) == 1
