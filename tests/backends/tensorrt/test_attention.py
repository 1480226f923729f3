"""Which form attention takes for TensorRT, and that both compute the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("exportable_cache.backends.tensorrt.upstream", reason="no tensorrt extra is installed")

from exportable_cache.backends.tensorrt import kv_cache
from exportable_cache.backends.tensorrt.kv_cache import tensorrt_attention
from exportable_cache.cache.attention.functions import matmul_attention

from .toys import evaluate, toy_network

MANY = 1024


def operands(keys: int, dtype: torch.dtype = torch.float32, length: int = 1, value_dim: int = 64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, length, 64), (1, 2, keys, 64), (1, 2, keys, value_dim))
    query, key, value = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    mask = (
        torch.where(torch.arange(keys) <= keys // 2, 0.0, torch.finfo(dtype).min).to(dtype).expand(1, 1, length, keys)
    )
    return [query, key, value, mask.contiguous()]


def attend(*tensors: torch.Tensor) -> torch.Tensor:
    return tensorrt_attention(nn.Identity(), *tensors)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("keys", "length", "value_dim"),
    [(16, 1, 64), (MANY, 1, 64), (16, 5, 64), (16, 1, 32), (16, 5, 32), (MANY, 1, 32), (16, 5, 96)],
)
def test_it_equals_plain_products(dtype: torch.dtype, keys: int, length: int, value_dim: int) -> None:
    tensors = operands(keys, dtype, length, value_dim)
    expected = matmul_attention(nn.Identity(), *[tensor.float() for tensor in tensors])[0]
    assert (attend(*tensors).float() - expected).abs().max() < (1e-5 if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("keys", "length"), [(16, 1), (16, 5), (MANY, 1)])
def test_sinks_are_the_scores_of_a_slot_of_zeros(dtype: torch.dtype, keys: int, length: int) -> None:
    query, key, value, mask = operands(keys, dtype, length)
    sinks = torch.tensor([4.5, -1.0, 8.0, 6.0], dtype=dtype)
    key, value = (torch.nn.functional.pad(tensor, (0, 0, 0, 1)) for tensor in (key, value))
    given = [query, key[:, :, :-1], value[:, :, :-1], mask]
    expected = matmul_attention(nn.Identity(), *[tensor.float() for tensor in given], s_aux=sinks.float())[0]
    close = 1e-5 if dtype == torch.float32 else 2e-3
    # As a parameter of the module, and as logits of each query.
    for sink in ({"s_aux": sinks}, {"sinks": sinks[None, :, None, None].expand(1, 4, length, 1)}):
        assert (
            tensorrt_attention(nn.Identity(), query, key, value, mask, **sink)[0].float() - expected
        ).abs().max() < close
    without = matmul_attention(nn.Identity(), *[tensor.float() for tensor in given])[0]
    assert (without - expected).abs().max() > 0.05
    # A layer without the slot gets the plain form.
    plain = tensorrt_attention(nn.Identity(), *given, s_aux=sinks)[0]
    assert (plain.float() - expected).abs().max() < close


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("masked", "length"), [(True, 1), (True, 5), (False, 1)])
def test_a_position_bias_is_part_of_the_mask(
    dtype: torch.dtype, masked: bool, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No plain products are left, which the builder refuses for one query over a cache that a step only reads."""
    *tensors, mask = operands(16, dtype, length)
    bias = -torch.rand(1, 4, length, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    given = [*tensors, mask if masked else None]
    wide = [None if tensor is None else tensor.float() for tensor in given]
    expected, without = (matmul_attention(nn.Identity(), *wide, position_bias=one)[0] for one in (bias.float(), None))
    monkeypatch.setattr(kv_cache, "matmul_attention", None)
    close = 1e-5 if dtype == torch.float32 else 2e-3
    for one, of in ((bias, expected), *(((None, without),) if length == 1 else ())):
        assert (tensorrt_attention(nn.Identity(), *given, position_bias=one)[0].float() - of).abs().max() < close
    assert (expected - without).abs().max() > 0.05


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.full), torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "keys"), [("sinks", 16), ("sinks", MANY), ("short values", 16), ("short values", MANY)]
)
def test_sinks_and_short_values_build_in_the_form_of_other_attention(dtype: torch.dtype, kind: str, keys: int) -> None:
    tensors = operands(keys, dtype, value_dim=32 if kind == "short values" else 64)
    if kind == "sinks":
        tensors[1:3] = [torch.nn.functional.pad(tensor, (0, 0, 0, 1)) for tensor in tensors[1:3]]
        tensors.append(torch.tensor([0.5, -1.0, 4.0, 2.0], dtype=dtype))

    def attend(query, key, value, mask, sinks=None):
        return tensorrt_attention(nn.Identity(), query, key, value, mask, s_aux=sinks)[0]

    network = toy_network(attend, tensors)
    assert network.layer_counts.get("ATTENTION_INPUT", 0) == (dtype == torch.float32)
    assert len(network.build_plan()) > 0
    close = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert (evaluate(network, tensors) - attend(*tensors)).abs().max() < close


def test_what_values_lack_makes_no_infinite_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    plain = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        kv_cache.F,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: (seen.append(kwargs["attn_mask"]), plain(*args, **kwargs))[1],
    )
    tensors = operands(16, torch.float16, value_dim=32)
    attend(10 * tensors[0], 10 * tensors[1], *tensors[2:])
    assert seen[0].isfinite().all() and seen[0].min() == torch.finfo(torch.float16).min


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_kernels_of_16_bits_use_float32_for_scores_and_softmax(dtype: torch.dtype) -> None:
    """Read the source of a step's and a prompt's kernel in their plans, in which TensorRT-RTX stores it."""
    step, prompt = (source_of_attention(dtype, MANY, length) for length in (1, 16))
    assert "_gemv_mha_v1" in step and "_gemm_mha_v2" in prompt
    kind = {torch.float16: "half", torch.bfloat16: "bf16"}[dtype]
    assert "reduce<__myln_float, AddOp" in step and f"reduce<__myln_{kind}, AddOp" not in step
    name = {torch.float16: "DATA_TYPE_FP16", torch.bfloat16: "DATA_TYPE_BF16"}[dtype]
    assert f"initialize({name}, {name}, DATA_TYPE_FP32" in prompt


def source_of_attention(dtype: torch.dtype, keys: int, length: int) -> str:
    """Return the text in a plan of attention, after comparing the network with torch."""
    tensors = operands(keys, dtype, length)
    network = toy_network(attend, tensors)
    close = {torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert (evaluate(network, tensors) - attend(*tensors)).abs().max() < close
    return network.build_plan([80]).decode("latin1")
