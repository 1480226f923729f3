"""Sessions whose graphs are compiled in the background, and other programs in the place of what compiles them."""

from __future__ import annotations

import subprocess

import pytest

from exportable_cache import ExportableCache, Session
from exportable_cache.backends.live import background

from .models import tiny_model
from .waiting import wait_until

CAPACITY = 64


def model_of(**options):
    model = tiny_model("llama", num_hidden_layers=2, **options)
    model.generation_config.eos_token_id = None
    return model


def session_of(model, compile: bool | str = "background", **options) -> Session:
    return Session.from_model(
        model, ExportableCache.from_model(model, CAPACITY), compile=compile, prefill_chunk=16, buckets=(32,), **options
    )


def in_its_place(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Another program as the process that compiles."""
    monkeypatch.setattr(background, "_CHILD", program)


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
