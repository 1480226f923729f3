import pytest
import torch
from torch.nn import functional as F

from exportable_cache.errors import VerificationError

from .networks import assert_caught, assert_same, evaluate, random, trt

E, U, A = trt.ElementWiseOperation, trt.UnaryOperation, trt.ActivationType
HALF = [torch.float32, torch.float16, torch.bfloat16]

BINARY = [
    (E.SUM, lambda a, b: a + b, E.SUB),
    (E.PROD, lambda a, b: a * b, E.DIV),
    (E.MAX, torch.maximum, E.MIN),
    (E.MIN, torch.minimum, E.MAX),
    (E.SUB, lambda a, b: a - b, E.SUM),
    (E.DIV, lambda a, b: a / b, E.PROD),
    (E.POW, lambda a, b: a.abs() ** b, E.PROD),
    (E.FLOOR_DIV, lambda a, b: torch.floor(a / b), E.DIV),
]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("op", "reference", "fault"), BINARY)
def test_arithmetic_of_floats(op, reference, fault, dtype):
    a, b = random(2, 3, 5, dtype=dtype), random(2, 1, 5, dtype=dtype, seed=1)
    if op == E.POW:
        a = a.abs()
    assert_same(evaluate(lambda net, a, b: net.add_elementwise(a, b, op), a, b), reference(a, b))
    assert_caught(evaluate(lambda net, a, b: net.add_elementwise(a, b, fault), a, b), reference(a, b))


def test_operands_are_not_swapped():
    a, b = random(2, 3), random(2, 3, seed=1)
    assert_caught(evaluate(lambda net, a, b: net.add_elementwise(b, a, E.SUB), a, b), a - b)


@pytest.mark.parametrize(
    ("op", "expected"), [(E.DIV, [3, -3, -3, 3]), (E.FLOOR_DIV, [3, -4, -4, 3]), (E.SUB, [5, -9, 9, -5])], ids=str
)
def test_division_of_integers_rounds_towards_zero_and_floor_division_down(op, expected):
    a, b = torch.tensor([7, -7, 7, -7]), torch.tensor([2, 2, -2, -2])
    assert evaluate(lambda net, a, b: net.add_elementwise(a, b, op), a, b).tolist() == expected


@pytest.mark.parametrize(
    ("op", "reference", "fault"),
    [(E.EQUAL, torch.eq, E.GREATER), (E.GREATER, torch.gt, E.LESS), (E.LESS, torch.lt, E.GREATER)],
)
def test_comparisons(op, reference, fault):
    a, b = torch.tensor([[1, 2, 3], [3, 2, 1]]), torch.tensor([[2, 2, 2]])
    assert_same(evaluate(lambda net, a, b: net.add_elementwise(a, b, op), a, b), reference(a, b))
    assert_caught(evaluate(lambda net, a, b: net.add_elementwise(a, b, fault), a, b), reference(a, b))


@pytest.mark.parametrize(
    ("op", "reference", "fault"),
    [(E.AND, torch.logical_and, E.OR), (E.OR, torch.logical_or, E.XOR), (E.XOR, torch.logical_xor, E.AND)],
)
def test_logic(op, reference, fault):
    a, b = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    assert_same(evaluate(lambda net, a, b: net.add_elementwise(a, b, op), a, b), reference(a, b))
    assert_caught(evaluate(lambda net, a, b: net.add_elementwise(a, b, fault), a, b), reference(a, b))


UNARY = [
    (U.EXP, torch.exp, U.LOG),
    (U.SQRT, torch.sqrt, U.RECIP),
    (U.LOG, torch.log, U.SQRT),
    (U.RECIP, torch.reciprocal, U.SQRT),
    (U.ABS, torch.abs, U.NEG),
    (U.NEG, torch.neg, U.ABS),
    (U.SIN, torch.sin, U.COS),
    (U.COS, torch.cos, U.SIN),
    (U.TAN, torch.tan, U.ATAN),
    (U.SINH, torch.sinh, U.COSH),
    (U.COSH, torch.cosh, U.SINH),
    (U.ASIN, torch.asin, U.ACOS),
    (U.ACOS, torch.acos, U.ASIN),
    (U.ATAN, torch.atan, U.TAN),
    (U.ASINH, torch.asinh, U.SINH),
    (U.ACOSH, torch.acosh, U.COSH),
    (U.ATANH, torch.atanh, U.ATAN),
    (U.CEIL, torch.ceil, U.FLOOR),
    (U.FLOOR, torch.floor, U.CEIL),
    (U.ERF, torch.erf, U.EXP),
    (U.SIGN, torch.sign, U.NEG),
    (U.ROUND, torch.round, U.CEIL),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("op", "reference", "fault"), UNARY)
