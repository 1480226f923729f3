"""Resolve and check the operators that a graph of a `.pt2` file may call.

torch resolves a name from a file by `getattr` from `torch`, `math` and `operator`, so a file may call anything that can
be reached from there. Here a name must be in a list.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from ...common.compat import torch_distributed
from ...common.compat.torch import OpOverload, operator_arguments
from ...common.compat.torch_distributed import GROUP, is_sum, sum_in_graph
from ...errors import BundleError
from .contents import check_view

#: Sizes beyond this are not sizes. Their arithmetic would take any time and any memory.
_GREATEST = 1 << 63


def _on_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of Python that takes single numbers of at most 64 bits alone, and gives one.

    The same functions repeat lists and format texts. The result keeps its own name and module, because generated code
    would call the function itself by those of the function.
    """

    def checked(*numbers: Any) -> Any:
        for number in numbers:
            if not isinstance(number, int | float):
                raise ValueError(f"an argument of {function.__name__} must be a number, got {type(number).__name__}")
            if isinstance(number, int) and not -_GREATEST <= number < _GREATEST:
                raise ValueError(f"an argument of {function.__name__} must fit in 64 bits, got one of more")
        return function(*numbers)

    return checked


def _power(base: float, exponent: float) -> float:
    """Return a power of sizes that takes no time to compute."""
    if abs(base) > 2**32 or abs(exponent) > 16:
        raise ValueError(f"a power of sizes must have at most base 2**32 and exponent 16, got {base} ** {exponent}")
    return base**exponent


#: Arithmetic on sizes.
_ON_SIZES: dict[str, Callable[..., Any]] = {
    name: _on_numbers(function)
    for name, function in {
        **{
            f"_operator.{name}": getattr(operator, name)
            for name in "add sub mul floordiv truediv mod neg pos eq ne lt le gt ge and_ or_".split()
        },
        "_operator.pow": _power,
        "math.trunc": math.trunc,
        **{
            f"torch.{name}": getattr(torch, name)
            for name in ("sym_int", "sym_float", "sym_min", "sym_max", "sym_not", "sym_ite")
        },
    }.items()
}

#: Operators that take a graph as an argument.
_ON_GRAPHS = ("wrap_with_set_grad_enabled", "wrap_with_autocast", "cond")

#: Operators of other packages, and the modules that register them.
_OF_PACKAGES = {
    "torch.ops.torchao.choose_qparams_affine.default": "torchao.quantization.quant_primitives",
    "torch.ops.torchao.quantize_affine.default": "torchao.quantization.quant_primitives",
    "torch.ops.torchao.dequantize_affine.default": "torchao.quantization.quant_primitives",
    "torch.ops.transformers.grouped_mm_fallback.default": "transformers.integrations.moe",
}

#: Sums over the ranks of a program, see `checked`.
_OVER_RANKS = (torch_distributed.SUM, torch_distributed.WAIT)

