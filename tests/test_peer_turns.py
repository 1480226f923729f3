"""Turns of the processes of benchmarks/peers.py: their order, who runs meanwhile, and forms that fail."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .support.waiting import process_state, wait_until

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
pytestmark = [
    pytest.mark.project,
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc"),
]

#: A worker with a runtime that keeps a list of what it was asked, and threads that never rest.
FAKE = """
import json, sys, threading
import peer_runtimes, peer_worker

class Fake(peer_runtimes.Runtime):
    def __init__(self, form, folder, plan):
        self.file = open(folder / "asked.txt", "a")
        self.slots = plan.get("slots", 0)
        self.length = 0
        print("libraries print what they like")
        if plan.get("spins"):
            threading.Thread(target=self.spin, daemon=True).start()
    def spin(self):
        while True: pass
    def say(self, **words):
        print(json.dumps(words), file=self.file, flush=True)
    def reset(self):
        self.length = 0
        self.say(reset=True)
    def feed(self, ids):
        self.length += len(ids)
        self.say(first=ids[0], count=len(ids))
    def next(self):
        if self.length >= self.slots > 0:
            raise SystemExit("there is no slot left")
        self.length += 1
        self.say(next=self.length)

peer_runtimes.RUNTIMES["ours"] = Fake
peer_worker.main()
"""


@pytest.fixture(autouse=True)
def beside(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def opened(tmp_path):
    """What starts a fake form's process, each in a folder of its own."""
    from peer_turns import Process

    (tmp_path / "fake.py").write_text(FAKE)
    found = []

    def start(form="ours", **plan):
        place = tmp_path / f"{form}-{len(found)}"
        place.mkdir()
        command = [sys.executable, str(tmp_path / "fake.py"), "ours", str(place), json.dumps(plan)]
        found.append(Process(command, {**os.environ, "PYTHONPATH": str(BENCHMARKS)}, place / "worker.txt"))
        found[-1].place = place
        return found[-1]

    yield start
    for process in found:
        process.close()


def asked(process):
    """What the runtime was told since it opened."""
    lines = [json.loads(line) for line in (process.place / "asked.txt").read_text().splitlines()]
    # A first token: a short prompt, and one step.
    assert lines[:3] == [{"reset": True}, {"first": lines[1]["first"], "count": 8}, {"next": 9}]
    return lines[3:]


def state(process):
    return process_state(process._process.pid)


def test_a_worker_times_what_it_is_told(opened):
    process = opened()
    assert 0 < process.opened["start_s"] < 60
    assert process.ask(prompt=128)["seconds"] > 0
    assert process.ask(stand=100)["seconds"] > 0
    assert len(process.ask(tokens=3)["seconds"]) == 3
    assert process.ask(memory=True)["peak_mb"] > 1
    words = asked(process)
    # A short prompt before the long one, and two tokens more than are timed.
    assert [word.get("count") for word in words if "first" in word] == [8, 128, 100]
    assert [word["next"] for word in words if "next" in word] == [9, 101, 102, 103, 104, 105]


def test_prompts_begin_differently(opened):
    process = opened()
    for _ in range(3):
        process.ask(prompt=16)
    first = [word["first"] for word in asked(process) if "first" in word]
    assert len(set(first)) == len(first) == 6


def test_a_process_runs_in_its_turns_only(opened):
    process = opened(spins=True)
    assert state(process) == "T"
    before = process._used()
    process.ask(tokens=1)
    assert state(process) == "T"
    assert process.idle_s == 0
    # It would be seen.
    process._process.send_signal(signal.SIGCONT)
    wait_until(lambda: process._used() > before + 0.3)
    process.ask(tokens=1)
    assert process.idle_s > 0.1


def test_what_a_process_said_last_is_why_it_failed(opened):
    from peer_turns import Failed

    process = opened(slots=9 + 3)
    process.ask(stand=8)
    with pytest.raises(Failed, match="there is no slot left"):
        process.ask(tokens=8)
    with pytest.raises(Failed, match="there is no slot left"):
        process.ask(tokens=1)


def test_processes_end_with_what_started_them(tmp_path):
    """Even while they are stopped, and it is killed."""
    (tmp_path / "fake.py").write_text(FAKE)
    code = (
        "import os, sys, time, peer_turns, pathlib; place = pathlib.Path(sys.argv[1])\n"
        "command = [sys.executable, str(place / 'fake.py'), 'ours', str(place), '{}']\n"
        "process = peer_turns.Process(command, dict(os.environ), place / 'worker.txt')\n"
        "print(process._process.pid, flush=True)\n"
        "time.sleep(60)"
    )
    variables = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=variables, stdout=subprocess.PIPE)
    child = int(parent.stdout.readline())
    assert process_state(child) not in "ZX"
    parent.kill()
    parent.communicate()
    wait_until(lambda: process_state(child) in "ZX", 20)


class Recorded:
    """A process that answers at once; what is asked goes to a list that all share."""

    def __init__(self, form, turns, fails=None):
        self._form, self._turns, self._fails = form, turns, fails
        self.opened, self.idle_s, self.closed = {"start_s": 1.0}, 0.25, False

    def ask(self, **turn):
        from peer_turns import Failed

        self._turns.append((self._form, self, turn))
        if turn == self._fails:
            raise Failed("it had enough")
        ((name, value),) = turn.items()
        if name == "memory":
            return {"peak_mb": 100.0}
        return {"seconds": [0.01] * value if name == "tokens" else 0.1}

    def close(self):
        self.closed = True


