"""What a step waits for while a thread of the same process loads a graph: little."""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path

import pytest
import torch

from exportable_cache.backends.live import background, throttle
from exportable_cache.backends.live import background as background_worker
from exportable_cache.backends.live.graph_cache import GRAPH
from exportable_cache.backends.live.throttle import STEPS, Throttle
from exportable_cache.common.process.garbage import RARELY

from ..support.background import SLEEPS, in_its_place, model_of, session_of, wait_until
from ..support.models import tokens

pytestmark = pytest.mark.usefixtures("inductor")

#: Says that it begins to compile.
BEGINS = f"import pickle, sys; pickle.dump(('begun', None, ''), sys.stdout.buffer); sys.stdout.buffer.flush(); {SLEEPS}"


class Clock:
    """Of a thread that takes a bit less than half of its share between two looks at it."""

    def __init__(self) -> None:
        self.used = 0.0

    def perf_counter(self) -> float:
        return self.used

    def thread_time(self) -> float:
        self.used += 0.41 * throttle.SHARE
        return self.used


def _call() -> None:
    """Where a thread can rest."""


class Work:
    """A thread that calls functions between steps until it is told to end."""

    def __init__(self, steps: Throttle) -> None:
        self.is_over, self.calls = False, 0
        self._steps = steps
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with self._steps.throttled():
            while not self.is_over:
                self.calls += 1
                _call()

    def __enter__(self) -> Work:
        self._thread.start()
        wait_until(lambda: self.calls)
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over = True
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Throttle:
    """A thread has no more than the next call before each step, and nobody waits for a time."""
    for name, seconds in {"SHARE": 0.0, "_LOOK": 0.0, "LONGEST_WAIT": 600.0, "LONGEST_REST": 600.0}.items():
        monkeypatch.setattr(throttle, name, seconds)
    return Throttle()


