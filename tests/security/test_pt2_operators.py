"""What a graph of a `.pt2` may call: operators on tensors from a list, which check sizes and indices."""

from __future__ import annotations

import pytest
import torch

from exportable_cache.backends.pt2.operators import checked, operator_named
from exportable_cache.errors import BundleError

from .operators import callable_targets

_REFUSED = """
    fbgemm_linear_fp16_weight.default fbgemm_pack_gemm_matrix_fp16.default max_unpool2d.default
    embedding_dense_backward.default max_pool2d_with_indices_backward.default _adaptive_avg_pool2d_backward.default
    sparse_coo_tensor.indices indices.default _indices.default values.default to_dense.default coalesce.default
    quantize_per_tensor.default dequantize.self mkldnn_linear.default to_mkldnn.default quantized_lstm.input
    add.out add.str sort.int index.list_int save.default warn.default manual_seed.default set_grad_enabled.default
    _weight_int8pack_mm.default range.step range.default lcm.default gcd.default as_strided.default view.dtype
    _upsample_bilinear2d_aa.out upsample_nearest2d.default upsample_bilinear2d.default linalg_lu_factor.default
    fmod.Scalar rand.default bernoulli.default
    resize_.default set_.source_Tensor as_strided_.default _unsafe_index.Tensor _index_put_impl_.default
    _reshape_alias.default _reshape_alias_copy.default _native_batch_norm_legit.default
    _fft_r2c.default _fft_c2c.default _cdist_forward.default _embedding_bag.default embedding_bag.default
    __class__.__init__ __dict__.items
""".split()
_TAKEN = """
    linear.default matmul.default add.Tensor add_.Tensor mul.Scalar silu.default gelu.default softmax.int to.dtype
    scaled_dot_product_attention.default layer_norm.default rms_norm.default index_copy_.default index_put_.default
    index.Tensor item.default slice.Tensor view.default where.self gather.default scatter.value
    one_hot.default split_with_sizes.default topk.default conv2d.padding upsample_bilinear2d.vec
    conv1d.default cumsum.default masked_fill_.Scalar bitwise_not.default __and__.Tensor __or__.Tensor
    _assert_scalar.default _assert_tensor_metadata.default sym_size.int histc.default floor_divide.default
    lift_fresh_copy.default _weight_norm.default sym_constrain_range_for_size.default repeat_interleave.self_int
    batch_norm.default
""".split()


@pytest.mark.parametrize("name", _REFUSED)
def test_operators_off_the_list_are_refused(name: str) -> None:
    with pytest.raises(BundleError, match="no program of ours may call"):
        operator_named(f"torch.ops.aten.{name}")


@pytest.mark.parametrize("name", _TAKEN)
def test_what_models_use_is_taken(name: str) -> None:
    packet, overload = name.split(".")
    assert operator_named(f"torch.ops.aten.{name}") is getattr(getattr(torch.ops.aten, packet), overload)


def test_every_operator_of_the_list_exists_and_writes_to_no_given_result() -> None:
    taken = [operator_named(target) for target in callable_targets()]
    assert 300 < len(taken) < 450
    assert not [one for one in taken if any(argument.is_out for argument in one._schema.arguments)]


def test_checks_that_torch_leaves_out() -> None:
    aten = torch.ops.aten
    query, keys, values = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 50, 8), torch.zeros(1, 2, 1, 8)
    with pytest.raises(ValueError, match="50 keys and 1 values"):
        checked(aten.scaled_dot_product_attention.default)(query, keys, values)
    assert checked(aten.scaled_dot_product_attention.default)(query, keys, keys, scale=1.0).shape == (1, 2, 3, 8)
    with pytest.raises(ValueError, match="padding"):
        checked(aten.pad.default)(torch.zeros(1, 4, 4), [-4000, 9000], "replicate")
    assert checked(aten.pad.default)(torch.zeros(1, 4, 4), [-1, 1]).shape == (1, 4, 4)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "name",
    "div.Tensor_mode div.Scalar_mode div_.Scalar_mode floor_divide.default floor_divide_.Tensor remainder.Tensor "
    "remainder.Scalar remainder_.Scalar".split(),
)
def test_the_least_integer_divided_by_minus_one(name: str, dtype: torch.dtype) -> None:
    """The processor would send SIGFPE."""
    called = checked(operator_named(f"torch.ops.aten.{name}"))
    least = torch.iinfo(dtype).min
    options = {"rounding_mode": "floor"} if "mode" in name else {}
    divisor = torch.tensor([3, -1], dtype=dtype) if "Tensor" in name or "default" in name else -1
    with pytest.raises(ValueError, match=f"of {least} by -1 does not fit"):
        called(torch.tensor([5, least], dtype=dtype), divisor, **options)
    for dividend in (torch.tensor([5, 7], dtype=dtype), torch.tensor([-1.5, float(least)])):
        right = operator_named(f"torch.ops.aten.{name}")(dividend.clone(), divisor, **options)
        assert torch.equal(called(dividend.clone(), divisor, **options), right)