#: Operators of aten, by the names that torch writes after `torch.ops.aten.`, without `.default`: what the exported
#: models of the zoo call, with other overloads of the same and their neighbours. Any other operator is refused,
#: because its kernel may trust its arguments: `tests/security/fuzz.py` calls these with random ones. Operators that do
#: need checks have them in `_CHECKS` and `_REPLACED`.
_LISTED = frozenset(
    (
        # products
        "linear matmul mm mv _grouped_mm bmm addmm baddbmm addbmm dot outer einsum "
        # layers of networks
        "silu gelu relu relu_ relu6 softmax.int log_softmax.int _softmax _log_softmax softplus elu elu_ selu glu mish "
        "prelu log_sigmoid hardswish hardsigmoid hardtanh leaky_relu layer_norm rms_norm group_norm batch_norm "
        "scaled_dot_product_attention dropout dropout_ embedding one_hot _weight_norm conv1d conv1d.padding conv2d "
        "conv2d.padding conv3d conv3d.padding conv_transpose1d conv_transpose2d.input pad constant_pad_nd "
        "pixel_shuffle pixel_unshuffle upsample_linear1d.vec upsample_nearest1d.vec upsample_nearest2d.vec "
        "upsample_bilinear2d.vec upsample_bicubic2d.vec _upsample_bilinear2d_aa _upsample_bilinear2d_aa.vec "
        "_upsample_bicubic2d_aa _upsample_bicubic2d_aa.vec grid_sampler im2col avg_pool1d avg_pool2d avg_pool3d "
        "max_pool1d max_pool2d adaptive_avg_pool1d adaptive_avg_pool2d "
        # shapes
        "view view_as reshape reshape_as _unsafe_view transpose.int permute t numpy_T mT flatten.using_ints "
        "unflatten.int chunk split.Tensor split.sizes split_with_sizes narrow select.int slice.Tensor unbind.int "
        "squeeze squeeze.dim squeeze.dims unsqueeze unsqueeze_ movedim.int movedim.intlist swapaxes expand expand_as "
        "broadcast_to broadcast_tensors repeat repeat_interleave.self_int tile roll flip cat concat concatenate stack "
        "hstack vstack meshgrid meshgrid.indexing diagonal tril tril_ triu triu_ unfold sym_size.int sym_numel "
        # elements by index
        "index.Tensor index_select index_copy index_copy_ index_put index_put_ index_add index_add_ "
        "index_fill.int_Scalar index_fill_.int_Scalar gather scatter.src scatter.value scatter_.src scatter_.value "
        "scatter_add scatter_add_ take_along_dim masked_fill.Scalar masked_fill.Tensor masked_fill_.Scalar "
        "masked_fill_.Tensor masked_scatter masked_select where.self where.Scalar where.ScalarOther where.ScalarSelf "
        "nonzero "
        # order
        "topk sort sort.stable argsort argsort.stable bucketize.Tensor searchsorted.Tensor isin.Tensor_Tensor "
        "isin.Tensor_Scalar "
        # over dimensions
        "cumsum cumsum_ cumprod diff sum sum.dim_IntList mean mean.dim prod prod.dim_int amax amin max max.dim "
        "max.other min min.dim min.other maximum minimum any any.dim any.dims all all.dim all.dims argmax argmin std "
        "std.dim std.correction std_mean.correction var var.dim var.correction var_mean.correction norm.ScalarOpt_dim "
        "logsumexp linalg_vector_norm histc _is_all_true _is_any_true "
        # elements
        "abs abs_ neg neg_ negative sign exp exp_ exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal square sin "
        "sin_ cos cos_ tan sinh cosh tanh tanh_ asin acos atan atan2 asinh acosh atanh erf erfc erfinv sigmoid "
        "sigmoid_ logit floor ceil round round.decimals trunc frac nan_to_num isnan isinf isfinite add.Tensor "
        "add.Scalar add_.Tensor add_.Scalar sub.Tensor sub.Scalar sub_.Tensor sub_.Scalar rsub.Tensor rsub.Scalar "
        "subtract.Tensor mul.Tensor mul.Scalar mul_.Tensor mul_.Scalar multiply.Tensor multiply.Scalar div.Tensor "
        "div.Scalar div_.Tensor div_.Scalar divide.Tensor true_divide.Tensor div.Tensor_mode div.Scalar_mode "
        "div_.Tensor_mode div_.Scalar_mode floor_divide floor_divide.Scalar floor_divide_.Tensor floor_divide_.Scalar "
        "remainder.Scalar remainder.Tensor remainder_.Scalar remainder_.Tensor pow.Scalar pow.Tensor_Scalar "
        "pow.Tensor_Tensor float_power.Tensor_Scalar clamp clamp.Tensor clamp_ clamp_.Tensor clamp_min "
        "clamp_min.Tensor clamp_max clamp_max.Tensor clip lerp.Scalar lerp.Tensor addcmul addcdiv eq.Tensor eq.Scalar "
        "ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar ge.Tensor ge.Scalar isclose "
        "logical_and logical_or logical_not logical_xor bitwise_and.Tensor bitwise_and.Scalar bitwise_or.Tensor "
        "bitwise_or.Scalar bitwise_xor.Tensor bitwise_xor.Scalar bitwise_not __and__.Tensor __and__.Scalar "
        "__or__.Tensor __or__.Scalar __xor__.Tensor __xor__.Scalar __iand__.Tensor __ior__.Tensor "
        # new tensors
        "arange arange.start arange.start_step linspace full full_like zeros zeros_like ones ones_like "
        "empty.memory_format empty_like scalar_tensor eye new_empty new_full new_zeros new_ones fill.Scalar "
        "fill_.Scalar fill_.Tensor zero_ "
        # dtypes and copies
        "item _local_scalar_dense to.dtype to.device to.dtype_layout to.other type_as _to_copy contiguous clone copy "
        "copy_ detach detach_ alias lift_fresh lift_fresh_copy view_as_complex view_as_real polar resolve_conj "
        "resolve_neg complex real imag "
        # assertions
        "_assert_async _assert_async.msg _assert_scalar _assert_tensor_metadata sym_constrain_range "
        "sym_constrain_range_for_size"
    ).split()
)

