"""What used to end in a traceback ends in a sentence and exit code 2."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from exportable_cache import ExportableCache, Session, export, load
from exportable_cache.cli.app import app
from exportable_cache.cli.command import prompt_from_stdin
from exportable_cache.errors import BundleError, CacheFullError, InputError

from ..support.forked import COMMAND_LINE, run_python
from ..support.models import tiny_model, tokens
from .conftest import reseal


def test_a_config_that_is_no_mapping(tmp_path: Path) -> None:
    for text in ("[]", "3", "null", '"text"', "{"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(InputError, match="config.json"):
            export(tmp_path, "pt2", 32, tmp_path / "out")


@pytest.mark.parametrize("command", ["inspect", "generate", "bench"])
def test_an_empty_name_is_no_folder(command: str) -> None:
    arguments = [command, "", *(["-p", "x"] if command == "generate" else [])]
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 2
    assert ("empty name" if command == "inspect" else "is not a bundle") in ran.stderr


def test_a_top_k_past_every_integer(tmp_path: Path) -> None:
    model = tiny_model("llama")
    session = Session.from_model(model, ExportableCache.from_model(model, 32))
    assert len(list(session.generate(tokens(3), 2, temperature=1.0, top_k=10**30, seed=0))) == 2


def test_a_full_cache_is_an_index_error_too() -> None:
    assert issubclass(CacheFullError, IndexError)


def test_a_full_device_and_a_closed_stdout(pt2_bundle: Path) -> None:
    import subprocess
    import sys

    ran = run_python(COMMAND_LINE, "inspect", pt2_bundle, stdout="/dev/full")
    assert ran.returncode == 2
    assert "cannot write the output: No space left on device" in ran.stderr
    assert "Traceback" not in ran.stderr
    command = f"{sys.executable} -m exportable_cache inspect {pt2_bundle} >&-"
    ran = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True)
    assert ran.returncode == 2
    assert "stdout must be open" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("option", ["--json", pytest.param("", marks=pytest.mark.full)])
def test_a_reader_that_is_gone(pt2_bundle: Path, option: str) -> None:
    """`| head -0`: 1 would stand for a mismatch."""
    import subprocess
    import sys

    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "exportable_cache", "inspect", str(pt2_bundle), *filter(None, [option])]
    ran = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    assert ran.returncode == 141
    assert "error" not in ran.stderr
    assert "Traceback" not in ran.stderr and "Exception ignored" not in ran.stderr
    if not option:
        # Remarks that nobody reads are no reason to stop; on a full device, below.
        ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=writing, text=True)
        assert ran.returncode == 0 and "Qwen3ForCausalLM" in ran.stdout
    os.close(writing)


@pytest.mark.parametrize("redirected", ["2>/dev/full", pytest.param("2>&-", marks=pytest.mark.full)])
def test_stderr_that_takes_nothing_is_no_reason_to_stop(pt2_bundle: Path, redirected: str) -> None:
    import subprocess
    import sys

    if redirected == "2>/dev/full":
        ran = run_python(COMMAND_LINE, "inspect", pt2_bundle, stderr="/dev/full")
    else:
        command = f"{sys.executable} -m exportable_cache inspect {pt2_bundle} {redirected}"
        ran = subprocess.run(command, shell=True, stdout=subprocess.PIPE, text=True)
    assert ran.returncode == 0
    assert "Qwen3ForCausalLM" in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("--help >/dev/full", 2),
        ("--version >/dev/full", 2),
        ("--help 2>/dev/full | true; exit ${PIPESTATUS[0]}", 141),
        ("export --help | sleep 0.01; exit ${PIPESTATUS[0]}", 141),
        ("generate --nonsense 2>/dev/full", 2),
        ("--version 2>&- >&-", 2),
    ],
)
def test_help_and_usage_that_nobody_can_read(arguments: str, code: int) -> None:
    import subprocess
    import sys

    ran = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m exportable_cache {arguments}"], capture_output=True, text=True
    )
    assert ran.returncode == code
    assert "Traceback" not in ran.stderr and "Exception ignored" not in ran.stderr


def test_a_prompt_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.StringIO):
        def read(self, size: int | None = None) -> str:
            raise OSError(errno.EIO, "Input/output error")

    for stream, said in (
        (None, "stdin must be open.*pass --prompt"),
        (
            io.TextIOWrapper(io.BytesIO(b"ab\xff"), encoding="utf-8"),
            "must be utf-8 text, got byte 0xff at 2; save it as UTF-8",
        ),
        (io.TextIOWrapper(io.BytesIO(b"ab\xff"), encoding="ascii"), "must be ascii text, got byte 0xff at 2"),
        (Broken(), "cannot read the prompt from stdin: Input/output error"),
    ):
        monkeypatch.setattr("sys.stdin", stream)
        with pytest.raises(InputError, match=said):
            prompt_from_stdin()


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no config.json"):
        export(tmp_path, "pt2", 32, tmp_path / "out")


@pytest.mark.parametrize("kind", [[], {}, None, 3, True, "unknown"])
@pytest.mark.parametrize("part", ["policy", "storage", "kernel"])
def test_a_manifest_whose_layers_are_of_no_kind(bundle: Path, part: str, kind) -> None:
    path = bundle / "manifest.json"
    fields = json.loads(path.read_text())
    fields["layers"][0][part]["kind"] = kind
    path.write_text(json.dumps(fields))
    reseal(bundle)
    with pytest.raises((BundleError, InputError)) as caught:
        load(bundle)
    assert "\n" not in str(caught.value)


def test_a_manifest_whose_vocabulary_or_capacity_is_not_the_programs(bundle: Path) -> None:
    path = bundle / "manifest.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "vocab_size": fields["vocab_size"] + 1}))
    reseal(bundle)
    with pytest.raises(BundleError, match="logits of 394 tokens, the manifest says 395"):
        load(bundle).prefill(torch.tensor([[5, 6]]))
    for layer in fields["layers"]:
        if layer["policy"]["kind"] == "full":
            layer["policy"]["capacity"] += 8
            for tensor in layer["tensors"].values():
                tensor["shape"] = [size + 8 if size == 96 else size for size in tensor["shape"]]
    path.write_text(json.dumps(fields))
    reseal(bundle)
    with pytest.raises(BundleError, match="in the program's file and"):
        load(bundle)


@pytest.mark.parametrize("path", ["", "/", "folder", "pipe", "link"])
def test_only_files_are_written_over(path: str, tmp_path: Path) -> None:
    """As root, even /dev/null could be replaced."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    model = tiny_model("llama")
    session = Session.from_model(model, ExportableCache.from_model(model, 32))
    place = tmp_path / path if path.isalpha() else path
    for save in (session.save_state, session.cache.save):
        with pytest.raises(InputError, match="path must be a file or a new name"):
            save(place)
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "link").is_symlink()
    assert sorted(found.name for found in tmp_path.iterdir()) == ["folder", "link", "pipe"]
