"""Which form attention takes for TensorRT, and that both compute the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("exportable_cache.backends.tensorrt.upstream", reason="no tensorrt extra is installed")

from exportable_cache.attention import matmul_attention  # noqa: E402
from exportable_cache.backends.tensorrt import attention  # noqa: E402
from exportable_cache.backends.tensorrt.attention import tensorrt_attention  # noqa: E402
from exportable_cache.errors import UnsupportedModelError  # noqa: E402

from .toys import evaluate, toy_network  # noqa: E402

MANY = 1024


def operands(keys: int, dtype: torch.dtype = torch.float32, length: int = 1, value_dim: int = 64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, length, 64), (1, 2, keys, 64), (1, 2, keys, value_dim))
    query, key, value = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    mask = torch.where(torch.arange(keys) <= keys // 2, 0.0, torch.finfo(dtype).min).to(dtype).expand(1, 1, length, keys)
    return [query, key, value, mask.contiguous()]


def attend(*tensors: torch.Tensor) -> torch.Tensor:
    return tensorrt_attention(nn.Identity(), *tensors)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("keys", "length", "value_dim"), [(16, 1, 64), (MANY, 1, 64), (16, 5, 64), (16, 1, 32)])
def test_it_equals_plain_products(dtype: torch.dtype, keys: int, length: int, value_dim: int) -> None:
    tensors = operands(keys, dtype, length, value_dim)
    expected = matmul_attention(nn.Identity(), *[tensor.float() for tensor in tensors])[0]
    assert (attend(*tensors).float() - expected).abs().max() < (1e-5 if dtype == torch.float32 else 2e-3)


def test_one_half_precision_query_over_many_keys_builds_and_stays_tensorrts_attention() -> None:
    tensors = operands(MANY, torch.float16)
    network = toy_network(attend, tensors)
    assert network.layer_counts["ATTENTION_INPUT"] == 1
    assert len(network.build_plan()) > 0
    assert (evaluate(network, tensors) - attend(*tensors)).abs().max() < 2e-3


def test_the_builder_still_fails_on_it_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    # When this fails, the query need not be doubled any longer.
    monkeypatch.setattr(attention, "_MOST_KEYS_OF_ONE_QUERY", MANY)
    with pytest.raises(UnsupportedModelError, match="Expected 3 live inputs, got 4"):
        toy_network(attend, operands(MANY, torch.float16)).build_plan()
