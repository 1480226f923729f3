"""Graphs that come while steps go on: from a folder, or from another process.

What that process compiles takes long, so most tests have another program in its place, or a folder that holds all.
"""

from __future__ import annotations

import contextvars
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch._inductor import config as inductor

from exportable_cache import ExportableCache, Session
from exportable_cache.backends import background_worker
from exportable_cache.backends.background_process import _Requests, _runner
from exportable_cache.backends.background_twin import Twin, can_fork
from exportable_cache.backends.graph_cache import GRAPH
from exportable_cache.backends.skeleton import from_skeleton, skeleton
from exportable_cache.common.compat.torch import inductor_config
from exportable_cache.common.garbage import RARELY
from exportable_cache.common.threads import threads_of_torch
from exportable_cache.decoding import ContinuousBatch
from exportable_cache.errors import InputError

from ..support.compiling import compiling_with
from ..support.models import tiny_model, tokens

CAPACITY = 64


@pytest.fixture(autouse=True)
def generated_code() -> Iterator[None]:
    with compiling_with("inductor"):
        yield


def model_of(**options):
    model = tiny_model("llama", num_hidden_layers=2, **options)
    model.generation_config.eos_token_id = None
    return model


def session_of(model, compile: bool | str = "background", **options) -> Session:
    return Session.from_model(
        model, ExportableCache.from_model(model, CAPACITY), compile=compile, prefill_chunk=16, buckets=(32,), **options
    )