_ATEN_NAME = re.compile(r"torch\.ops\.aten\.([A-Za-z][A-Za-z0-9_]*|_[a-z][A-Za-z0-9_]*|__[a-z]+__)\.([A-Za-z0-9_]+)")


def operator_named(target: str) -> Callable[..., Any]:
    """Return the function that a node calls.

    Raises:
        BundleError: If a file may not call it, or this torch does not have it.
    """
    found = _ON_SIZES.get(target)
    if found is not None:
        return found
    parts = target.split(".")
    if parts[:3] == ["torch", "ops", "higher_order"] and len(parts) == 4 and parts[3] in _ON_GRAPHS:
        return getattr(torch.ops.higher_order, parts[3])
    if target in _OF_PACKAGES or target in _OVER_RANKS:
        import_module(_OF_PACKAGES.get(target, "torch.distributed"))
        return getattr(getattr(getattr(torch.ops, parts[2]), parts[3]), parts[4])
    match = _ATEN_NAME.fullmatch(target)
    # The list is asked before the name is looked up, because attributes of Python objects are found as well.
    if match and f"{match[1]}.{match[2]}".removesuffix(".default") in _LISTED:
        packet = getattr(torch.ops.aten, match[1], None)
        if packet is not None and match[2] in packet.overloads():
            return getattr(packet, match[2])
    raise BundleError(
        f"a graph calls {target!r:.100}, which no program of ours may call (docs/security.md); do not trust this file, "
        "or export a model of your own that needs it for target 'aoti'"
    )


# -- Checks that some kernels of torch 2.13 leave out. Without them these read beyond their arguments, divide with a
# signal, or take any time.
_ATEN = torch.ops.aten
_ATTENTION = _ATEN.scaled_dot_product_attention.default
#: The most parts that one operator may cut a tensor into.
_MOST_PARTS = 1 << 16
_LARGEST_SCALE = 1e4

_Operator = Callable[..., Any]


def checked(called: _Operator) -> _Operator:
    """Return what a graph calls in place of an operator: the operator itself, if that checks its arguments."""
    if not isinstance(called, OpOverload):
        return called
    if is_sum(called):
        return _over_ranks
    replaced = _REPLACED.get(called)
    if replaced is not None:
        return replaced
    check = _CHECKS.get(called.overloadpacket)
    return called if check is None else _after(check, called)


def _after(check: Callable[[OpOverload, dict[str, Any]], None], called: OpOverload) -> _Operator:
    """Return an operator that is called after a check of its arguments, which the check takes by their names.

    The function keeps its own name and module. By those of the operator, generated code would call the operator itself.
    """
    names = [argument.name for argument in operator_arguments(called)]

    def checks_and_calls(*args: Any, **kwargs: Any) -> Any:
        check(called, {**dict(zip(names, args, strict=False)), **kwargs})
        return called(*args, **kwargs)

    return checks_and_calls