def test_unary(op, reference, fault, dtype):
    x = torch.tensor([[0.5, 0.25, 0.9], [0.125, 0.75, 0.6]], dtype=dtype)
    if op == U.ACOSH:
        x = x + 1
    if op in (U.ROUND, U.SIGN, U.CEIL, U.FLOOR, U.NEG, U.ABS):
        x = torch.tensor([-2.5, -0.5, 0.0, 0.5, 1.5, 2.6], dtype=dtype)
    assert_same(evaluate(lambda net, x: net.add_unary(x, op), x), reference(x))
    assert_caught(evaluate(lambda net, x: net.add_unary(x, fault), x).nan_to_num(9.0), reference(x))


def test_not_infinite_and_not_a_number():
    x = torch.tensor([1.0, float("inf"), -float("inf"), float("nan")])
    assert evaluate(lambda net, x: net.add_unary(x, U.ISINF), x).tolist() == [False, True, True, False]
    assert evaluate(lambda net, x: net.add_unary(x, U.ISNAN), x).tolist() == [False, False, False, True]
    assert evaluate(lambda net, x: net.add_unary(x, U.NOT), torch.tensor([True, False])).tolist() == [False, True]


ACTIVATIONS = [
    (A.RELU, 0, 0, F.relu, A.SIGMOID),
    (A.SIGMOID, 0, 0, torch.sigmoid, A.TANH),
    (A.TANH, 0, 0, torch.tanh, A.SIGMOID),
    (A.LEAKY_RELU, 0.3, 0, lambda x: F.leaky_relu(x, 0.3), A.RELU),
    (A.ELU, 0.7, 0, lambda x: F.elu(x, 0.7), A.RELU),
    (A.SELU, 1.5, 1.1, lambda x: 1.1 * F.elu(x, 1.5), A.ELU),
    (A.SOFTSIGN, 0, 0, F.softsign, A.TANH),
    (A.SOFTPLUS, 0.5, 2.0, lambda x: F.softplus(x, beta=2.0), A.RELU),
    (A.CLIP, -0.4, 0.8, lambda x: x.clamp(-0.4, 0.8), A.HARD_SIGMOID),
    (A.HARD_SIGMOID, 1 / 6, 0.5, F.hardsigmoid, A.CLIP),
    (A.SCALED_TANH, 1.7, 0.6, lambda x: 1.7 * torch.tanh(0.6 * x), A.TANH),
    (A.THRESHOLDED_RELU, 0.6, 0, lambda x: F.threshold(x, 0.6, 0), A.RELU),
    (A.GELU_ERF, 0, 0, F.gelu, A.RELU),
    (A.GELU_TANH, 0, 0, lambda x: F.gelu(x, approximate="tanh"), A.RELU),
]


@pytest.mark.parametrize(("kind", "alpha", "beta", "reference", "fault"), ACTIVATIONS)
def test_activation(kind, alpha, beta, reference, fault):
    x = random(3, 7)

    def build(kind):
        def add(net, x):
            layer = net.add_activation(x, kind)
            layer.alpha, layer.beta = alpha, beta
            return layer

        return add

    assert_same(evaluate(build(kind), x), reference(x), tolerance=2e-6)
    assert_caught(evaluate(build(fault), x), reference(x))


def test_activation_of_half_precision_is_rounded_once():
    x = random(3, 7, dtype=torch.bfloat16)
    expected = F.gelu(x.float(), approximate="tanh").to(torch.bfloat16)
    assert torch.equal(evaluate(lambda net, x: net.add_activation(x, A.GELU_TANH), x), expected)


def test_select():
    condition, a, b = torch.tensor([[True], [False]]), random(2, 3), random(2, 3, seed=1)
    expected = torch.where(condition, a, b)
    assert_same(evaluate(lambda net, c, a, b: net.add_select(c, a, b), condition, a, b), expected)
    assert_caught(evaluate(lambda net, c, a, b: net.add_select(c, b, a), condition, a, b), expected)


def test_mixed_dtypes_are_refused():
    a, b = random(2, 3), random(2, 3, dtype=torch.float16)
    with pytest.raises(VerificationError, match="mixes torch.float16 and torch.float32|could not infer"):
        evaluate(lambda net, a, b: net.add_elementwise(a, b, E.SUM), a, b)
