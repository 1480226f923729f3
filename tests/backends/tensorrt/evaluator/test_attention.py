import pytest
import torch
from torch.nn import functional as F

from exportable_cache.errors import VerificationError

from .networks import LOG, assert_caught, assert_same, evaluate, random, trt

SOFTMAX, NONE = trt.AttentionNormalizationOp.SOFTMAX, trt.AttentionNormalizationOp.NONE


def attention(norm=SOFTMAX, causal=trt.CausalMaskKind.NONE, swap=False, drop_mask=False):
    def add(net, q, k, v, mask=None):
        if swap:
            k, v = v, k
        layer = net.add_attention_v2(q, k, v, norm, causal)
        layer.decomposable = True
        if mask is not None and not drop_mask:
            layer.mask = mask
        return layer

    return add


def operands(q=3, kv=7, heads=4, kv_heads=2, dtype=torch.float32):
    query, key, value = random(2, heads, q, 8, dtype=dtype), random(2, kv_heads, kv, 8, dtype=dtype, seed=1), random(
        2, kv_heads, kv, 8, dtype=dtype, seed=2
    )  # fmt: skip
    return query, key, value


def reference(query, key, value, mask=None, causal_offset=None):
    if causal_offset is not None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(causal_offset)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.float()
    output = F.scaled_dot_product_attention(
        query.float(), key.float(), value.float(), attn_mask=mask, scale=1.0, enable_gqa=True
    )
    return output.to(query.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_grouped_query_attention_with_an_additive_mask(dtype):
    query, key, value = operands(dtype=dtype)
    mask = random(2, 1, 3, 7, dtype=dtype, seed=3) * 2
    expected = reference(query, key, value, mask)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    assert_same(evaluate(attention(), query, key, value, mask), expected, tolerance)
    assert_caught(evaluate(attention(drop_mask=True), query, key, value), expected)
    assert_caught(evaluate(attention(swap=True), query, key, value, mask), expected)
    assert_caught(evaluate(attention(norm=NONE), query, key, value, mask), expected)


def test_query_heads_share_keys_in_consecutive_groups():
    query, key, value = operands()
    interleaved = reference(query, key.repeat(1, 2, 1, 1), value.repeat(1, 2, 1, 1))
    assert_caught(evaluate(attention(), query, key, value), interleaved)


def test_query_comes_scaled():
    query, key, value = operands()
    expected = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    assert_caught(evaluate(attention(), query, key, value), expected)
    assert_same(evaluate(attention(), query * 8**-0.5, key, value), expected)


def test_bool_mask_is_true_where_attention_is_allowed():
    query, key, value = operands()
    mask = torch.arange(7) <= torch.arange(3)[:, None] + 1
    expected = reference(query, key, value, mask)
    mask = mask.expand(1, 1, 3, 7).contiguous()
    assert_same(evaluate(attention(), query, key, value, mask), expected)
    assert_caught(evaluate(attention(), query, key, value, ~mask), expected)


@pytest.mark.parametrize(("kind", "offset"), [(trt.CausalMaskKind.UPPER_LEFT, 0), (trt.CausalMaskKind.LOWER_RIGHT, 4)])
def test_causal_masks_are_anchored_at_their_corner(kind, offset):
    query, key, value = operands()
    expected = reference(query, key, value, causal_offset=offset)
    assert_same(evaluate(attention(causal=kind), query, key, value), expected)
    other = {trt.CausalMaskKind.UPPER_LEFT: trt.CausalMaskKind.LOWER_RIGHT}.get(kind, trt.CausalMaskKind.UPPER_LEFT)
    assert_caught(evaluate(attention(causal=other), query, key, value), expected)
    assert_caught(evaluate(attention(), query, key, value), expected)


def test_dynamic_query_length():
    query, key, value = operands(q=5)
    mask = random(2, 1, 5, 7, seed=3)
    result = evaluate(attention(), query, key, value, mask, shapes={0: (2, 4, -1, 8), 3: (2, 1, -1, 7)})
    assert_same(result, reference(query, key, value, mask))


def test_mask_that_tensorrt_drops_beside_causal_is_dropped_here():
    """torch_tensorrt's converter can set both; TensorRT keeps the causal kind, and a line in its log is all that it
    says.
    """
    query, key, value = operands()
    mask = random(2, 1, 3, 7, seed=3)
    LOG.errors.clear()
    result = evaluate(attention(causal=trt.CausalMaskKind.LOWER_RIGHT), query, key, value, mask)
    assert "mask cannot be used together" in LOG.errors[0]
    assert_same(result, reference(query, key, value, causal_offset=4))
    assert_caught(result, reference(query, key, value, mask))


def test_key_value_lengths_are_refused():
    query, key, value = operands()
    lengths = torch.tensor([3, 5], dtype=torch.int32)

    def build(net, q, k, v, lengths):
        layer = net.add_attention_v2(q, k, v, SOFTMAX, trt.CausalMaskKind.NONE)
        layer.key_value_lengths = lengths
        return layer

    with pytest.raises(VerificationError, match="ATTENTION_INPUT.*key_value_lengths .* does not model"):
        evaluate(build, query, key, value, lengths)
