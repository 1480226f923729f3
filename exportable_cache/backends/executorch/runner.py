"""Run a `.pte` in ExecuTorch's Python runtime, with one BLAS thread inside each thread of the runtime.

`llama::custom_sdpa` splits heads over the runtime's thread pool. In the wheel each of these threads calls torch's MKL,
which starts OpenMP threads for products of more than one row. Two cores then run four threads that wait for each other:
0.33 ms instead of 0.03 ms per layer and token at position 100, measured with 4 rows on 2 cores. Builds for devices have
no MKL.

MKL is called directly, because torch (2.13) sets the thread count of the calling thread only and threadpoolctl does not
find an MKL that is linked into torch. MKL_NUM_THREADS=1 in the environment has the same effect, but limits torch, too.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...common.compat.executorch import load_program, operator_names
from ...common.native.kernels import how_to_get_them
from ...errors import BundleError
from .pte.instructions import called_operators, check_instructions

if TYPE_CHECKING:
    import torch

    from ..base import ProgramDescription


# The runtime's error code MemoryAllocationFailed, as its messages give it.
_NO_MEMORY = "error: 0x:21"
# How the names of this package's operators begin.
_NATIVE_OPERATORS = "exportable_cache::"


class ExecutorchRunner:
    """The methods of one program instance: they share its cache, which starts at zero.

    Raises:
        BundleError: If the file cannot be loaded by this runtime, or is for delegates that it lacks.
    """

    def __init__(self, path: Path, description: ProgramDescription) -> None:
        self.methods = description.methods
        try:
            # Held as well as its methods: they point into it.
            self._program = load_program(path)
            check_instructions(path)
            # Before the runtime looks, because it writes a page to stderr for each operator that it lacks.
            missing = called_operators(path) - operator_names()
            if not missing:
                self._methods = {name: self._program.load_method(name) for name in description.methods}
        except (OSError, RuntimeError) as error:
            _check_runs_here(path)
            remedy = "export the model again"
            if _NO_MEMORY in str(error):
                remedy = (
                    "memory is planned for the longest input: export with a smaller max_encoder_len or prefill_chunk"
                )
            raise BundleError(f"the ExecuTorch runtime cannot load {path.name}: {error}; {remedy}") from error
        if missing:
            raise _missing(path, missing)

    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        # Outputs live in the method's planned memory and are overwritten by the next call.
        try:
            with one_blas_thread():
                outputs = self._methods[method]([tensor.contiguous() for tensor in inputs])
        except RuntimeError as error:
            raise BundleError(f"method {method!r} of the program failed: {error}; export the model again") from error
        return outputs[0].clone() if self.methods[method].is_step else tuple(output.clone() for output in outputs)


def _missing(path: Path, operators: frozenset[str]) -> BundleError:
    """Return the refusal of a program that calls operators which the runtime has no kernels for."""
    if any(name.startswith(_NATIVE_OPERATORS) for name in operators):
        remedy = (
            "it was exported with kernels='native' or linears='native' and needs the compiled kernels of this package: "
            f"{how_to_get_them()}; or export the model again without that option"
        )
    else:
        _check_runs_here(path)
        remedy = "install the release of executorch that it was exported with, or export the model again"
    return BundleError(
        f"the ExecuTorch runtime cannot load {path.name}: it has no kernel for {', '.join(sorted(operators))}; {remedy}"
    )


def _check_runs_here(path: Path) -> None:
    """Say so where a file that failed to load is for delegates that this machine's runtime lacks."""
    # The readers of the file's tables belong to the exporter, which takes seconds to import.
    from .lowering.delegates import check_runs_here

    if path.is_file() and path.stat().st_size:
        try:
            check_runs_here(path)
        except BundleError:
            raise
        except Exception:  # the readers take a file for whole, and this one may be anything
            return


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