def rests(looks: int, running: int, turns: bool, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often a thread rests that looks at the clock so many times.

    Args:
        looks: Those.
        running: Steps that run; one waits.
        turns: Whether its turn comes.
    """
    own, found = Throttle(), []
    monkeypatch.setattr(throttle, "time", Clock())
    monkeypatch.setattr(own, "_rest", lambda thread: (found.append(thread), turns)[1])
    own._running, own._waiting = running, 1
    look = own._look(7)
    for _ in range(looks):
        look(None, "call", None)
    return len(found)


def test_a_thread_rests_once_it_has_had_its_share_before_a_step(monkeypatch) -> None:
    assert [rests(looks, 0, True, monkeypatch) for looks in (2, 3, 5, 6)] == [0, 1, 1, 2]


def test_a_thread_rests_in_a_step_and_has_its_share_of_one_that_does_not_end(monkeypatch) -> None:
    assert rests(3, 1, True, monkeypatch) == 3
    assert [rests(looks, 1, False, monkeypatch) for looks in (1, 3, 4, 7)] == [1, 1, 2, 3]


def test_a_thread_does_not_rest_where_nobody_steps(steps: Throttle, monkeypatch) -> None:
    monkeypatch.setattr(steps, "_rest", lambda thread: pytest.fail("it rests"))
    with Work(steps) as work:
        wait_until(lambda: work.calls > 1000)


def test_steps_and_a_thread_take_turns(steps: Throttle) -> None:
    """It does nothing in a step, and something before each."""
    with Work(steps) as work:
        before = 0
        for _ in range(20):
            with steps.step():
                assert [*steps._turns.values()] == [False]
                calls = work.calls
                assert calls > before
                before = calls
                torch.ones(100, 100).sum()
                assert work.calls == calls
        wait_until(lambda: work.calls > before)


def test_its_turn_comes_when_the_last_step_is_over(steps: Throttle) -> None:
    """Two sessions may step at once."""
    with Work(steps) as work:
        with steps.step(), steps.step():
            pass
        with steps.step():
            with steps.step():
                calls = work.calls
            assert work.calls == calls and [*steps._turns.values()] == [False]
        wait_until(lambda: work.calls > calls)


def test_a_step_does_not_wait_for_a_thread_that_comes_to_no_call(steps: Throttle, monkeypatch) -> None:
    """It may wait for a lock that the step's thread has."""
    monkeypatch.setattr(throttle, "LONGEST_WAIT", 0.0)
    held, inside = threading.Lock(), threading.Event()

    def load() -> None:
        with steps.throttled():
            inside.set()
            held.acquire()

    thread = threading.Thread(target=load, daemon=True)
    with held:
        thread.start()
        inside.wait(60)
        with steps.step():
            assert [*steps._turns.values()] == [True]
    thread.join(60)
    assert not steps._turns


def test_a_thread_goes_on_in_a_step_that_waits_for_it(steps: Throttle, monkeypatch) -> None:
    monkeypatch.setattr(throttle, "LONGEST_REST", 0.0)
    with Work(steps) as work, steps.step():
        calls = work.calls
        wait_until(lambda: work.calls > calls + 10, 60)


def test_what_others_have_set_in_a_thread_is_there_afterwards() -> None:
    def other(*_: object) -> None:
        pass

    before = sys.gettrace()
    sys.settrace(other)
    try:
        with STEPS.throttled():
            assert sys.gettrace() is not other
        found = sys.gettrace()
    finally:
        sys.settrace(before)
    assert found is other


def test_graphs_are_loaded_slowly_for_steps_of_few_tokens_alone(tmp_path: Path, monkeypatch) -> None:
    """Prompts spend their time in operators, and whoever waits for a graph wants it soon."""
    (tmp_path / f"of another model{GRAPH}").touch()
    tmp_path.chmod(0o700)
    in_its_place(monkeypatch, SLEEPS)
    monkeypatch.setattr(background, "_FEW_TOKENS", 4)
    model, seen = model_of(), []
    with session_of(model, graph_cache=tmp_path) as session:
        monkeypatch.setattr(session.runner.compiler, "load", lambda *_: seen.append(sys.gettrace()))
        running: list[int] = []
        model.model.norm.register_forward_hook(lambda *_: running.append(STEPS._running))
        session.prefill(tokens(4))
        session.decode(tokens(1)[:, 0])
        session.reset()
        session.prefill(tokens(5))
        wait_until(lambda: session.runner.background._worker._process)
        with session.runner.background.waiting(), session.runner.background.step(1):
            assert not STEPS._running
    assert running == [1, 1, 0]
    assert seen and None not in seen


def test_what_loads_graphs_is_imported_while_they_are_compiled(monkeypatch) -> None:
    """Between steps, and before there is a graph to be loaded."""
    in_its_place(monkeypatch, BEGINS)
    found: list[object] = []
    monkeypatch.setattr(background_worker, "import_loader", lambda: found.append(sys.gettrace()))
    with session_of(model_of()) as session:
        session.prefill(tokens(3))
        wait_until(lambda: found)
        assert session.pending_graphs and None not in found
        session.decode(tokens(1)[:, 0])
        assert len(found) == 1


def test_the_graph_of_a_token_is_asked_for_with_the_prompt(monkeypatch) -> None:
    """It is needed behind it, for every token; a prompt of several pieces asks once."""
    in_its_place(monkeypatch, SLEEPS)
    with session_of(model_of()) as session:
        session.prefill(tokens(20))
        asked = [(graph.asked, [tuple(one.shape) for one in graph.arguments][:2]) for graph in waiting(session)]
        assert asked == [(("decode",), [(1, 1), (1,)]), (("prefill_32",), [(1, 16), (1,)])]
        session.decode(tokens(1)[:, 0])
        assert len(waiting(session)) == 2


def waiting(session) -> list:
    return [*session.runner.background._mail.waiting.values()]


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
    assert found[1:] == ["put off"] and found[0][0] < before[0] and found[0][1] == RARELY
    assert (sys.getswitchinterval(), gc.get_threshold()) == before
    gc.set_threshold(*own)
    session.close()