def grouped(forms, plan, **fails):
    """Answers, turns, processes and what was left out of a group of recorded processes."""
    from peer_turns import Group

    turns, processes, dropped = [], [], {}

    def start(form):
        processes.append(Recorded(form, turns, fails.get(form)))
        return processes[-1]

    group = Group(plan, start, dropped.__setitem__)
    group.run(forms)
    assert all(process.closed for process in processes)
    return group.answers, turns, processes, dropped


def test_each_form_has_one_turn_in_each_cycle():
    """All forms stand at the same position while their tokens are timed."""
    from peer_turns import Plan

    plan = Plan([128, 1024], [100, 4000], cycles=8, tokens=3)
    forms = ["a", "b", "c"]
    answers, turns, processes, dropped = grouped(forms, plan)
    assert not dropped
    assert len(processes) == len(forms)
    for found in answers.values():
        assert {key: len(values) for key, values in found["prompt"].items()} == {"128": 6, "1024": 3}
        assert {key: (len(values), len(values[0])) for key, values in found["token"].items()} == {
            "100": (8, 3),
            "4000": (8, 3),
        }
        assert (found["start_s"], found["peak_mb"], found["idle_s"]) == ([1.0], [100], 0.25)
    cycles = [form for form, _, turn in turns if turn == {"tokens": 3}]
    assert len(cycles) == 2 * len(forms) * plan.cycles
    for start in range(0, len(cycles), len(forms)):
        assert sorted(cycles[start : start + len(forms)]) == forms
    followed = {(one, other) for one, other in zip(cycles, cycles[1:], strict=False) if one != other}
    assert len(followed) == 6, "a form follows the same one always"
    stands = [at for at, (_, _, turn) in enumerate(turns) if "stand" in turn]
    assert [turns[at][2]["stand"] for at in stands] == [4000] * 3 + [100] * 3
    between = [turn for _, _, turn in turns[stands[2] : stands[3]]]
    assert between.count({"tokens": 3}) == plan.cycles * len(forms)


def test_the_most_memory_is_of_a_process_that_did_each_prompt_once_and_stands_at_the_end():
    from peer_turns import Plan

    _, turns, _, _ = grouped(["a"], Plan([128, 1024], [100, 4000], cycles=8, tokens=3))
    asked = [turn for _, _, turn in turns]
    assert asked[:5] == [{"prompt": 128}, {"prompt": 1024}, {"stand": 4000}, {"tokens": 1}, {"memory": True}]
    assert asked.count({"memory": True}) == 1


def test_cycles_are_shared_out_among_openings():
    from peer_turns import Plan

    plan = Plan([128, 1024], [100, 4000], cycles=8, tokens=3, openings=3)
    answers, turns, processes, _ = grouped(["a", "b"], plan)
    assert len(processes) == 3 * 2
    for found in answers.values():
        assert {key: len(values) for key, values in found["prompt"].items()} == {"128": 6, "1024": 3}
        assert {key: len(values) for key, values in found["token"].items()} == {"100": 8, "4000": 8}
        assert (len(found["start_s"]), len(found["peak_mb"]), found["idle_s"]) == (3, 3, 0.75)
    of_process = [sum(process is one and turn == {"tokens": 3} for _, one, turn in turns) for process in processes]
    assert of_process == [4] * 2 + [6] * 4
    assert plan.tokens_of_process == 2 + 1 + 3 * 5
    # Those of an opening are closed before others are opened.
    last, first = ([at for at, turn in enumerate(turns) if turn[1] is processes[of]] for of in (0, 2))
    assert last[-1] < first[0]


def test_a_form_that_fails_is_not_opened_again():
    from peer_turns import Plan

    plan = Plan([128], [100, 4000], cycles=6, tokens=3, openings=2)
    answers, turns, processes, dropped = grouped(["a", "b"], plan, b={"tokens": 3})
    assert set(answers) == {"a"} and set(dropped) == {"b"}
    assert len(processes) == 2 + 1
    assert len(answers["a"]["token"]["100"]) == 6


def test_as_many_tokens_follow_as_the_plan_says():
    from peer_turns import Plan

    plan = Plan([128], [100, 4000], cycles=5, tokens=2)
    _, turns, _, _ = grouped(["a"], plan)
    turns = [turn for _, _, turn in turns if "tokens" in turn]
    # At each position, and each turn with two that are not timed.
    assert sum(turn["tokens"] + 2 for turn in turns) == 2 * plan.tokens_of_process


@pytest.mark.parametrize("fails", [{"prompt": 128}, {"stand": 4000}, {"tokens": 3}, {"memory": True}])
def test_a_form_that_fails_has_no_more_turns_and_the_others_go_on(fails):
    from peer_turns import Plan

    plan = Plan([128], [100, 4000], cycles=4, tokens=3)
    answers, turns, _, dropped = grouped(["a", "b", "c"], plan, b=fails)
    assert dropped == {"b": "it had enough"}
    assert set(answers) == {"a", "c"}
    last = max(at for at, (form, _, turn) in enumerate(turns) if form == "b")
    assert turns[last][2] == fails
    assert all(len(found["token"]["4000"]) == 4 for found in answers.values())
