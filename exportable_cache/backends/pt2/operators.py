"""The functions that a graph of a `.pt2` file may call, by the names that torch writes.

torch resolves a name of a file by `getattr` from `torch`, `math` and `operator`, so that a file may call anything that
can be reached from there. Here a name is one of a list, or an operator on tensors that torch tags as core or
pointwise.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from ...common.compat import torch_distributed
from ...common.compat.torch import OpOverload, is_dispatched, operator_arguments, operator_results
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

#: Sums over the ranks of a program, see `checked`.
_OVER_RANKS = (torch_distributed.SUM, torch_distributed.WAIT)

#: Operators whose names begin with an underscore, which torch keeps for its own, are taken only if listed. Those that
#: leave the checks of sizes to the operator that calls them are not.
_INTERNAL = frozenset(
    "_adaptive_avg_pool2d _assert_async _assert_scalar _assert_tensor_metadata _conj _grouped_mm _int_mm _is_all_true "
    "_is_any_true _local_scalar_dense _log_softmax _pad_circular _prelu_kernel _safe_softmax _scaled_mm "
    "_shape_as_tensor _softmax _to_copy _unsafe_view _weight_int8pack_mm _weight_norm __and__ __or__ __xor__ "
    "__iand__ __ior__ __ixor__ __lshift__ __rshift__ __ilshift__ __irshift__".split()
)

#: What a graph asserts of sizes: operators without a tensor.
_WITHOUT_TENSORS = frozenset("_assert_scalar sym_constrain_range sym_constrain_range_for_size".split())

#: Operators that torch tags neither as core nor as pointwise, and models use: they check the sizes of what they are
#: given, and every index. Each stands for its form in place, too.
_LISTED = frozenset(
    (
        # products
        "linear matmul bmm baddbmm addmm addbmm addmv addr mm mv dot vdot outer ger inner einsum bilinear tensordot "
        "kron chain_matmul linalg_matmul linalg_multi_dot linalg_vecdot linalg_cross cross "
        # layers of networks
        "silu gelu relu relu6 softmax log_softmax softplus elu selu celu glu mish prelu log_sigmoid hardswish "
        "hardsigmoid hardtanh leaky_relu threshold special_softmax special_log_softmax special_expit "
        "layer_norm rms_norm group_norm batch_norm instance_norm cosine_similarity pairwise_distance cdist "
        "scaled_dot_product_attention dropout alpha_dropout feature_dropout embedding one_hot channel_shuffle "
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution "
        "pad constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
        "replication_pad3d pixel_shuffle pixel_unshuffle unfold im2col col2im "
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
        "upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
        "_upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa "
        "grid_sampler grid_sampler_2d grid_sampler_3d affine_grid_generator "
        "avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d max_pool1d_with_indices "
        "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d "
        "adaptive_max_pool3d "
        # shapes
        "view view_as view_copy reshape reshape_as transpose permute t numpy_T mT mH matrix_H adjoint flatten "
        "unflatten ravel chunk split split_with_sizes tensor_split unsafe_chunk unsafe_split unsafe_split_with_sizes "
        "hsplit vsplit dsplit narrow narrow_copy select slice unbind squeeze unsqueeze movedim moveaxis swapaxes "
        "swapdims expand expand_as broadcast_to broadcast_tensors repeat repeat_interleave tile roll flip fliplr "
        "flipud rot90 cat concat concatenate stack hstack vstack dstack column_stack row_stack block_diag meshgrid "
        "cartesian_prod atleast_1d atleast_2d atleast_3d as_strided diagonal diag diag_embed diagflat "
        "fill_diagonal diagonal_scatter select_scatter slice_scatter as_strided_scatter tril triu trace "
        "tril_indices triu_indices pad_sequence size stride dim numel sym_size sym_stride sym_numel "
        "sym_storage_offset sum_to_size "
        # elements by index
        "index index_select index_copy index_put index_add index_fill gather scatter scatter_add scatter_reduce "
        "masked_fill masked_scatter masked_select where take take_along_dim put nonzero nonzero_numpy "
        "argwhere "
        # order
        "topk sort msort argsort kthvalue bucketize searchsorted unique_consecutive unique_dim isin "
        # over dimensions
        "cumsum cumprod cummax cummin logcumsumexp diff sum nansum mean nanmean prod amax amin aminmax max min any "
        "all argmax argmin std std_mean var var_mean median nanmedian mode quantile nanquantile norm logsumexp "
        "special_logsumexp linalg_norm linalg_vector_norm linalg_matrix_norm frobenius_norm dist count_nonzero "
        "bincount histc renorm trapezoid cumulative_trapezoid "
        # elements
        "abs absolute arccos arccosh arcsin arcsinh arctan arctan2 arctanh clamp clip copysign divide fix "
        "floor_divide fill zero greater greater_equal less less_equal not_equal multiply negative subtract true_divide "
        "isclose allclose isreal is_nonzero nan_to_num addcmul addcdiv lerp logit special_erf special_erfc "
        "special_erfinv special_exp2 special_expm1 special_gammaln special_log1p special_logit special_round "
        "special_sinc special_digamma special_psi special_xlogy "
        # new tensors
        "arange linspace logspace range full zeros ones empty eye scalar_tensor full_like zeros_like ones_like "
        "empty_like rand_like randn_like randint randint_like "
        "new_empty new_empty_strided new_full new_zeros new_ones empty_permuted hann_window hamming_window "
        "blackman_window bartlett_window kaiser_window vander "
        # kinds and copies
        "item to type_as contiguous clone copy detach detach_copy alias alias_copy lift lift_fresh lift_fresh_copy "
        "real imag view_as_complex view_as_real complex polar conj resolve_conj resolve_neg is_floating_point "
        "is_complex is_same_size result_type "
        # spectra
        "fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn fft_rfft fft_rfft2 fft_rfftn fft_irfft fft_irfft2 "
        "fft_irfftn fft_hfft fft_ihfft fft_fftfreq fft_rfftfreq fft_fftshift fft_ifftshift stft istft "
        # matrices
        "linalg_inv linalg_inv_ex inverse linalg_solve linalg_solve_triangular linalg_cholesky linalg_cholesky_ex "
        "cholesky linalg_det det linalg_slogdet logdet linalg_diagonal linalg_matrix_power matrix_power "
        "linalg_matrix_exp matrix_exp"
    ).split()
)

#: Names that are never taken, whatever their tags: operators over files, storages and packed values, of training, and
#: those that take indices or sizes on trust.
_REFUSED = frozenset("from_file set set_data data resize resize_as as_strided_ record_stream pin_memory".split())
_REFUSED_PARTS = re.compile(r"backward|sparse|quantize|fbgemm|mkldnn|miopen|cudnn|nested|coalesce|unpool|embedding_bag")
_TAKES_NO = ("Storage", "Generator", "Stream", "Dimname", "__torch__")

_ATEN = re.compile(r"torch\.ops\.aten\.([A-Za-z][A-Za-z0-9_]*|_[a-z][A-Za-z0-9_]*|__[a-z]+__)\.([A-Za-z0-9_]+)")


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
    if target in _OF_PACKAGES or target in _OVER_RANKS:
        import_module(_OF_PACKAGES.get(target, "torch.distributed"))
        return getattr(getattr(getattr(torch.ops, parts[2]), parts[3]), parts[4])
    match = _ATEN.fullmatch(target)
    # Before the name is looked up, which gives attributes of Python objects as well.
    if match and not _is_refused(match[1]) and (not match[1].startswith("_") or _is_listed(match[1])):
        packet = getattr(torch.ops.aten, match[1], None)
        overload = getattr(packet, match[2], None) if match[2] in (packet.overloads() if packet else ()) else None
        if overload is not None and _is_taken(match[1], overload):
            return overload
    raise BundleError(
        f"a graph calls {target!r:.100}, which no program of ours may call (docs/security.md lists what may); "
        "do not trust this file"
    )


def _is_refused(name: str) -> bool:
    return name in _REFUSED or name.removesuffix("_") in _REFUSED or _REFUSED_PARTS.search(name) is not None


def _is_taken(name: str, overload: OpOverload) -> bool:
    if not (_is_listed(name) or _is_tagged(overload)):
        return False
    arguments = operator_arguments(overload)
    # TorchScript has functions of the same names on lists and texts, which are none of the dispatcher's.
    if any(argument.is_out for argument in arguments) or not is_dispatched(overload):
        return False
    types = [str(one.type) for one in arguments]
    if any(kind in type_ for type_ in types for kind in _TAKES_NO):
        return False
    types += [str(one.type) for one in operator_results(overload)]
    return name in _WITHOUT_TENSORS or any("Tensor" in type_ for type_ in types)


def _is_listed(name: str) -> bool:
    return name in _INTERNAL | _LISTED | _WITHOUT_TENSORS or (name.endswith("_") and name.removesuffix("_") in _LISTED)


def _is_tagged(overload: OpOverload) -> bool:
    return torch.Tag.core in overload.tags or torch.Tag.pointwise in overload.tags
