"""What a graph of a `.pt2` may call: operators on tensors from a list, which check sizes and indices."""

from __future__ import annotations

import pytest
import torch

from exportable_cache.backends.pt2.checked import checked
from exportable_cache.backends.pt2.operators import operator_named
from exportable_cache.errors import BundleError

_REFUSED = """
    fbgemm_linear_fp16_weight.default fbgemm_pack_gemm_matrix_fp16.default max_unpool2d.default
    embedding_dense_backward.default max_pool2d_with_indices_backward.default _adaptive_avg_pool2d_backward.default
    sparse_coo_tensor.indices indices.default _indices.default values.default to_dense.default coalesce.default
    quantize_per_tensor.default dequantize.self mkldnn_linear.default to_mkldnn.default quantized_lstm.input
    add.out add.str sort.int index.list_int save.default warn.default manual_seed.default set_grad_enabled.default
    resize_.default set_.source_Tensor as_strided_.default _unsafe_index.Tensor _index_put_impl_.default
    _reshape_alias.default _reshape_alias_copy.default _native_batch_norm_legit.default
    _fft_r2c.default _fft_c2c.default _cdist_forward.default _embedding_bag.default embedding_bag.default
    __class__.__init__ __dict__.items
""".split()
_TAKEN = """
    linear.default matmul.default add.Tensor add_.Tensor mul.Scalar silu.default gelu.default softmax.int to.dtype
    scaled_dot_product_attention.default layer_norm.default rms_norm.default index_copy_.default index_put_.default
    index.Tensor item.default slice.Tensor view.default view.dtype where.self gather.default scatter.value
    one_hot.default split_with_sizes.default topk.default conv2d.padding upsample_bilinear2d.vec grid_sampler.default
    conv1d.default
    cumsum.default masked_fill_.Scalar bitwise_not.default __and__.Tensor __or__.Tensor _assert_scalar.default
    _assert_tensor_metadata.default sym_size.int histc.default floor_divide.default lift_fresh_copy.default
    _weight_norm.default sym_constrain_range_for_size.default fft_rfft.default
    repeat_interleave.self_int batch_norm.default
""".split()


@pytest.mark.parametrize("name", _REFUSED)
def test_operators_off_the_list_are_refused(name: str) -> None:
    with pytest.raises(BundleError, match="no program of ours may call"):
        operator_named(f"torch.ops.aten.{name}")


@pytest.mark.parametrize("name", _TAKEN)
def test_what_models_use_is_taken(name: str) -> None:
    packet, overload = name.split(".")
    assert operator_named(f"torch.ops.aten.{name}") is getattr(getattr(torch.ops.aten, packet), overload)


def test_nothing_that_writes_to_a_given_result_is_taken() -> None:
    taken = []
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if name.startswith("aten::"):
            try:
                taken.append(operator_named(f"torch.ops.aten.{packet}.{overload or 'default'}"))
            except BundleError:
                pass
    assert 500 < len(taken) < 1100
    assert not [one for one in taken if any(argument.is_out for argument in one._schema.arguments)]


def test_checks_that_torch_leaves_out() -> None:
    aten = torch.ops.aten
    query, keys, values = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 50, 8), torch.zeros(1, 2, 1, 8)
    with pytest.raises(ValueError, match="50 keys and 1 values"):
        checked(aten.scaled_dot_product_attention.default)(query, keys, values)
    assert checked(aten.scaled_dot_product_attention.default)(query, keys, keys, scale=1.0).shape == (1, 2, 3, 8)
    with pytest.raises(ValueError, match="padding"):
        checked(aten.replication_pad1d.default)(torch.zeros(1, 4, 4), [-4000, 9000])
    with pytest.raises(ValueError, match="padding"):
        checked(aten.pad.default)(torch.zeros(1, 4, 4), [-4000, 9000], "replicate")
    assert checked(aten.pad.default)(torch.zeros(1, 4, 4), [-1, 1]).shape == (1, 4, 4)


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_a_weight_norm_is_torchs_and_takes_no_sizes_on_trust(dim: int) -> None:
    """SpeechT5 has one."""
    weight_norm = torch.ops.aten._weight_norm.default
    direction = torch.randn(4, 3, 5)
    length = torch.rand([size if one == dim % 3 else 1 for one, size in enumerate(direction.shape)])
    assert torch.allclose(checked(weight_norm)(direction, length, dim), weight_norm(direction, length, dim))
    with pytest.raises(RuntimeError):
        checked(weight_norm)(direction, torch.rand(2), dim)
