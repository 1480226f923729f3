"""Bundles in the native runner: when it is used, and that it gives what `Session` gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from exportable_cache import load
from exportable_cache.bundle.files import CheckedBundle
from exportable_cache.errors import InputError
from exportable_cache.session import native
from exportable_cache.session.native import NotNative, open_native

from .support.native import require_native, run_native

PROMPT = "the code of amber is 4821. amber?"


@pytest.fixture
def automatic(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RUNTIME", "RUNNER", "KERNELS", "KERNELS_TARGET"):
        monkeypatch.delenv(f"EXPORTABLE_CACHE_{name}", raising=False)


def _changed(bundle: Path, **fields: Any) -> CheckedBundle:
    read = CheckedBundle.read(bundle)
    return CheckedBundle(read.path, {**read.fields, **fields}, read.files)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda fields: {"ranks": {"size": 2}}, "several processes"),
        (lambda fields: {"program": {**fields["program"], "batch_size": 4}}, "one row, and the program 4"),
        (lambda fields: {"options": {"delegate": "coreml"}}, "no delegate 'coreml'"),
        (lambda fields: {"program": {**fields["program"], "methods": {"encode": {}}}}, "its encoder"),
        (
            lambda fields: {
                "program": {**fields["program"], "methods": {"encode": {"inputs": [{"name": "input_features"}]}}}
            },
            "its encoder",
        ),
    ],
)
def test_why_a_bundle_is_left_to_torch(demo_bundle: Path, automatic: None, change: Any, said: str) -> None:
    bundle = _changed(demo_bundle, **change(CheckedBundle.read(demo_bundle).fields))
    assert said in native._why_not(bundle, True)


def test_a_tokenizer_of_transformers_is_left_to_torch(demo_bundle: Path, automatic: None) -> None:
    read = CheckedBundle.read(demo_bundle)
    bundle = CheckedBundle(read.path, read.fields, {})
    assert native._why_not(bundle, True) == "the tokenizer needs transformers"
    assert "tokenizer" not in native._why_not(bundle, False)


@pytest.mark.parametrize("name", ["EXPORTABLE_CACHE_KERNELS", "EXPORTABLE_CACHE_KERNELS_TARGET"])
def test_chosen_kernels_are_left_to_torch(
    demo_bundle: Path, automatic: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "executorch")
    assert native._why_not(CheckedBundle.read(demo_bundle), True).startswith(f"{name} chooses kernels")


def test_without_the_runner_the_reason_has_the_command(
    demo_bundle: Path, automatic: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exportable_cache_runner.library.found_library", lambda: None)
    with pytest.raises(NotNative) as caught:
        open_native(demo_bundle)
    assert caught.value.reason == "the native runner is not installed; build it: exportable-cache native build"


def test_the_variable_chooses(demo_bundle: Path, automatic: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPORTABLE_CACHE_RUNTIME", "torch")
    with pytest.raises(NotNative) as caught:
        open_native(demo_bundle)
    assert caught.value.reason == ""
    monkeypatch.setenv("EXPORTABLE_CACHE_RUNTIME", "fast")
    with pytest.raises(InputError, match="must be one of auto, native, torch, got 'fast'"):
        open_native(demo_bundle)
    monkeypatch.setenv("EXPORTABLE_CACHE_RUNTIME", "native")
    monkeypatch.setattr("exportable_cache_runner.library.found_library", lambda: None)
    with pytest.raises(InputError, match="EXPORTABLE_CACHE_RUNTIME must not be 'native'"):
        open_native(demo_bundle)


def test_another_target_needs_no_word(demo_bundle: Path, automatic: None, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = _changed(demo_bundle, target="pt2")
    monkeypatch.setattr(CheckedBundle, "read", lambda path, key: changed)
    with pytest.raises(NotNative) as caught:
        open_native(demo_bundle)
    assert caught.value.reason == ""


def test_methods_without_logits_are_no_steps(demo_bundle: Path) -> None:
    fields = CheckedBundle.read(demo_bundle).fields
    longest = max(method["max_length"] for method in fields["program"]["methods"].values())
    odd = {"a": None, "b": {}, "c": {"outputs": 1}, "d": {"outputs": [1, {"name": "x"}], "max_length": 10**6}}
    for methods, expected in (({**fields["program"]["methods"], **odd}, longest), (odd, 1)):
        changed = {**fields, "program": {**fields["program"], "methods": methods}}
        session = native.NativeSession(demo_bundle, None, 1, None, None, changed)  # type: ignore[arg-type]
        assert session.longest_chunk == expected


def test_text_is_that_of_the_session_without_torch(demo_bundle: Path) -> None:
    require_native()
    code = (
        "import sys\n"
        "from exportable_cache.session.native import open_native\n"
        f"session = open_native({str(demo_bundle)!r}, known=True)\n"
        f"ids = session.text_tokenizer({PROMPT!r})['input_ids']\n"
        "pieces, tokens = [], []\n"
        "session.generate_text(ids, pieces.append, on_token=tokens.append, max_new_tokens=8)\n"
        "print(''.join(pieces), tokens)\n"
        "print(*[name for name in ('torch', 'transformers', 'numpy', 'pydantic') if name in sys.modules])\n"
    )
    done = run_native(code)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    session = load(demo_bundle)
    text = "".join(session.generate_text(PROMPT, 8))
    session.reset()
    ids = session.text_tokenizer(PROMPT)["input_ids"]
    assert done.stdout == f"{text} {list(session.generate([ids], 8))}\n\n"


def test_what_the_runner_refuses_is_left_to_torch(demo_bundle: Path, tmp_path: Path) -> None:
    require_native()
    code = (
        "import pathlib, shutil, sys\n"
        "sys.path.insert(0, 'tests')\n"
        "from exportable_cache.session.native import open_native, NotNative\n"
        f"folder = shutil.copytree({str(demo_bundle)!r}, {str(tmp_path / 'bundle')!r})\n"
        "import json\n"
        "from exportable_cache.bundle.files import checksum_of\n"
        "path = pathlib.Path(folder, 'manifest.json')\n"
        "fields = json.loads(path.read_text())\n"
        "fields['layers'][0]['policy']['kind'] = 'new'\n"
        "fields['checksum'] = checksum_of(fields)\n"
        "path.write_text(json.dumps(fields))\n"
        "try:\n"
        "    open_native(folder)\n"
        "except NotNative as refused:\n"
        "    print(refused.reason)\n"
    )
    done = run_native(code, "auto")
    assert "new" in done.stdout and done.stdout.count("\n") == 1, (done.stdout, done.stderr)
