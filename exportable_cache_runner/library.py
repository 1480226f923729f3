"""The shared library of the C interface, `exportable_cache.h`: its structures, callbacks and functions."""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import (
    CFUNCTYPE,
    POINTER,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any

from .failures import Failure, Status
from .installed import installed_library

#: Environment variable with the path of the library.
VARIABLE = "EXPORTABLE_CACHE_RUNNER"
FILE = "libexportable_cache.dylib" if sys.platform == "darwin" else "libexportable_cache.so"
#: Upper half of `EC_ABI_VERSION`; the lower half grows with additions.
ABI = 1

AllowTokens = CFUNCTYPE(c_int, POINTER(c_int64), c_size_t, POINTER(c_uint32), c_size_t, c_void_p)
OnLogProbs = CFUNCTYPE(None, c_double, POINTER(c_int64), POINTER(c_double), c_size_t, c_void_p)
OnToken = CFUNCTYPE(c_int, c_int64, c_void_p)
# A piece has a size; as `c_char_p` it would end at its first zero byte.
OnText = CFUNCTYPE(c_int, c_void_p, c_size_t, c_void_p)


class OptionsStruct(ctypes.Structure):
    """`ec_options`."""

    _fields_ = [
        ("size", c_size_t),
        ("max_new_tokens", c_int64),
        ("temperature", c_double),
        ("top_k", c_int64),
        ("top_p", c_double),
        ("seed", c_uint64),
        ("has_seed", c_int32),
        ("reserved", c_int32),
        ("stop_tokens", POINTER(c_int64)),
        ("stop_token_count", c_size_t),
        ("stop_strings", POINTER(c_char_p)),
        ("stop_string_count", c_size_t),
        ("prompt_lookup", c_int64),
        ("allowed_tokens", AllowTokens),
        ("allowed_user", c_void_p),
        ("min_p", c_double),
        ("repetition_penalty", c_double),
        ("cached_tokens", c_int64),
        ("on_logprobs", OnLogProbs),
        ("logprobs_user", c_void_p),
        ("alternatives", c_int64),
        ("from_checkpoint", c_int32),
        ("shift_when_full", c_int32),
        ("protected_tokens", c_int64),
        ("bias_tokens", POINTER(c_int64)),
        ("bias_values", POINTER(c_double)),
        ("bias_count", c_size_t),
        ("presence_penalty", c_double),
        ("frequency_penalty", c_double),
        ("counted_tokens", POINTER(c_int64)),
        ("counted_token_count", c_size_t),
        ("draft_tokens", c_int64),
    ]


class StatisticsStruct(ctypes.Structure):
    """`ec_statistics`."""

    _fields_ = [
        ("size", c_size_t),
        ("prompt_tokens", c_int64),
        ("generated_tokens", c_int64),
        ("time_to_first_token", c_double),
        ("decode_seconds", c_double),
        ("proposed_tokens", c_int64),
        ("accepted_tokens", c_int64),
        ("stop", c_int32),
        ("reserved", c_int32),
    ]


_IDS = POINTER(c_int64)
_HOW = [POINTER(OptionsStruct), OnText, c_void_p, POINTER(StatisticsStruct)]
#: Arguments of the functions that return an `ec_status`.
_ARGUMENTS: dict[str, list[Any]] = {
    "ec_set_threads": [c_int64],
    "ec_open": [c_char_p, POINTER(c_void_p)],
    "ec_prefill": [c_void_p, _IDS, c_size_t, POINTER(POINTER(c_float)), POINTER(c_size_t)],
    "ec_encode_tokens": [c_void_p, _IDS, c_size_t],
    "ec_encode_values": [c_void_p, POINTER(c_float), c_size_t],
    "ec_add_input": [c_void_p, c_char_p, c_void_p, c_int, _IDS, c_size_t],
    "ec_rewind": [c_void_p, c_int64],
    "ec_reset": [c_void_p],
    "ec_shift": [c_void_p, c_int64, c_int64],
    "ec_length": [c_void_p, _IDS, _IDS],
    "ec_generate": [
        c_void_p, _IDS, c_size_t, POINTER(OptionsStruct), OnToken, c_void_p, POINTER(StatisticsStruct)
    ],
    "ec_generate_text": [c_void_p, c_char_p, *_HOW],
    "ec_chat": [c_void_p, c_char_p, c_char_p, *_HOW],
    "ec_load_adapter": [c_void_p, c_char_p, c_char_p],
    "ec_unload_adapter": [c_void_p, c_char_p],
    "ec_use_adapter": [c_void_p, c_char_p],
    "ec_chat_messages": [c_void_p, c_char_p, *_HOW],
    "ec_render": [c_void_p, c_char_p, OnText, c_void_p],
    "ec_tokenize": [c_void_p, c_char_p, c_int, _IDS, c_size_t, POINTER(c_size_t)],
    "ec_save_state": [c_void_p, c_char_p],
    "ec_load_state": [c_void_p, c_char_p],
}  # fmt: skip


#: Functions of later minor versions of the interface.
_LATER = ("ec_shift", "ec_render", "ec_chat_messages", "ec_load_adapter", "ec_unload_adapter", "ec_use_adapter")


def found_library() -> Path | None:
    """Return the library next to this package, or the installed one; None if there is neither."""
    beside = Path(__file__).with_name(FILE)
    return beside if beside.is_file() else installed_library(FILE)


def load_library(path: str | os.PathLike[str] | None = None) -> ctypes.CDLL:
    """Load the library, and declare the types of its functions.

    Args:
        path: Path of the library; None for the variable `EXPORTABLE_CACHE_RUNNER`, otherwise the file next to this
            package, otherwise the installed one (`installed_library`), otherwise the one that the system's loader
            finds.

    Raises:
        Failure: If it cannot be loaded, has another interface, or this process has ExecuTorch's Python bindings, whose
            kernels it would register again.
    """
    if "executorch.extension.pybindings._portable_lib" in sys.modules:
        raise Failure(
            Status.RUNTIME,
            "this process has loaded ExecuTorch's Python bindings, whose kernels the runner would register again; use "
            "exportable_cache.load there, or another process",
        )
    chosen = str(path or os.environ.get(VARIABLE) or found_library() or FILE)
    try:
        library = ctypes.CDLL(chosen)
        version = library.ec_abi_version
    except (OSError, AttributeError) as error:
        raise Failure(
            Status.RUNTIME,
            f"{chosen} is not the runner's library, or cannot be loaded: {error}; build it with "
            "`exportable-cache native build`, or name another build of runners/cpp with library= or the variable "
            f"{VARIABLE}",
        ) from None
    version.restype = c_uint32
    if version() >> 16 != ABI:
        raise Failure(
            Status.RUNTIME,
            f"{chosen} has version {version() >> 16} of the C interface, and this module needs {ABI}; take both from "
            "one release",
        )
    library.ec_error.restype = c_char_p
    library.ec_close.argtypes = library.ec_cancel.argtypes = [c_void_p]
    library.ec_close.restype = library.ec_cancel.restype = None
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name, None)
        if function is None and name in _LATER:
            continue
        function.argtypes, function.restype = arguments, c_int
    return library
