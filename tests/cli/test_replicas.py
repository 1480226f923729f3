"""Replicas under Ray Serve, and what is said when one is gone."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from export_scripts import serve_replicas
from export_scripts.serve_replicas import ReplicaOptions
from exportable_cache import export
from exportable_cache.errors import InputError, MissingDependencyError

pytest.importorskip("fastapi", reason="the serve extra is not installed")

from exportable_cache.cli.server.proxied import LOST, LostAnswers, middlewares

ROOT = Path(__file__).parents[2]
BEGUN = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"Content-Type", b"text/event-stream; charset=utf-8")],
}


def answered(*messages: dict[str, Any], kind: str = "http") -> list[dict[str, Any]]:
    """What a client gets of an application that sends these, and then ends."""
    got: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)

    async def send(message: dict[str, Any]) -> None:
        got.append(message)

    asyncio.run(LostAnswers(app)({"type": kind}, None, send))  # type: ignore[arg-type]
    return got


def test_no_answer_is_said_in_the_form_of_the_api() -> None:
    start, body = answered()
    assert start["status"] == 503 and (b"retry-after", b"1") in start["headers"]
    assert json.loads(body["body"])["error"]["message"] == LOST and not body.get("more_body")


def test_the_rest_of_a_stream_is_an_error_event() -> None:
    part = {"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True}
    *before, last = answered(BEGUN, part)
    assert before == [BEGUN, part] and not last.get("more_body")
    assert json.loads(last["body"].removeprefix(b"data: "))["error"]["message"] == LOST


@pytest.mark.parametrize(
    "messages",
    [
        (BEGUN, {"type": "http.response.body", "body": b"data: [DONE]\n\n"}),
        ({**BEGUN, "headers": []}, {"type": "http.response.body", "body": b"{", "more_body": True}),
    ],
    ids=["whole", "no stream"],
)
def test_other_answers_are_left_alone(messages: Any) -> None:
    assert answered(*messages) == list(messages)


def test_what_is_no_request_is_left_alone() -> None:
    assert answered(kind="lifespan") == []
    assert [one.cls for one in middlewares()] == [LostAnswers]


def test_a_missing_ray_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_replicas, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'ray\[serve\]'"):
        serve_replicas.start(ReplicaOptions(tmp_path))


@pytest.mark.parametrize("wrong", [{"replicas": 0}, {"port": -1}, {"folder": Path("nowhere")}])
def test_wrong_options(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=str(next(iter(wrong.values())))):
        ReplicaOptions(**{"folder": tmp_path, **wrong})


@pytest.mark.project
@pytest.mark.full
@pytest.mark.skipif(util.find_spec("ray") is None, reason="Ray Serve is not installed: pip install 'ray[serve]'")
def test_a_replica_that_is_killed_amid_a_load(tmp_path: Path) -> None:
    bundle = export("demo", "pt2", 512, tmp_path / "demo", verify=False).path
    command = [sys.executable, "-m", "benchmarks.replicas", str(bundle), "--port", "8765", "--tokens", "100"]
    # On a machine that does other things Ray's proxy takes longer to start than Ray waits.
    patient = {f"RAY_SERVE_PROXY_{kind}_CHECK_TIMEOUT_S": "60" for kind in ("READY", "HEALTH")}
    environment = {**os.environ, **patient, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found, _ = json.JSONDecoder().raw_decode(done.stdout[done.stdout.index("{\n") :])
    # The one answer that it was giving, at most.
    assert found["lost"] == 0 and found["refused"] <= 1 and found["different"] == 0
    assert found["answered"] + found["answered_again"] == found["requests"]
    assert all(said.startswith("503: ") and LOST in said for said in found["refusals"])
