"""Work in a process of its own: errors, crashes, deadlines, memory, forks, threads, and its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import exportable_cache
from exportable_cache.common.process.limited import LimitedProcess, WorkEnded, WorkFailed

from .support.waiting import process_state, wait_until

WORK = """
import os, re, sys, time

def handle(request, data):
    return WORK[request["do"]](data)

def print_it(data):
    print("no reply", flush=True)
    os.write(1, b"no reply")
    return {}, b""

def write(data):
    os.write(os.open(data, os.O_WRONLY | os.O_CREAT), b"x")

def fail(data):
    raise SystemExit("two\\nlines")

WORK = {
    "echo": lambda data: ({"pid": os.getpid(), "read": sys.stdin.read()}, data),
    "modules": lambda data: ({"names": sorted(name.partition(".")[0] for name in sys.modules)}, b""),
    "environment": lambda data: (dict(os.environ), b""),
    "sleep": lambda data: time.sleep(600),
    "backtrack": lambda data: re.match("(a+)+b", "a" * 60),
    "memory": lambda data: ({}, b"x" * (1 << 40)),
    "much": lambda data: ({}, b"x" * (1 << 21)),
    "crash": lambda data: os.kill(os.getpid(), 11),
    "exit": lambda data: os._exit(3),
    "fail": fail, "print": print_it, "write": write,
}
"""


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LimitedProcess:
    (tmp_path / "work_of_a_test.py").write_text(WORK)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = LimitedProcess("work_of_a_test", 1 << 29, 1 << 20)
    yield made
    made.stop()


def _pid(process: LimitedProcess) -> int:
    return process.call(5, {"do": "echo"})[0]["pid"]


def test_one_process_does_one_piece_after_another(process: LimitedProcess) -> None:
    reply, data = process.call(5, {"do": "echo", "text": "\ud83d"}, b"abc" * 100_000)
    assert data == b"abc" * 100_000 and reply["read"] == "" and reply["pid"] != os.getpid()
    assert process.call(5, {"do": "print"}) == ({}, b"")
    assert _pid(process) == reply["pid"] and process.starts == 1


def test_it_knows_neither_torch_nor_keys_of_the_environment(
    process: LimitedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "secret")
    names = process.call(5, {"do": "modules"})[0]["names"]
    assert "exportable_cache" in names and not {"torch", "transformers", "numpy", "subprocess"} & set(names)
    assert "SOME_API_KEY" not in process.call(5, {"do": "environment"})[0]


def test_an_error_is_told_and_the_process_goes_on(process: LimitedProcess) -> None:
    before = _pid(process)
    with pytest.raises(WorkFailed, match="^two$"):
        process.call(5, {"do": "fail"})
    assert _pid(process) == before


@pytest.mark.parametrize(
    ("work", "message"),
    [
        ("sleep", "it runs longer than 0.2 s"),
        ("backtrack", "it runs longer than 0.2 s"),
        ("crash", "its process was ended by SIGSEGV"),
        ("exit", "its process was ended by exit status 3"),
        ("much", "it gives more than 1048576 bytes"),
        ("memory", "it ran out of memory"),
        ("write", "File too large"),
    ],
)
def test_what_goes_wrong_is_one_sentence_and_the_next_call_works(
    process: LimitedProcess, tmp_path: Path, work: str, message: str
) -> None:
    _pid(process)
    start = time.monotonic()
    with pytest.raises(WorkFailed, match=message):
        process.call(0.2 if "0.2" in message else 20, {"do": work}, os.fsencode(tmp_path / "x"))
    assert time.monotonic() - start < 5
    assert _pid(process)


def test_the_first_call_has_a_deadline_too(process: LimitedProcess) -> None:
    with pytest.raises(WorkEnded, match="it runs longer than 0.1 s"):
        process.call(0.1, {"do": "sleep"})


def test_another_thread_can_end_it(process: LimitedProcess) -> None:
    _pid(process)
    threading.Timer(0.1, process.stop).start()
    with pytest.raises(WorkEnded, match="ended by SIGKILL"):
        process.call(30, {"do": "sleep"})
    assert _pid(process)


def test_threads_take_turns(process: LimitedProcess) -> None:
    found: list[bytes] = []

    def echo(index: int) -> None:
        found.append(process.call(5, {"do": "echo"}, bytes([index]) * 70_000)[1])

    threads = [threading.Thread(target=echo, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [bytes([index]) * 70_000 for index in range(8)] and process.starts == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_fork_has_a_process_of_its_own_and_leaves_this_one_alone(process: LimitedProcess) -> None:
    ours = _pid(process)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, json.dumps(_pid(process)).encode())
            process.stop()
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        theirs = json.loads(pipe.read())
    os.waitpid(child, 0)
    assert theirs != ours and _pid(process) == ours


PROGRAM = """
import os, sys, threading
from exportable_cache.common.process.limited import LimitedProcess
process = LimitedProcess("work_of_a_test", 1 << 29, 1 << 20)
print(process.call(5, {"do": "echo"})[0]["pid"], flush=True)
if sys.argv[1] == "busy":
    threading.Thread(target=lambda: process.call(1.0, {"do": "backtrack"}), daemon=True).start()
    sys.stdin.readline()
if sys.argv[1] != "end":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["end", "killed", "busy"])
def test_it_ends_with_its_parent(process: LimitedProcess, tmp_path: Path, how: str) -> None:
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    command = [sys.executable, "-c", PROGRAM, how]
    parent = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}, text=True
    )
    child = int(parent.stdout.readline())
    if how == "busy":
        wait_until(lambda: process_state(child) != "S")
    parent.communicate("\n", timeout=20)
    wait_until(lambda: not _runs(child), 8)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_an_interrupt_amid_a_call_ends_the_process(process: LimitedProcess) -> None:
    before = _pid(process)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            process.call(30, {"do": "sleep"})
    finally:
        signal.signal(signal.SIGALRM, handler)
    assert _pid(process) != before


def test_it_finds_a_package_that_is_found_by_a_hook(tmp_path: Path) -> None:
    """An editable installation has no entry in `sys.path`."""
    root = Path(exportable_cache.__file__).parent
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('exportable_cache', {str(root / '__init__.py')!r},"
        f" submodule_search_locations=[{str(root)!r}])\n"
        "module = sys.modules['exportable_cache'] = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "from exportable_cache.common.process.limited import LimitedProcess\n"
        "process = LimitedProcess('exportable_cache.generation.template_child', 1 << 30, 1 << 20)\n"
        "try:\n    process.call(20, {}, b'')\n"
        "except Exception as error:\n    print(type(error).__name__)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    # The request is none of its own, which the process says; one that cannot be imported would be gone.
    assert done.stdout.strip() == "WorkFailed", done.stdout + done.stderr
