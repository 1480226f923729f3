import pytest
import torch

from .networks import assert_caught, assert_same, evaluate, random, trt

M = trt.MatrixOperation


def multiply(left, right):
    return lambda net, a, b: net.add_matrix_multiply(a, left, b, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("left", "right"), [(M.NONE, M.NONE), (M.TRANSPOSE, M.NONE), (M.NONE, M.TRANSPOSE)])
def test_matrix_multiply(left, right, dtype):
    a, b = random(2, 1, 4, 4, dtype=dtype), random(1, 3, 4, 4, dtype=dtype, seed=1)
    expected = ((a.mT if left == M.TRANSPOSE else a).float() @ (b.mT if right == M.TRANSPOSE else b).float()).to(dtype)
    assert_same(evaluate(multiply(left, right), a, b), expected)
    flipped = {M.NONE: M.TRANSPOSE, M.TRANSPOSE: M.NONE}
    assert_caught(evaluate(multiply(flipped[left], right), a, b), expected)
    assert_caught(evaluate(multiply(left, flipped[right]), a, b), expected)


def test_vectors():
    a, b, c = random(3, 4), random(4, seed=1), random(3, seed=2)
    assert_same(evaluate(multiply(M.NONE, M.VECTOR), a, b), a @ b)
    assert_same(evaluate(multiply(M.VECTOR, M.NONE), c, a), c @ a)
    assert_same(evaluate(multiply(M.VECTOR, M.VECTOR), b, random(4, seed=3)), b @ random(4, seed=3))
    square = random(4, 4)
    assert_caught(evaluate(multiply(M.TRANSPOSE, M.VECTOR), square, b), square @ b)


def test_products_of_half_precision_are_accumulated_in_float32():
    a = torch.ones(1, 4096, dtype=torch.float16)
    assert evaluate(multiply(M.NONE, M.TRANSPOSE), a, a).item() == 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_einsum(dtype):
    a, b = random(2, 3, 3, dtype=dtype), random(2, 3, 3, dtype=dtype, seed=1)
    expected = torch.einsum("bij,bkj->bik", a.float(), b.float()).to(dtype)
    assert_same(evaluate(lambda net, a, b: net.add_einsum([a, b], "bij,bkj->bik"), a, b), expected)
    assert_caught(evaluate(lambda net, a, b: net.add_einsum([a, b], "bij,bjk->bik"), a, b), expected)


def _rotate(interleaved: bool, dim: int):
    return lambda net, x, cos, sin: net.add_rotary_embedding(x, cos, sin, interleaved, dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotated", [4, 8])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding(interleaved, rotated, dtype):
    x, angles = random(2, 3, 5, 8, dtype=dtype), random(2, 5, rotated // 2, seed=1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    spread = (lambda table: table.repeat_interleave(2, -1)) if interleaved else (lambda table: table.repeat(1, 1, 2))
    part = x[..., :rotated].float()
    first, second = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    turned = torch.stack([-second, first], -1).flatten(-2) if interleaved else torch.cat([-second, first], -1)
    result = part * spread(cos.float())[:, None] + turned * spread(sin.float())[:, None]
    expected = torch.cat([result.to(dtype), x[..., rotated:]], -1)
    assert_same(
        evaluate(_rotate(interleaved, rotated % 8), x, cos, sin), expected, 1e-6 if dtype == torch.float32 else 1e-2
    )
    assert_caught(evaluate(_rotate(not interleaved, rotated % 8), x, cos, sin), expected)
    assert_caught(evaluate(_rotate(interleaved, rotated % 8), x, sin, cos), expected)