def _over_ranks(tensor: torch.Tensor, operation: str, group: str) -> torch.Tensor:
    if (operation, group) != ("sum", GROUP):
        raise ValueError(f"{operation!r:.40} over the processes {group!r:.80}, which are not those of the program")
    return sum_in_graph(tensor)


def _check_attention(called: OpOverload, given: dict[str, Any]) -> None:
    key, value = given["key"], given["value"]
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"attention over {key.shape[-2]} keys and {value.shape[-2]} values")


def _check_pad(called: OpOverload, given: dict[str, Any]) -> None:
    if given.get("mode", "constant") != "constant" and any(size < 0 for size in given["pad"]):
        raise ValueError(f"padding by {list(given['pad'])} with values of the tensor")


def _check_quotient(called: OpOverload, given: dict[str, Any]) -> None:
    """Refuse the least integer divided by -1, whose quotient no register holds: the processor sends SIGFPE."""
    dividend, divisor = given["self"], given["other"]
    if isinstance(divisor, int | float) and divisor != -1:
        return
    dtype = torch.result_type(dividend, divisor)
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return
    is_minus_one = torch.as_tensor(divisor) == -1
    if is_minus_one.any() and (is_minus_one & (torch.as_tensor(dividend) == torch.iinfo(dtype).min)).any():
        raise ValueError(f"{called} of {torch.iinfo(dtype).min} by -1 does not fit in {dtype}")


def _check_parts(called: OpOverload, given: dict[str, Any]) -> None:
    """Refuse to cut a tensor into more views than any program uses."""
    tensor, dim = given["self"], given.get("dim", 0)
    if not isinstance(tensor, torch.Tensor) or not -tensor.ndim <= dim < tensor.ndim:
        return  # torch says what is wrong
    whole, size = tensor.shape[dim], given.get("split_size", 1)
    parts = given.get("chunks", math.ceil(whole / size) if isinstance(size, int) and size > 0 else 1)
    if parts > _MOST_PARTS:
        raise ValueError(f"{called} gives {parts} parts, of at most {_MOST_PARTS}")


def _check_scales(called: OpOverload, given: dict[str, Any]) -> None:
    """Refuse extreme scales, because kernels compute the elements that they read from them."""
    for scale in given.get("scale_factors") or ():
        if not 1 / _LARGEST_SCALE <= scale <= _LARGEST_SCALE:
            raise ValueError(f"{called} by a scale of {scale}")


def _check_no_scales(called: OpOverload, given: dict[str, Any]) -> None:
    """Refuse scales together with a size: antialiased kernels compute an unchecked index of their weights from them."""
    if any(given.get(name) is not None for name in ("scales_h", "scales_w", "scale_factors")):
        raise ValueError(f"{called} must be given a size alone, got scales")


def _check_modes(called: OpOverload, given: dict[str, Any]) -> None:
    """Refuse invalid modes of a grid sampler, for which its kernels leave the result uninitialized."""
    modes = (given.get("interpolation_mode"), given.get("padding_mode"))
    if not all(mode in (0, 1, 2) for mode in modes):
        raise ValueError(f"{called} must be given modes from 0 to 2, got {modes}")


def _cleared(called: OpOverload) -> _Operator:
    """Return an operator with zeros in place of fresh memory, which may hold secrets, or bools of other bytes."""

    def zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
        return called(*args, **kwargs).zero_()

    return zeros