def wait_until(condition: Callable[[], object], seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


def in_its_place(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Another program as the process that compiles."""
    monkeypatch.setattr(background_worker, "_CHILD", program)


SLEEPS = "import time; time.sleep(600)"
#: Reads what it is sent, and says of each graph that it cannot be compiled.
FAILS = """
import pickle, sys
start = pickle.load(sys.stdin.buffer)
while True:
    number = pickle.load(sys.stdin.buffer)[0]
    pickle.dump(("failed", number, "no compiler was found"), sys.stdout.buffer)
    sys.stdout.buffer.flush()
"""


def process_of(session: Session) -> subprocess.Popen:
    worker = session.runner.background._worker
    wait_until(lambda: worker._process)
    return worker._process


@pytest.mark.full
def test_tokens_are_the_same_before_and_after_the_graphs_are_there(tmp_path: Path) -> None:
    """Greedy and drawn, by the process itself: an answer that begins as it is goes on in a graph, with the same random
    numbers.
    """
    model, prompt, told = model_of(), tokens(5), []
    settings = {"temperature": 0.9, "seed": 7}
    expected = list(session_of(model, False).generate(prompt, 40, **settings))
    session = session_of(model, True, graph_cache=tmp_path, progress=lambda *stage: told.append(stage))
    answer = session.generate(prompt, 40, **settings)
    found = [next(answer) for _ in range(9)]
    assert session.pending_graphs == 3 and not session.runner._calls
    wait_until(lambda: session.pending_graphs == 0, 1800)
    found += answer
    assert found == expected
    assert sorted(key[0] for key in session.runner._calls) == ["choice", "decode"]
    assert told[0] == ("compiling prefill", 0, 1) and told[-1][1:] == (3, 3)
    logits = session_of(model, False).prefill(prompt)
    session.reset()
    torch.testing.assert_close(session.prefill(prompt), logits, atol=1e-4, rtol=0)
    assert sorted(key[0] for key in session.runner._calls) == ["choice", "decode", "prefill"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.reset()
        session.warm_up()
    assert len(session.runner._calls) == 3
    # A later session finds all of them in the folder.
    session.close()
    later = session_of(model, True, graph_cache=tmp_path)
    later.warm_up()
    assert later.runner.graph_cache.loaded == 3 and later.runner.background._worker._process is None


#: Writes the settings that it is sent to the file that they are of.
NOTES = """
import json, pickle, sys, time
folder, _, settings, _ = pickle.load(sys.stdin.buffer)
open(f"{folder}/settings.part", "w").write(json.dumps(settings["inductor"]["cpp.min_chunk_size"]))
__import__("os").rename(f"{folder}/settings.part", f"{folder}/settings")
time.sleep(600)
"""


def test_settings_of_the_compiler_go_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the thread that made the session, which no other thread and no other process has."""
    in_its_place(monkeypatch, NOTES)
    with inductor.patch({"cpp.min_chunk_size": 777}), session_of(model_of(), graph_cache=tmp_path) as session:
        written = session.runner.background._worker._skeleton
        settings = background_worker.torch_settings()
        session.prefill(tokens(3))
        wait_until(lambda: (tmp_path / "settings").exists())
    assert (tmp_path / "settings").read_text() == "777"
    assert inductor_config()["cpp.min_chunk_size"] != 777

    def taken_over() -> dict:
        _runner(str(tmp_path), 1, settings, written)
        return inductor_config()

    assert contextvars.copy_context().run(taken_over) == settings["inductor"]


def test_what_aotinductor_notes_in_its_settings_makes_no_other_graphs() -> None:
    before = inductor_config()
    with inductor.patch({"aot_inductor.metadata": {"AOTI_CPU_ISA": "AVX2"}}):
        assert inductor_config() == before


@pytest.mark.parametrize(("threads", "left"), [(1, 1), (2, 1), (3, 2), (4, 2)])
def test_steps_leave_cores_to_what_compiles(threads: int, left: int, monkeypatch) -> None:
    in_its_place(monkeypatch, SLEEPS)
    model, seen = model_of(), []
    with threads_of_torch(threads):
        session = session_of(model)
        model.model.norm.register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
        session.prefill(tokens(3))
        assert torch.get_num_threads() == threads
        session.close()
        # Nothing compiles any more.
        session = session_of(model, False)
        session.prefill(tokens(3))
    assert seen[0] == left and set(seen[1:]) == {threads}


def test_graphs_are_loaded_with_the_threads_that_they_were_compiled_for(tmp_path: Path, monkeypatch) -> None:
    """Though a step runs with fewer when the thread that loads them first asks."""
    in_its_place(monkeypatch, SLEEPS)
    (tmp_path / f"other{GRAPH}").touch()
    tmp_path.chmod(0o700)
    model, found, stepping, noted = model_of(), [], threading.Event(), threading.Event()

    def note(*_: object) -> None:
        assert stepping.wait(60)
        found.append(torch.get_num_threads())
        noted.set()

    def wait(*_: object) -> None:
        stepping.set()
        assert noted.wait(60)

    with threads_of_torch(2):
        session = session_of(model, graph_cache=tmp_path)
        monkeypatch.setattr(session.runner.compiler, "load", note)
        model.model.norm.register_forward_hook(wait)
        session.prefill(tokens(3))
        session.close()
    assert found == [2]


@pytest.mark.full
def test_a_session_whose_process_is_killed_leaves_none_behind(tmp_path: Path) -> None:
    """Nobody ends the compiling process then: it finds that nobody listens."""
    script = tmp_path / "steps.py"
    script.write_text(
        "import sys, time\n"
        "from tests.backends.test_background import model_of, process_of, session_of, tokens\n"
        "session = session_of(model_of())\n"
        "session.prefill(tokens(3))\n"
        "print(process_of(session).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, env=environment) as process:
        pid = int(process.stdout.readline())
        time.sleep(1)
        process.send_signal(signal.SIGKILL)

    def is_gone() -> bool:
        try:
            os.killpg(pid, 0)
        except ProcessLookupError:
            return True
        return False

    wait_until(is_gone)


@pytest.mark.parametrize(
    ("program", "reason"),
    [("pass", "the compiling process has ended"), (FAILS, "no compiler was found")],
    ids=["dies", "fails"],
)
def test_what_is_never_compiled_is_one_warning_and_steps_go_on(program: str, reason: str, monkeypatch) -> None:
    in_its_place(monkeypatch, program)
    model, prompt = model_of(), tokens(5)
    expected = list(session_of(model, False).generate(prompt, 12))
    session = session_of(model)
    answer = session.generate(prompt, 12)
    found = [next(answer)]
    mail = session.runner.background._mail
    wait_until(lambda: mail.over or mail.failed)
    with pytest.warns(RuntimeWarning, match=f"steps go on without compiled graphs: {reason}") as warned:
        found += answer
    assert found == expected and len(warned) == 1
    # And whoever waits does not do so for ever.
    session.reset()
    session.warm_up()


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
    program, _, _ = background_worker._CHILD.partition("from exportable_cache")
    in_its_place(monkeypatch, f"{program}import time; time.sleep(600)")
    session = session_of(model_of())
    session.prefill(tokens(3))
    process = process_of(session)
    wait_until(lambda: os.getpgid(process.pid) == process.pid, 60)
    assert os.getsid(process.pid) == os.getsid(0)
    session.close()
    assert process.poll() is not None


def test_steps_come_to_their_turn_while_a_graph_is_loaded(monkeypatch, tmp_path: Path) -> None:
    """They take the interpreter sooner, no full collection holds it, and none is due behind it."""
    (tmp_path / f"of another model{GRAPH}").touch()
    in_its_place(monkeypatch, SLEEPS)
    own, found = gc.get_threshold(), []
    gc.set_threshold(700, 10, 10)
    before = sys.getswitchinterval(), gc.get_threshold()

    def load(*arguments: object) -> None:
        found.append((sys.getswitchinterval(), gc.get_threshold()))

    monkeypatch.setattr(background_worker, "put_off_full_collection", lambda: found.append("put off"))
    session = session_of(model_of(), graph_cache=tmp_path)
    monkeypatch.setattr(session.runner.compiler, "load", load)
    session.prefill(tokens(3))
    wait_until(lambda: session.runner.background._worker._process)
    assert found[1:] == ["put off"] and found[0][0] < 0.001 and found[0][1] == RARELY
    assert (sys.getswitchinterval(), gc.get_threshold()) == before
    gc.set_threshold(*own)
    session.close()


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
    assert [requests.next()[0] for _ in range(4)] == [3, 0, 1, 2]

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


def test_two_processes_compile_and_the_one_that_ends_gives_its_graph_back(monkeypatch) -> None:
    """What one has found out about the read lengths of a method holds for both."""
    if not can_fork():
        pytest.skip("a second process would have no core")
    here = os.getpid()

    def serve(request: tuple, unshared: set[str]) -> tuple[str, int, str]:
        if request[1] == "die":
            os._exit(0)
        found = ",".join(sorted(unshared))
        unshared.add(f"{request[1]} {os.getpid() == here}")
        return "ready", request[0], found

    source, sent = os.pipe()
    requests, unshared, told = _Requests(os.fdopen(source, "rb")), {"before"}, []
    twin = Twin(serve, [sent])
    requests.put((1, "first", [torch.zeros(2)], False))
    requests.put((2, "die", [], True))
    twin.serve(requests, unshared, lambda *answer: told.append(answer))
    assert told == [("ready", 1, "before")] and unshared == {"before", "first False"}
    assert requests.next()[:2] == (2, "die")
    twin.close()
    os.close(sent)


def test_what_cannot_be_compiled_elsewhere_is_refused_by_name_only(caplog) -> None:
    """`compile=True` is then "wait"."""
    model = model_of()
    with pytest.raises(InputError, match="mode is 'max-autotune'.*pass compile=True"):
        session_of(model, mode="max-autotune")
    with pytest.raises(InputError, match="compile is 'later'; it must be True, False, 'background' or 'wait'"):
        session_of(model, "later")
    assert session_of(model, True).runner.background is not None
    assert session_of(model, "wait").runner.background is None
    assert session_of(model, True, mode="max-autotune").runner.background is None
    model.model.norm.hook = lambda: None
    with pytest.raises(InputError, match='cannot be pickled .*pass compile="wait"'):
        session_of(model)
    with caplog.at_level("INFO", "exportable_cache.backends.background"):
        assert session_of(model, True).runner.background is None
    assert "graphs are compiled when they are needed: this model cannot be" in caplog.text
    with compiling_with("eager"), pytest.raises(InputError, match="backend is 'eager'"):
        session_of(model_of())


def test_a_model_that_the_script_defines_is_not_handed_over(monkeypatch) -> None:
    """The other process has another main module."""
    model = model_of()

    class Norm(type(model.model.norm)):
        pass

    Norm.__module__, Norm.__qualname__ = "__main__", "Norm"
    monkeypatch.setattr(sys.modules["__main__"], "Norm", Norm, raising=False)
    model.model.norm.__class__ = Norm
    with pytest.raises(InputError, match="defined in the script or notebook that runs"):
        session_of(model)


def test_both_sessions_of_a_batch_are_compiled_in_the_background() -> None:
    batch = ContinuousBatch.from_model(model_of(), 32, 2, compile=True)
    assert all(session.runner.background is not None for session in (batch.prefill, batch.decode))


def test_a_skeleton_has_no_large_values_and_keeps_what_is_tied() -> None:
    model = tiny_model("llama", tie_word_embeddings=True, vocab_size=4096)
    written = skeleton(model)
    assert len(written) < model.lm_head.weight.nbytes / 2
    other = from_skeleton(written)
    assert other.lm_head.weight is other.model.embed_tokens.weight
    for (name, one), (_, two) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert (one.shape, one.stride(), one.dtype) == (two.shape, two.stride(), two.dtype), name
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, other.model.rotary_emb.inv_freq)
