"""The process that compiles in the background: when it ends, what it serves first."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from exportable_cache.backends.live import background
from exportable_cache.backends.live.background_process import _Requests

from ..support.background import SLEEPS, in_its_place, model_of, process_of, session_of
from ..support.models import tokens
from ..support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("inductor")


@pytest.mark.full
def test_a_session_whose_process_is_killed_leaves_none_behind(tmp_path: Path) -> None:
    """Nobody ends the compiling process then: it finds that nobody listens."""
    script = tmp_path / "steps.py"
    script.write_text(
        "import sys, time\n"
        "from tests.support.background import model_of, process_of, session_of\n"
        "from tests.support.models import tokens\n"
        "session = session_of(model_of())\n"
        "session.prefill(tokens(3))\n"
        "print(process_of(session).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, env=environment) as process:
        pid = int(process.stdout.readline())
        wait_until(lambda: os.getpgid(pid) == pid)
        process.send_signal(signal.SIGKILL)

    def is_gone() -> bool:
        try:
            os.killpg(pid, 0)
        except ProcessLookupError:
            return True
        return False

    wait_until(is_gone)


def test_closing_ends_the_process_and_takes_its_folder_along(monkeypatch) -> None:
    in_its_place(monkeypatch, SLEEPS)
    session = session_of(model_of())
    session.prefill(tokens(3))
    process, folder = process_of(session), Path(session.runner.graph_cache.folder)
    assert process.poll() is None and folder.is_dir() and folder.stat().st_mode & 0o777 == 0o700
    session.close()
    assert process.poll() is not None
    del session
    gc.collect()
    assert not folder.exists()


def test_the_process_is_of_this_session_and_not_of_its_group(monkeypatch) -> None:
    """Else its niceness would not count beside steps, or an interrupt from the keyboard would end it."""
    program, _, _ = background._CHILD.partition("from exportable_cache")
    in_its_place(monkeypatch, f"{program}import time; time.sleep(600)")
    session = session_of(model_of())
    session.prefill(tokens(3))
    process = process_of(session)
    wait_until(lambda: os.getpgid(process.pid) == process.pid, 60)
    assert os.getsid(process.pid) == os.getsid(0)
    session.close()
    assert process.poll() is not None


def test_a_session_that_nobody_holds_ends_its_process(monkeypatch) -> None:
    in_its_place(monkeypatch, SLEEPS)
    session = session_of(model_of())
    session.prefill(tokens(3))
    process, folder = process_of(session), Path(session.runner.graph_cache.folder)
    del session
    gc.collect()
    assert process.poll() is not None and not folder.exists()


def test_a_fork_of_the_process_that_ends_takes_nothing_along(monkeypatch) -> None:
    in_its_place(monkeypatch, SLEEPS)
    session = session_of(model_of())
    session.prefill(tokens(3))
    process, folder = process_of(session), Path(session.runner.graph_cache.folder)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    session.close()
    monkeypatch.undo()
    assert process.poll() is None and folder.exists()
    session.runner.background._worker.stop()
    assert process.poll() is not None


def test_what_a_step_waits_for_goes_before_what_is_needed_later(monkeypatch) -> None:
    pipe, sent = os.pipe()
    requests = _Requests(os.fdopen(pipe, "rb"))
    for number, ahead in enumerate([False, True, True, False]):
        requests._waiting.append((number, ("decode",), [], ahead))
    assert [requests.next()[0] for _ in range(4)] == [0, 3, 1, 2]

    # A reader whose other end is gone ends the process.
    class Ended(Exception):
        pass

    def end(code: int) -> None:
        raise Ended(code)

    with os.fdopen(sent, "wb") as pipe_in:
        pickle.dump((4, ("decode",), [], False), pipe_in)
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(Ended, match="0"):
        requests.read()
    assert requests.next()[0] == 4
