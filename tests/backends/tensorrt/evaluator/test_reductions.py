import pytest
import torch
from torch.nn import functional as F

from exportable_cache.errors import VerificationError

from .networks import assert_caught, assert_same, evaluate, random, trt

R = trt.ReduceOperation

REDUCTIONS = [
    (R.SUM, lambda x, d, k: x.sum(d, k), R.AVG),
    (R.AVG, lambda x, d, k: x.mean(d, k), R.SUM),
    (R.MAX, lambda x, d, k: x.amax(d, k), R.MIN),
    (R.MIN, lambda x, d, k: x.amin(d, k), R.MAX),
]


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(("op", "reference", "fault"), REDUCTIONS)
def test_reduce(op, reference, fault, keep):
    x = random(2, 3, 5)
    expected = reference(x, (0, 2), keep)
    assert_same(evaluate(lambda net, x: net.add_reduce(x, op, 0b101, keep), x), expected)
    assert_caught(evaluate(lambda net, x: net.add_reduce(x, fault, 0b101, keep), x), expected)
    assert_caught(evaluate(lambda net, x: net.add_reduce(x, op, 0b110, keep), x), expected)


def test_reduce_by_product():
    x = random(2, 3, 5)
    expected = x.prod(0).prod(0)
    assert_same(evaluate(lambda net, x: net.add_reduce(x, R.PROD, 0b011, False), x), expected)
    assert_caught(evaluate(lambda net, x: net.add_reduce(x, R.SUM, 0b011, False), x), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_half_precision_are_kept_in_float32(dtype):
    x = torch.full((1, 4096), 1.0, dtype=dtype)
    assert evaluate(lambda net, x: net.add_reduce(x, R.SUM, 0b10, False), x).item() == 4096


def test_integers_stay_integers():
    x = torch.tensor([[1, 2], [2, 3]], dtype=torch.int32)
    assert_same(
        evaluate(lambda net, x: net.add_reduce(x, R.SUM, 0b10, False), x), torch.tensor([3, 5], dtype=torch.int32)
    )


@pytest.mark.parametrize("op", [trt.TopKOperation.MAX, trt.TopKOperation.MIN])
def test_topk(op):
    x = random(3, 7)
    values, indices = x.topk(3, 1, largest=op == trt.TopKOperation.MAX)

    def build(k, axes, op=op):
        def add(net, x):
            layer = net.add_topk(x, op, k, axes)
            return layer.get_output(0), layer.get_output(1)

        return add

    found, places = evaluate(build(3, 0b10), x)
    assert_same(found, values)
    assert_same(places, indices.to(torch.int32))
    other = trt.TopKOperation.MIN if op == trt.TopKOperation.MAX else trt.TopKOperation.MAX
    assert_caught(evaluate(build(3, 0b10, other), x)[0], values)
    assert_caught(evaluate(build(3, 0b01), x)[0], values)


def test_topk_of_a_k_that_is_a_tensor():
    x = random(3, 7)

    def build(net, x):
        layer = net.add_topk(x, trt.TopKOperation.MAX, 1, 0b10)
        layer.set_input(1, net.constant(2, torch.int32))
        return layer

    assert_same(evaluate(build, x), x.topk(2, 1).values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_softmax(dtype):
    x = random(2, 3, 5, dtype=dtype)
    expected = x.float().softmax(1).to(dtype)

    def build(axes):
        def add(net, x):
            layer = net.add_softmax(x)
            layer.axes = axes
            return layer

        return add

    assert_same(evaluate(build(0b010), x), expected)
    assert_caught(evaluate(build(0b100), x), expected)


@pytest.mark.parametrize(("exclusive", "reverse"), [(False, False), (True, False), (False, True), (True, True)])
def test_cumulative(exclusive, reverse):
    x = random(2, 5)
    terms = torch.ones(5, 5).tril(-1 if exclusive else 0)
    expected = x @ (terms if reverse else terms.T)

    def build(exclusive, reverse, axis=1):
        def add(net, x):
            return net.add_cumulative(x, net.constant(axis), trt.CumulativeOperation.SUM, exclusive, reverse)

        return add

    assert_same(evaluate(build(exclusive, reverse), x), expected)
    for fault in ((not exclusive, reverse), (exclusive, not reverse), (exclusive, reverse, 0)):
        assert_caught(evaluate(build(*fault), x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_normalization(dtype):
    x, scale, bias = random(2, 3, 6, dtype=dtype), random(6, dtype=dtype, seed=1), random(6, dtype=dtype, seed=2)
    expected = F.layer_norm(x.float(), (6,), scale.float(), bias.float(), eps=1e-3).to(dtype)

    def build(axes, epsilon, swap=False):
        def add(net, x, scale, bias):
            layer = net.add_normalization(x, *((bias, scale) if swap else (scale, bias)), axes)
            layer.epsilon = epsilon
            return layer

        return add

    operands = x, scale.reshape(1, 1, 6), bias.reshape(1, 1, 6)
    assert_same(evaluate(build(0b100, 1e-3), *operands), expected, tolerance=1e-6 if dtype == torch.float32 else 1e-2)
    for fault in ((0b110, 1e-3), (0b100, 1.0), (0b100, 1e-3, True)):
        assert_caught(evaluate(build(*fault), *operands), expected)


def test_normalization_in_groups_is_refused():
    def build(net, x, scale, bias):
        layer = net.add_normalization(x, scale, bias, 0b1100)
        layer.num_groups = 2
        return layer

    with pytest.raises(VerificationError, match="has num_groups 2, which the reference evaluator does not model"):
        evaluate(build, random(2, 4, 3, 3), random(1, 2, 1, 1), random(1, 2, 1, 1))
