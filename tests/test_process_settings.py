"""Settings of the process that threads change at the same time, and the garbage collector's among them."""

import gc
import os
import subprocess
import sys
import threading
import warnings
from types import SimpleNamespace

import pytest

from exportable_cache.common.process.tuning import (
    RARELY,
    ProcessSetting,
    few_collections,
    warn_if_threads_spin,
)


def setting_of(place: SimpleNamespace) -> ProcessSetting:
    return ProcessSetting(lambda: place.value, lambda value: setattr(place, "value", value))


def test_the_last_of_the_blocks_puts_back_what_the_first_one_found() -> None:
    place = SimpleNamespace(value=5)
    setting = setting_of(place)
    began, ends, values = threading.Event(), threading.Event(), []

    def longer() -> None:
        with setting.during(lambda found: found - 3):
            values.append(place.value)
            began.set()
            ends.wait(60)
            values.append(place.value)

    thread = threading.Thread(target=longer)
    with setting.during(lambda found: found - 1):
        values.append(place.value)
        thread.start()
        began.wait(60)
    ends.set()
    thread.join()
    assert values == [4, 4, 4] and place.value == 5


def test_what_is_set_meanwhile_stays() -> None:
    place = SimpleNamespace(value=5)
    with setting_of(place).during(lambda found: 1):
        place.value = 7
    assert place.value == 7


def test_garbage_is_collected_seldom_in_a_block_and_as_before_behind_it() -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(700, 10, 10)
        with few_collections():
            assert gc.get_threshold() == RARELY
        assert gc.get_threshold() == (700, 10, 10)
        gc.set_threshold(0)
        with few_collections():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)


#: In a process of its own: in this one, all objects of torch and of the tests are frozen, and to collect takes seconds.
_PUT_OFF = """
import gc, weakref
from exportable_cache.common.process.tuning import no_collections, postpone_full_collection

class Circle:
    def __init__(self):
        self.own = self

gc.disable()
kept = [[] for _ in range(2000)]
older = weakref.ref(Circle())
postpone_full_collection()
assert gc.get_count() < (100, 1, 1) and not gc.get_freeze_count()
assert older() is not None
gc.collect()
assert older() is None and kept
# An application's own stay as they are.
gc.freeze()
postpone_full_collection()
assert gc.get_freeze_count()
# What packages bring is frozen once: later garbage is not kept, and objects are not counted each time.
gc.unfreeze()
gc.enable()
with no_collections():
    assert not gc.isenabled()
assert gc.get_freeze_count() and gc.isenabled()
gc.unfreeze()
with no_collections():
    pass
assert not gc.get_freeze_count()
"""


def test_a_full_collection_that_is_put_off_finds_what_is_garbage_by_then() -> None:
    done = subprocess.run([sys.executable, "-c", _PUT_OFF], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("before", "given", "found"),
    [("", None, "PASSIVE"), ("", "ACTIVE", "ACTIVE"), ("sys.modules['torch'] = sys; ", None, "None")],
    ids=["first", "set by the user", "behind torch"],
)
def test_importing_the_package_before_torch_keeps_waiting_threads_from_spinning(before, given, found) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {} if given is None else {"OMP_WAIT_POLICY": given}
    code = f"import os, sys; {before}import exportable_cache; print(os.environ.get('OMP_WAIT_POLICY'))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == found, done.stderr


@pytest.mark.parametrize(("policy", "load", "warns"), [(None, 1.9, True), (None, 0.3, False), ("PASSIVE", 1.9, False)])
def test_spinning_threads_are_warned_of_next_to_other_processes(monkeypatch, policy, load, warns) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_threads_spin()
    assert [("OMP_WAIT_POLICY=PASSIVE" in str(one.message)) for one in caught] == [True] * warns
