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
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...common.compat.executorch import OPENVINO, exact_openvino, load_program, operator_names
from ...common.native.kernels import kernels_remedy
from ...errors import BundleError
from .delegates.checks import check_runs_here
from .pte.instructions import called_delegates, called_operators, check_instructions

if TYPE_CHECKING:
    import torch

    from ..base import ProgramDescription


# Error code MemoryAllocationFailed in the runtime's messages.
_NO_MEMORY = "error: 0x:21"
# Prefix of native operators.
_NATIVE_OPERATORS = "exportable_cache::"


class ExecutorchRunner:
    """Methods of one program instance, which share its cache; the cache starts at zero.

    Raises:
        BundleError: If the runtime cannot load the file, or lacks a delegate or kernel that it needs.
    """

    def __init__(self, path: Path, description: ProgramDescription) -> None:
        self.methods = description.methods
        try:
            # Kept, because its methods point into it.
            self._program = load_program(path)
            check_instructions(path)
            # Checked first, because the runtime writes a page to stderr for each missing operator.
            missing = called_operators(path) - operator_names()
            if not missing:
                exact = exact_openvino() if OPENVINO in called_delegates(path) else nullcontext()
                with exact:
                    self._methods = {name: self._program.load_method(name) for name in description.methods}
        except (OSError, RuntimeError) as error:
            check_runs_here(path)
            remedy = "export the model again"
            if _NO_MEMORY in str(error):
                remedy = (
                    "memory is planned for the longest input; export with a smaller max_encoder_len or prefill_chunk"
                )
            raise BundleError(f"the ExecuTorch runtime cannot load {path.name}: {error}; {remedy}") from error
        if missing:
            raise _missing(path, missing)

    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run a method and return copies of its outputs, of a step those of the first one."""
        outputs = self.outputs(method, *inputs)
        return outputs[0] if self.methods[method].is_step else outputs

    def state_tensor(self, name: str) -> torch.Tensor | None:
        """See `GivesTensors.state_tensor`. Delegates that keep the cache, and files of earlier releases, give none."""
        for method in self._methods.values():
            try:
                # A view of the planned memory, which all methods share.
                return method.get_attribute(name.replace(".", "_"))
            except (AttributeError, RuntimeError):
                continue
        return None

    def outputs(self, method: str, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run a method and return copies of all its outputs."""
        # Outputs live in the method's planned memory and are overwritten by the next call.
        try:
            with one_blas_thread():
                outputs = self._methods[method]([tensor.contiguous() for tensor in inputs])
        except RuntimeError as error:
            raise BundleError(f"method {method!r} of the program failed: {error}; export the model again") from error
        return tuple(output.clone() for output in outputs)


def _missing(path: Path, operators: frozenset[str]) -> BundleError:
    """Return the error for a program whose operators have no kernels in the runtime."""
    if any(name.startswith(_NATIVE_OPERATORS) for name in operators):
        remedy = (
            "it was exported for the native operators of this package, which are not loaded: "
            f"{kernels_remedy()}; or make a bundle without them: exportable-cache export MODEL --recipe portable ..."
        )
    else:
        check_runs_here(path)
        remedy = "install the release of executorch that it was exported with, or export the model again"
    return BundleError(
        f"the ExecuTorch runtime cannot load {path.name}: it has no kernel for {', '.join(sorted(operators))}; {remedy}"
    )


class _Blocks:
    """Open blocks of `one_blas_thread` in all threads.

    The first block sets the thread count of the process, and the last restores it. If each block saved the count it
    finds, the second of two overlapping blocks would save the 1 of the first, and MKL would stay at it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open = 0
        self.everywhere = 0


_blocks = _Blocks()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit matrix products to one thread each, in this thread and in threads without a local limit, such as a pool's.

    Blocks may overlap, in one thread or in several. Without MKL this does nothing.
    """
    mkl = _mkl()
    if mkl is None:
        yield
        return
    with _blocks.lock:
        # 0 if this thread has no local limit.
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
    """Return the library that contains torch's MKL, or None."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return None
    names = ("mkl_serv_set_num_threads", "mkl_serv_set_num_threads_local", "mkl_serv_get_max_threads")
    return library if all(hasattr(library, name) for name in names) else None