def _viewed(called: OpOverload) -> _Operator:
    """Return an operator whose views claim no more elements than a computer goes through in seconds."""

    def view(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        result = called(tensor, *args, **kwargs)
        for one, base in zip(result, tensor, strict=True) if isinstance(result, list) else ((result, tensor),):
            check_view(one.shape, base.numel())
        return result

    return view


def _weight_norm(direction: torch.Tensor, length: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Compute a weight norm by other operators, because torch's kernel does not check the number of lengths."""
    # -1 means the norm of the whole tensor, not the last dimension.
    others = None if dim == -1 else [one for one in range(direction.ndim) if one != dim]
    return direction * (length / torch.linalg.vector_norm(direction, dim=others, keepdim=True))


_CHECKS: dict[Any, Callable[[OpOverload, dict[str, Any]], None]] = {
    _ATEN.scaled_dot_product_attention: _check_attention,
    _ATEN.pad: _check_pad,
    **dict.fromkeys(
        (_ATEN.div, _ATEN.div_, _ATEN.floor_divide, _ATEN.floor_divide_, _ATEN.remainder, _ATEN.remainder_),
        _check_quotient,
    ),
    **dict.fromkeys((_ATEN.unbind, _ATEN.split, _ATEN.chunk), _check_parts),
    **dict.fromkeys(
        (
            _ATEN.upsample_linear1d,
            _ATEN.upsample_nearest1d,
            _ATEN.upsample_nearest2d,
            _ATEN.upsample_bilinear2d,
            _ATEN.upsample_bicubic2d,
        ),
        _check_scales,
    ),
    _ATEN.grid_sampler: _check_modes,
    **{getattr(_ATEN, name): _check_no_scales for name in ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")},
}
_REPLACED: dict[OpOverload, _Operator] = {
    _ATEN._weight_norm.default: _weight_norm,
    **{
        called: _cleared(called)
        for called in (_ATEN.empty.memory_format, _ATEN.empty_like.default, _ATEN.new_empty.default)
    },
    **{
        called: _viewed(called)
        for called in (
            _ATEN.expand.default,
            _ATEN.expand_as.default,
            _ATEN.broadcast_to.default,
            _ATEN.broadcast_tensors.default,
            _ATEN.unfold.default,
        )
    },
}


# -- Kinds of arguments. torch takes any number where a schema declares a dtype, layout or memory format, and crashes
# on one that is not valid. The file names the kind of every value, so the kind is compared with the schema before
# anything runs.
_INTS = frozenset({"as_int", "as_sym_int"})
_FLOATS = frozenset({"as_int", "as_float", "as_sym_int", "as_sym_float"})
_NUMBERS = _FLOATS | {"as_bool", "as_sym_bool"}

#: Kinds by the schema's type. A number is valid for a tensor (`add.Tensor(x, 2)`), and one int for a list of ints.
_KINDS: dict[str, frozenset[str]] = {
    "Tensor": frozenset({"as_tensor"}) | _NUMBERS,
    "int": _INTS,
    "float": _FLOATS,
    "number": _NUMBERS,
    "bool": frozenset({"as_bool", "as_sym_bool"}),
    "str": frozenset({"as_string"}),
    # What functional collectives call the type of their group's name.
    "Any": frozenset({"as_string"}),
    "ScalarType": frozenset({"as_scalar_type"}),
    "Layout": frozenset({"as_layout"}),
    "MemoryFormat": frozenset({"as_memory_format"}),
    "Device": frozenset({"as_device"}),
    "List[Tensor]": frozenset({"as_tensors"}),
    "List[Optional[Tensor]]": frozenset({"as_tensors", "as_optional_tensors"}),
    "List[int]": _INTS | {"as_ints", "as_sym_ints"},
    "List[float]": _FLOATS | {"as_floats", "as_sym_floats", "as_ints", "as_sym_ints"},
    "List[bool]": frozenset({"as_bool", "as_bools", "as_sym_bools"}),
}


def check_kind(called: Any, argument: Any, kind: str) -> None:
    """Check that a value of `kind`, such as "as_int", is valid for an argument of an operator's schema.

    Raises:
        ValueError: If it is not.
    """
    if kind not in _kinds(str(argument.real_type)):
        raise ValueError(f"{argument.name} of {called} must be {argument.real_type}, got {kind!r:.40}")


@functools.cache
def _kinds(type_: str) -> frozenset[str]:
    if type_.startswith("Optional["):
        inner = type_.removeprefix("Optional[").removesuffix("]")
        return _kinds(inner) | {"as_none"} | ({"as_optional_tensor"} if inner == "Tensor" else set())
    return _KINDS.get(type_, frozenset())
