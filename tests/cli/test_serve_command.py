"""The command `exportable-cache serve` itself: where it listens, how it ends, and what it refuses to start with."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from exportable_cache import export

pytest.importorskip("fastapi", reason="the serve extra is not installed")
pytest.importorskip("openai", reason="the test extra is not installed")

from .serving import QUESTION, client_of

pytestmark = pytest.mark.usefixtures("fake_backend")


@pytest.mark.full
def test_the_command_says_where_it_listens_and_ends_when_interrupted(demo_bundle: Path) -> None:
    command = [sys.executable, "-m", "exportable_cache", "serve", str(demo_bundle), "--port", "0", "--name", "demo"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and process.stdout is not None
        lines = []
        try:
            while not (found := re.search(r"demo at (http://127\.0\.0\.1:\d+) ", lines[-1] if lines else "")):
                lines.append(process.stderr.readline())
                assert lines[-1], lines
            answer = client_of(found[1]).completions.create(model="demo", prompt=QUESTION, max_tokens=3, temperature=0)
            assert answer.usage.completion_tokens == 3
        finally:
            process.send_signal(signal.SIGINT)
            # As somebody who is in a hurry.
            process.send_signal(signal.SIGINT)
            out, errors = process.communicate(timeout=30)
    assert out == "" and "Traceback" not in errors, errors
    assert process.returncode == 0, (process.returncode, errors)


def test_a_place_that_is_taken_and_an_extra_that_is_missing(run, tmp_path: Path, monkeypatch) -> None:
    bundle = export("demo", "fake", 128, tmp_path / "demo", prefill_chunk=16, verify=False).path
    result = run("serve", bundle, "--rows", 4)
    assert result.exit_code == 2 and "leave it out, or export the model with --batch-size 4" in result.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run("serve", bundle, "--port", taken.getsockname()[1])
    assert result.exit_code == 2
    assert "cannot listen on 127.0.0.1, port" in result.stderr and "choose another" in result.stderr
    monkeypatch.setattr("exportable_cache.cli.serve.find_spec", lambda name: None)
    result = run("serve", bundle)
    assert result.exit_code == 2 and "pip install 'exportable-cache[serve]'" in result.stderr


def test_the_key_is_also_read_from_the_environment(run) -> None:
    assert "EXPORTABLE_CACHE_API_KEY" in run("serve", "--help", env={**os.environ, "COLUMNS": "160"}).stdout
