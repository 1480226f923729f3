"""Running the command line: in this process for speed, and for real where streams and exit codes matter."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from exportable_cache.backends.registry import TARGETS
from exportable_cache.cli.app import COMMANDS, app, application

from ..support import fake_target
from ..support.models import tiny_model
from .bundles import MAX_CACHE_LEN


@pytest.fixture(scope="session")
def run():
    """`run("plan", "demo", ...)` -> result with exit_code, stdout and stderr.

    As `main` does, it makes the one command that is named, because making all of them takes 0.05 s.
    """

    def run_in_process(*arguments, **options):
        named = str(arguments[0]) if arguments else ""
        chosen = application(named) if named in COMMANDS else app
        return CliRunner().invoke(chosen, [str(argument) for argument in arguments], **options)

    return run_in_process


@pytest.fixture(scope="session")
def shell():
    """The same in a process of its own -> CompletedProcess."""

    def run_in_shell(*arguments, **options):
        command = [sys.executable, "-m", "exportable_cache", *(str(argument) for argument in arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)

    return run_in_shell


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """A tiny model on disk, one ring and one full layer, without a tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "gemma2"
    tiny_model("gemma2").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def exported(run, tiny_folder, tmp_path_factory):
    """The export's own result, with `.path`."""
    path = tmp_path_factory.mktemp("bundles") / "tiny"
    options = ("--target", "fake", "--max-cache-len", MAX_CACHE_LEN, "--prefill-chunk", 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TARGETS, "fake", fake_target.ENTRY)
        result = run("export", tiny_folder, *options, "-o", path)
    assert result.exit_code == 0, result.stderr
    result.path = path
    return result


@pytest.fixture
def damaged(exported, tmp_path):
    """A copy of the bundle to spoil."""
    return shutil.copytree(exported.path, tmp_path / "copy")


@pytest.fixture(scope="module")
def server_bundle(tmp_path_factory, fake_backend) -> Path:
    """The demo model, for servers and their clients."""
    from exportable_cache import export

    from .serving import MAX_CACHE_LEN

    folder = tmp_path_factory.mktemp("bundles") / "demo"
    return export("demo", "fake", MAX_CACHE_LEN, folder, prefill_chunk=16, verify=False).path


@pytest.fixture(scope="module")
def server_address(server_bundle: Path):
    """Where a server answers."""
    from exportable_cache import load

    from .serving import served

    with served(load(server_bundle)) as address:
        yield address


@pytest.fixture(scope="module")
def greedy_answer(server_bundle: Path) -> str:
    """To `QUESTION`, from the Python API."""
    from exportable_cache import load

    from .serving import QUESTION

    return "".join(load(server_bundle).stream_text([{"role": "user", "content": QUESTION}]))
