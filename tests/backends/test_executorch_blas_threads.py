"""Products inside the runtime's threads take one thread each, and nothing of it is left afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

pytest.importorskip("executorch", reason="executorch is not installed")

import torch

from exportable_cache.backends.executorch import runner
from exportable_cache.backends.executorch.runner import ExecutorchRunner, one_blas_thread

needs_mkl = pytest.mark.skipif(runner._mkl() is None, reason="this build of torch has no MKL")


def most() -> int:
    return runner._mkl().mkl_serv_get_max_threads()


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Also where the tests run with one."""
    mkl = runner._mkl()
    local = mkl.mkl_serv_set_num_threads_local(0)
    before = most()
    mkl.mkl_serv_set_num_threads(2)
    yield
    mkl.mkl_serv_set_num_threads(before)
    mkl.mkl_serv_set_num_threads_local(local)


@needs_mkl
@pytest.mark.parametrize("threads", [None, 3])
def test_numbers_of_threads_are_as_before(threads: int | None, two_threads: None) -> None:
    before = torch.get_num_threads()
    try:
        if threads:
            torch.set_num_threads(threads)
        outside = torch.get_num_threads(), most()
        with pytest.raises(KeyError), one_blas_thread():
            assert most() == 1
            raise KeyError
        assert (torch.get_num_threads(), most()) == outside
    finally:
        torch.set_num_threads(before)


@needs_mkl
def test_blocks_of_two_threads_may_overlap(two_threads: None) -> None:
    """The first to enter is the first to leave: the second then restores what the first found, not
    the 1 that it set.
    """
    entered, left = threading.Event(), threading.Event()

    def second() -> None:
        with one_blas_thread():
            entered.set()
            left.wait(10)

    thread = threading.Thread(target=second)
    with one_blas_thread():
        thread.start()
        assert entered.wait(10)
    left.set()
    thread.join()
    assert most() == 2


@needs_mkl
def test_a_runner_runs_so(two_threads: None) -> None:
    seen = []

    class ProgramMethod:
        def __call__(self, inputs: list) -> list:
            seen.append(most())
            return [torch.zeros(1)]

    class Description:
        is_step = True

    runner = object.__new__(ExecutorchRunner)
    runner.methods, runner._methods = {"forward": Description()}, {"forward": ProgramMethod()}
    runner.run("forward", torch.zeros(1))
    assert seen == [1] and most() == 2


THREADS = """
import os, sys, torch
import executorch.extension.llm.custom_ops.custom_ops
from exportable_cache.backends.executorch.runner import one_blas_thread
from contextlib import nullcontext
query, rows = torch.randn(1, 4, 8, 64), torch.randn(1, 4096, 8, 64)
with one_blas_thread() if sys.argv[1] == "one" else nullcontext():
    torch.ops.llama.custom_sdpa(query, rows, rows, 4000, None, 0.0, False, 0.125)
print(len(os.listdir("/proc/self/task")))
"""


@pytest.mark.canary
@needs_mkl
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts the threads of a process in /proc")
def test_the_operator_still_opens_threads_of_its_own() -> None:
    """Once it does not, `one_blas_thread` is no longer needed."""

    def threads(kind: str) -> int:
        environment = {**os.environ, "OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "4", "MKL_DYNAMIC": "FALSE"}
        done = subprocess.run(
            [sys.executable, "-c", THREADS, kind], capture_output=True, text=True, check=True, env=environment
        )
        return int(done.stdout)

    assert threads("one") < threads("many")
