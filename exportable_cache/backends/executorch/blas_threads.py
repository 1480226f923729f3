"""One thread for each matrix product inside the threads of the ExecuTorch runtime.

`llama::custom_sdpa` splits heads over the runtime's own pool, and in the wheel each thread of it then calls MKL,
torch's, which opens OpenMP threads of its own for products of more than one row. Two cores then serve four threads that
wait for one another: 0.33 ms instead of 0.03 per layer and token at position 100, measured with 4 rows on 2 cores.
Builds for devices have no MKL.

MKL's own calls are used, as torch (2.13) has none for other threads than the caller's, and threadpoolctl does not find
an MKL that is linked into torch. The environment variable MKL_NUM_THREADS=1 does the same from outside, and leaves
torch one thread, too.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


class _Blocks:
    """The open blocks of `one_blas_thread`, in all threads.

    The first sets the number of threads of the process, and the last restores it. If each block saved the number that
    it finds, the second of two overlapping ones would save the 1 of the first, and leave MKL at it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open = 0
        self.everywhere = 0


_blocks = _Blocks()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """In the block products take one thread each, in this thread and in those without a number of their own, such as a
    pool's.

    Blocks may overlap, in one thread or in several. Nothing happens where torch was built without MKL.
    """
    mkl = _mkl()
    if mkl is None:
        yield
        return
    with _blocks.lock:
        # 0 where this thread has no number of its own.
        local = mkl.mkl_serv_set_num_threads_local(0)
        if _blocks.open == 0:
            _blocks.everywhere = mkl.mkl_serv_get_max_threads()
            mkl.mkl_serv_set_num_threads(1)
        _blocks.open += 1
        mkl.mkl_serv_set_num_threads_local(1)
    try:
        yield
    finally:
        with _blocks.lock:
            _blocks.open -= 1
            if _blocks.open == 0:
                mkl.mkl_serv_set_num_threads(_blocks.everywhere)
            mkl.mkl_serv_set_num_threads_local(local)


@functools.cache
def _mkl() -> ctypes.CDLL | None:
    """The library that torch's MKL is in, None if there is none."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return None
    names = ("mkl_serv_set_num_threads", "mkl_serv_set_num_threads_local", "mkl_serv_get_max_threads")
    return library if all(hasattr(library, name) for name in names) else None
