"""What a step waits for while a thread of the same process loads a graph: little."""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path

import pytest

from exportable_cache.backends import background, background_worker, throttle
from exportable_cache.backends.graph_cache import GRAPH
from exportable_cache.backends.throttle import STEPS, Throttle
from exportable_cache.common.garbage import RARELY

from ..support.background import SLEEPS, in_its_place, model_of, session_of, wait_until
from ..support.models import tokens

pytestmark = pytest.mark.usefixtures("inductor")


class Clock:
    """Of a thread that takes 4.1 ms between two looks at it."""

    def __init__(self) -> None:
        self.used = 0.0

    def perf_counter(self) -> float:
        return self.used

    def thread_time(self) -> float:
        self.used += 0.0041
        return self.used


def _call() -> None:
    """Where a thread looks at the clock."""


def rests_in(steps: int, looks: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often a thread rests that looks at the clock so many times in each of some steps, and behind them."""
    own, rests = Throttle(), []
    monkeypatch.setattr(throttle, "time", Clock())
    monkeypatch.setattr(own._changed, "wait_for", lambda condition, seconds: rests.append(seconds))
    look = own._look()
    for _ in range(steps):
        with own.step():
            for _ in range(looks):
                look(None, "call", None)
    assert not rests or set(rests) == {throttle.LONGEST_REST}
    in_steps = len(rests)
    for _ in range(looks):
        look(None, "call", None)
    assert len(rests) == in_steps
    return in_steps


def test_a_thread_rests_once_it_has_taken_its_share_of_a_step(monkeypatch) -> None:
    """Five looks behind the first are a bit more than its share; each step has one of its own."""
    assert [rests_in(1, looks, monkeypatch) for looks in (5, 6, 10, 11)] == [0, 1, 1, 2]
    assert rests_in(7, 5, monkeypatch) == 0 and rests_in(7, 6, monkeypatch) == 7


def test_it_goes_on_when_the_step_is_over(monkeypatch) -> None:
    monkeypatch.setattr(throttle, "SHARE", 0.0)
    monkeypatch.setattr(throttle, "LONGEST_REST", 600.0)
    own, done = Throttle(), []

    def load() -> None:
        with own.throttled():
            while not done:
                _call()

    thread = threading.Thread(target=load, daemon=True)
    with own.step():
        thread.start()
        wait_until(lambda: own._changed._waiters, 60)
        done.append(True)
        assert thread.is_alive()
    thread.join(60)
    assert not thread.is_alive()


def test_what_others_have_set_in_a_thread_is_there_afterwards() -> None:
    def other(*_: object) -> None:
        pass

    before = sys.getprofile()
    sys.setprofile(other)
    try:
        with STEPS.throttled():
            assert sys.getprofile() is not other
        assert sys.getprofile() is other
    finally:
        sys.setprofile(before)


def test_graphs_are_loaded_slowly_for_steps_of_few_tokens_alone(tmp_path: Path, monkeypatch) -> None:
    """Prompts spend their time in operators, and whoever waits for a graph wants it soon."""
    (tmp_path / f"of another model{GRAPH}").touch()
    tmp_path.chmod(0o700)
    in_its_place(monkeypatch, SLEEPS)
    monkeypatch.setattr(background, "_FEW_TOKENS", 4)
    model, seen = model_of(), []
    with session_of(model, graph_cache=tmp_path) as session:
        monkeypatch.setattr(session.runner.compiler, "load", lambda *_: seen.append(sys.getprofile()))
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
