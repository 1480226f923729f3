"""The functions that a graph of a `.pt2` file may call, by the names that torch writes.

torch resolves a name of a file by `getattr` from `torch`, `math` and `operator`, so that a file may call anything that
can be reached from there. Here a name is one of a list, or one of torch's public operators on tensors.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from ...common.compat.torch import operator_arguments
from ...errors import BundleError


def _power(base: float, exponent: float) -> float:
    """A power of sizes, of a size that takes no time to compute."""
    if abs(base) > 2**32 or abs(exponent) > 16:
        raise ValueError(f"{base} ** {exponent} is no arithmetic on sizes")
    return base**exponent


#: Arithmetic on sizes.
_ON_SIZES: dict[str, Callable] = {
    **{
        f"_operator.{name}": getattr(operator, name)
        for name in (
            "add",
            "sub",
            "mul",
            "floordiv",
            "truediv",
            "mod",
            "neg",
            "pos",
            "eq",
            "ne",
            "lt",
            "le",
            "gt",
            "ge",
        )
    },
    "_operator.pow": _power,
    "_operator.and_": operator.and_,
    "_operator.or_": operator.or_,
    "math.trunc": math.trunc,
    **{
        f"torch.{name}": getattr(torch, name)
        for name in ("sym_int", "sym_float", "sym_min", "sym_max", "sym_not", "sym_ite")
    },
}

#: What takes a graph as an argument.
_ON_GRAPHS = ("wrap_with_set_grad_enabled", "wrap_with_autocast", "cond")

#: Operators of other packages, and the modules that register them.
_OF_PACKAGES = {
    "torch.ops.torchao.choose_qparams_affine.default": "torchao.quantization.quant_primitives",
    "torch.ops.torchao.quantize_affine.default": "torchao.quantization.quant_primitives",
    "torch.ops.torchao.dequantize_affine.default": "torchao.quantization.quant_primitives",
    "torch.ops.transformers.grouped_mm_fallback.default": "transformers.integrations.moe",
}

#: Operators whose names begin with an underscore, which torch keeps for its own, are taken only if listed.
_INTERNAL = frozenset(
    "_adaptive_avg_pool2d _assert_async _assert_scalar _assert_tensor_metadata _cdist_forward _conj _fft_c2c _fft_c2r "
    "_fft_r2c _grouped_mm _int_mm _is_all_true _is_any_true _local_scalar_dense _log_softmax _native_batch_norm_legit "
    "_pad_circular _pdist_forward _prelu_kernel _reshape_alias_copy _safe_softmax _scaled_grouped_mm _scaled_mm "
    "_shape_as_tensor _softmax _stack _to_copy _trilinear _unsafe_view "
    "_weight_int4pack_mm _weight_int8pack_mm _weight_norm".split()
)

#: Operators that read or write files, or the storage under a tensor, or belong to training.
_REFUSED = frozenset(
    "from_file set set_ set_data data resize resize_ resize_as resize_as_ resize_as_sparse resize_as_sparse_ "
    "record_stream pin_memory is_pinned backward requires_grad_ retain_grad rename rename_ sparse_resize_ "
    "sparse_resize_and_clear_ to_mkldnn".split()
)
_TAKES_NO = ("Storage", "Generator", "Stream", "Dimname", "__torch__")

_ATEN = re.compile(r"torch\.ops\.aten\.([A-Za-z][A-Za-z0-9_]*|_[a-z][A-Za-z0-9_]*|__[a-z]+__)\.([A-Za-z0-9_]+)")
_DUNDER = re.compile(r"__[a-z]+__")


def operator_named(target: str) -> Callable[..., Any]:
    """What a node calls.

    Raises:
        BundleError: If it is not one of those that a file may call, or this torch has none of that name.
    """
    found = _ON_SIZES.get(target)
    if found is not None:
        return found
    parts = target.split(".")
    if parts[:3] == ["torch", "ops", "higher_order"] and len(parts) == 4 and parts[3] in _ON_GRAPHS:
        return getattr(torch.ops.higher_order, parts[3])
    if target in _OF_PACKAGES:
        import_module(_OF_PACKAGES[target])
        return getattr(getattr(getattr(torch.ops, parts[2]), parts[3]), parts[4])
    match = _ATEN.fullmatch(target)
    if match and _is_taken(match[1]):
        packet = getattr(torch.ops.aten, match[1], None)
        overload = getattr(packet, match[2], None) if match[2] in (packet.overloads() if packet else ()) else None
        if overload is not None and not any(
            kind in str(argument.type) for argument in operator_arguments(overload) for kind in _TAKES_NO
        ):
            return overload
    raise BundleError(
        f"a graph calls {target!r:.100}, which no program of ours may call (docs/security.md lists what may); "
        "do not trust this file"
    )


def _is_taken(name: str) -> bool:
    if _DUNDER.fullmatch(name):
        return True
    return name in _INTERNAL if name.startswith("_") else name not in _REFUSED