def test_scales_of_upsampling() -> None:
    """Kernels compute from them which elements they read."""
    aten = torch.ops.aten
    image = torch.ones(1, 1, 8, 8)
    for scale in (1e-5, 1e300, float("nan"), -1.0):
        with pytest.raises(ValueError, match="by a scale of"):
            checked(aten.upsample_nearest2d.vec)(image, None, [2.0, scale])
        with pytest.raises(ValueError, match="a size alone, got scales"):
            checked(aten._upsample_bilinear2d_aa.default)(image, [16, 16], False, scale, None)
        with pytest.raises(ValueError, match="a size alone, got scales"):
            checked(aten._upsample_bicubic2d_aa.vec)(image, None, False, scale_factors=[scale, scale])
    with pytest.raises(ValueError, match="modes from 0 to 2, got"):
        checked(aten.grid_sampler.default)(image, torch.zeros(1, 2, 2, 2), 7, 0, False)
    assert checked(aten.grid_sampler.default)(image, torch.zeros(1, 2, 2, 2), 2, 1, False).shape == (1, 1, 2, 2)
    assert checked(aten.upsample_nearest2d.vec)(image, None, [2.0, 2.0]).shape == (1, 1, 16, 16)
    assert checked(aten._upsample_bilinear2d_aa.vec)(image, [4, 4], False, None).shape == (1, 1, 4, 4)


def test_views_that_take_no_memory_have_a_limit() -> None:
    aten = torch.ops.aten
    one = torch.zeros(1)
    assert checked(aten.expand.default)(one, [3, 1]).shape == (3, 1)
    assert checked(aten.broadcast_tensors.default)([one, torch.zeros(2, 1)])[0].shape == (2, 1)
    wide = one.expand(2**31)
    for called in (
        lambda: checked(aten.expand.default)(one, [2**40]),
        lambda: checked(aten.expand.default)(wide, [4, -1]),
        lambda: checked(aten.expand_as.default)(one, one.expand(2**33)),
        lambda: checked(aten.broadcast_tensors.default)([wide, torch.zeros(8, 1)]),
        lambda: checked(aten.unfold.default)(wide, 0, 1000, 1),
    ):
        with pytest.raises(ValueError, match="must have at most 4294967296"):
            called()


def test_a_tensor_is_cut_into_so_many_parts() -> None:
    aten = torch.ops.aten
    many = torch.zeros(1).expand(2**20)
    assert len(checked(aten.chunk.default)(torch.zeros(2, 8), 4, 1)) == 4
    assert len(checked(aten.split.Tensor)(many, 2**19)) == 2
    for called in (
        lambda: checked(aten.unbind.int)(many),
        lambda: checked(aten.split.Tensor)(many, 2),
        lambda: checked(aten.chunk.default)(many, 2**18),
    ):
        with pytest.raises(ValueError, match="parts, of at most 65536"):
            called()


def test_fresh_memory_is_cleared() -> None:
    """It may hold secrets; and a bool of another byte counts as that many elements."""
    aten = torch.ops.aten
    for _ in range(5):
        torch.full((4096,), 255, dtype=torch.uint8)
        assert not checked(aten.empty.memory_format)([4096], dtype=torch.bool).view(torch.uint8).any()
        assert not checked(aten.new_empty.default)(torch.zeros(1), [1024]).any()
        assert not checked(aten.empty_like.default)(torch.zeros(1024)).any()


def test_generated_code_calls_what_is_checked() -> None:
    """Code of torch.fx calls a function by its module and name, if that module is torch's."""
    for target in callable_targets():
        operator = operator_named(target)
        if checked(operator) is not operator:
            graph = torch.fx.Graph()
            graph.call_function(checked(operator), ())
            assert "torch.ops" not in graph.python_code("self").src, target
    for name in ("_operator.add", "torch.sym_min", "math.trunc"):
        graph = torch.fx.Graph()
        graph.call_function(operator_named(name), ())
        assert name.split(".")[1] + "(" not in graph.python_code("self").src


@pytest.mark.parametrize("numbers", [([1], 10**9), ("%999999999d", 5), (2**62, 2**63), (torch.zeros(2), 1)])
def test_arithmetic_on_sizes_takes_numbers(numbers: tuple) -> None:
    for name in ("mul", "mod", "add"):
        with pytest.raises(ValueError, match="must be a number|must fit in 64 bits"):
            operator_named(f"_operator.{name}")(*numbers)
    assert operator_named("_operator.mul")(3, 4) == 12
    assert operator_named("torch.sym_min")(3, 4) == 3


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_a_weight_norm_is_torchs_and_takes_no_sizes_on_trust(dim: int) -> None:
    """SpeechT5 has one."""
    weight_norm = torch.ops.aten._weight_norm.default
    direction = torch.randn(4, 3, 5)
    length = torch.rand([size if one == dim % 3 else 1 for one, size in enumerate(direction.shape)])
    assert torch.allclose(checked(weight_norm)(direction, length, dim), weight_norm(direction, length, dim))
    with pytest.raises(RuntimeError):
        checked(weight_norm)(direction, torch.rand(2), dim)


@pytest.mark.parametrize(("base", "exponent"), [(2**33, 2), (3, 17)])
def test_powers_that_take_long_to_compute_are_refused(base: int, exponent: int) -> None:
    power = operator_named("_operator.pow")
    assert power(3, 16) == 3**16
    with pytest.raises(ValueError, match=r"\*\*"):
        power(base, exponent)
