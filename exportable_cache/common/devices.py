"""Devices of torch: the choice of one, its memory, and one sentence with sizes if that runs out."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from ..errors import DeviceMemoryError, InputError
from .progress import bytes_text

#: Devices that sessions run on.
DEVICES = ("cpu", "cuda", "mps")
#: Texts of errors that torch raises without a class of their own.
_OUT_OF_MEMORY = ("can't allocate memory", "MPS backend out of memory")


def chosen_device(name: str | None = None) -> torch.device:
    """Return the device of a name; by default the GPU if torch finds one of NVIDIA, else the CPU.

    Raises:
        InputError: If sessions do not run on such a device, or torch does not find it here.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in DEVICES:
        raise InputError(f"device must be one of {', '.join(DEVICES)}, or cuda:N for a GPU by its index, got {name!r}")
    reason = missing_reason(device)
    if reason:
        raise InputError(f"device must be one that torch finds here, got {name!r}: {reason}; pass cpu")
    return device


def missing_reason(device: torch.device) -> str:
    """Return why torch cannot use a device here, "" if it can."""
    if device.type == "cuda":
        if torch.version.cuda is None and torch.version.hip is None:
            return f"torch {torch.__version__} is built without CUDA"
        if not torch.cuda.is_available():
            return "torch finds no NVIDIA GPU"
        count = torch.cuda.device_count()
        if device.index is not None and device.index >= count:
            return f"there {'is 1 GPU' if count == 1 else f'are {count} GPUs'}, with indices from 0"
    if device.type == "mps" and not torch.backends.mps.is_available():
        return "torch finds no GPU of Apple"
    return ""


def kind_of_gpu(device: torch.device) -> tuple[object, ...]:
    """Return the model of a GPU, for which kernels are compiled, and the release of CUDA; () for other devices."""
    if device.type != "cuda":
        return ()
    return torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device), torch.version.cuda


def cpp_compiler() -> str:
    """Return the C++ compiler that torch.compile uses for a CPU, "" if there is none."""
    # The variable and the names that Inductor looks for.
    name = os.environ.get("CXX") or {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    return name if shutil.which(name) else ""


def c_compiler() -> str:
    """Return the C compiler with which Triton builds what launches its kernels, "" if there is none."""
    # The variable and the names that Triton looks for.
    names = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    return next((name for name in names if shutil.which(name)), "")


def missing_compiler(kind: str) -> tuple[str, str] | None:
    """Return the compiler that compiled steps lack on a kind of device, None if they lack none.

    Args:
        kind: Type of the device: `cpu`, `cuda` or `mps`.

    Returns:
        Its language and a package that has it: `("C++", "g++")`.
    """
    if kind == "cpu" and not cpp_compiler():
        return "C++", "g++"
    if kind == "cuda" and not c_compiler():
        return "C", "gcc"
    return None


def free_and_total(device: torch.device) -> tuple[int, int] | None:
    """Return the free and the total bytes of a GPU's memory; None where torch does not report them."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    # Memory that torch holds and has not given out is free for torch.
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total


def host_memory() -> int | None:
    """Return the free bytes of memory and swap space, without the limit of a container; None outside of Linux."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    return sizes["MemAvailable"] + sizes["SwapFree"] if sizes.keys() >= {"MemAvailable", "SwapFree"} else None


def check_fits(device: torch.device, needed: Mapping[str, int]) -> None:
    """Check that a device has enough free memory, before anything is moved there.

    Args:
        device: The device.
        needed: Bytes by name: `{"the weights": 10, "the cache": 2}`.

    Raises:
        DeviceMemoryError: If it does not.
    """
    memory = free_and_total(device)
    if memory is not None and sum(needed.values()) > memory[0]:
        raise out_of_memory(device, needed)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if torch raised an error because a device has not enough memory."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
    )


@contextmanager
def memory_errors(
    device: torch.device | str, needed: Callable[[], Mapping[str, int]], during: str = ""
) -> Iterator[None]:
    """Replace torch's error in this block, if a device has not enough memory, by one sentence with sizes.

    Args:
        device: The device.
        needed: Returns the needed bytes by name, as `check_fits` takes them.
        during: See `out_of_memory`.

    Raises:
        DeviceMemoryError: If the device has not enough memory.
    """
    try:
        yield
    except RuntimeError as error:
        refuse_out_of_memory(error, torch.device(device), needed, during)
        raise


def refuse_out_of_memory(
    error: RuntimeError, device: torch.device, needed: Callable[[], Mapping[str, int]], during: str
) -> None:
    """Raise the error of `memory_errors` if `error` means that a device has not enough memory."""
    if is_out_of_memory(error):
        raise out_of_memory(device, needed(), during) from error


def out_of_memory(device: torch.device, needed: Mapping[str, int], during: str = "") -> DeviceMemoryError:
    """Return the error of a device that lacks memory.

    Args:
        device: The device.
        needed: See `check_fits`.
        during: Work for which memory is needed in addition, such as "a step".
    """
    memory = free_and_total(device)
    parts = " and ".join(f"{name} ({bytes_text(size)})" for name, size in needed.items())
    state = "not enough is free" if memory is None else f"{bytes_text(memory[0])} of {bytes_text(memory[1])} are free"
    besides = f", and for {during}" if during else ""
    return DeviceMemoryError(
        f"{device} must have memory for {parts}{besides}, but {state}; use a smaller max_cache_len, kv_dtype='int8', "
        f"{'a shorter prompt or prefill_chunk' if during else 'a dtype of 16 bits'}, or another device"
    )


def weights_bytes(module: torch.nn.Module) -> int:
    """Return the bytes of a module's parameters and buffers, each counted once.

    Buffers over the memory of parameters, as joined layers have them, are not counted.
    """
    parameters = list(module.parameters())
    counted = {_address(tensor) for tensor in parameters} - {0}
    buffers = [tensor for tensor in module.buffers() if _address(tensor) not in counted]
    return sum(tensor.nbytes for tensor in (*parameters, *buffers))


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage, 0 if it has none of its own."""
    # Fake and quantized tensors have classes of their own.
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return tensor.untyped_storage().data_ptr() if is_plain else 0
