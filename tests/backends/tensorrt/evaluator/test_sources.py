import pytest
import torch

from exportable_cache.backends.tensorrt.evaluator import NetworkEvaluator
from exportable_cache.errors import VerificationError

from .networks import Net, assert_caught, assert_same, evaluate, random, trt

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.int64, torch.bool])
def test_constant(dtype):
    values = random(2, 3).mul(4).to(dtype)
    net = Net()
    assert_same(net.evaluator(net.constant(values)).run({})["out0"], values)


def test_constant_of_other_values_shows():
    values = random(2, 3)
    net = Net()
    assert_caught(net.evaluator(net.constant(values.flip(0))).run({})["out0"], values)


def test_constant_keeps_its_values_when_the_memory_behind_it_changes():
    values = random(2, 3)
    net = Net()
    output = net.constant(values)
    evaluator = net.evaluator(output)
    expected = values.clone()
    values.zero_()
    assert_same(evaluator.run({})["out0"], expected)


def test_bfloat16_constant_needs_its_values():
    net = Net()
    net.mark_output(net.constant(random(2, dtype=torch.bfloat16), name="scale"))
    with pytest.raises(
        VerificationError, match=r"'scale' \(CONSTANT\) is of torch.bfloat16, .* pass it in `constants`"
    ):
        NetworkEvaluator(net.network)


def test_bfloat16_constant_under_torch_tensorrts_name():
    values = random(2, 3, dtype=torch.bfloat16)
    net = Net()
    net.mark_output(net.constant(values, name="scale"))
    (result,) = NetworkEvaluator(net.network, {"scale CONSTANT": values}).run({}).values()
    assert_same(result, values)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (random(3, 2, dtype=torch.bfloat16).T, "not contiguous"),
        (random(2, 2, dtype=torch.bfloat16), "has 6 values, `constants` has 4"),
        (random(2, 3), "holds 6 values of torch.float32"),
    ],
)
def test_bfloat16_constant_must_be_what_the_network_was_given(given, message):
    net = Net()
    net.mark_output(net.constant(random(2, 3, dtype=torch.bfloat16), name="scale"))
    with pytest.raises(VerificationError, match=message):
        NetworkEvaluator(net.network, {"scale": given})


def test_second_bfloat16_constant_of_a_name_loses_it_in_tensorrt_and_so_its_values():
    net = Net()
    net.constant(random(2, dtype=torch.bfloat16), name="scale")
    net.mark_output(net.constant(random(2, dtype=torch.bfloat16), name="scale"))
    with pytest.raises(VerificationError, match="Unnamed Layer.*pass it in `constants`"):
        NetworkEvaluator(net.network, {"scale": net.constants["scale"]})


def linspace(net, shape, alpha, beta, dtype=torch.int64):
    layer = net.add_fill(shape, trt.FillOperation.LINSPACE, {torch.int64: trt.int64, torch.float32: trt.float32}[dtype])
    layer.set_input(1, net.constant(alpha, dtype))
    layer.set_input(2, net.constant(beta, dtype))
    return layer


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_fill_counts_along_every_dimension(dtype):
    net = Net()
    result = net.evaluator(linspace(net, (2, 3), 3, [50, 5], dtype).get_output(0)).run({})["out0"]
    expected = torch.tensor([[3, 8, 13], [53, 58, 63]], dtype=dtype)
    assert_same(result, expected)
    net = Net()
    assert_caught(net.evaluator(linspace(net, (2, 3), 3, [5, 50], dtype).get_output(0)).run({})["out0"], expected)


def test_fill_with_numbers_and_a_dynamic_size():
    x = random(2, 5)

    def build(start):
        def add(net, x):
            size = net.add_slice(net.add_shape(x).get_output(0), (1,), (1,), (1,)).get_output(0)
            layer = net.add_fill((), trt.FillOperation.LINSPACE, trt.int64)
            layer.set_input(0, size)
            layer.alpha, layer.beta = start, 2
            return layer

        return add

    assert evaluate(build(4), x, shapes={0: (2, -1)}).tolist() == [4, 6, 8, 10, 12]
    assert evaluate(build(5), x, shapes={0: (2, -1)}).tolist() != [4, 6, 8, 10, 12]


def test_random_fill_is_refused():
    net = Net()
    with pytest.raises(
        VerificationError, match="has operation RANDOM_UNIFORM, which the reference evaluator does not model"
    ):
        net.evaluator(net.add_fill((2,), trt.FillOperation.RANDOM_UNIFORM, trt.float32).get_output(0))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.float32, torch.int64),
        (torch.float32, torch.bfloat16),
        (torch.bool, torch.int32),
        (torch.int64, torch.float16),
    ],
)
def test_cast(source, target):
    x = torch.tensor([[1.5, -2.7], [0.0, 2.5]]).to(source)
    kinds = {torch.int64: trt.int64, torch.bfloat16: trt.bfloat16, torch.int32: trt.int32, torch.float16: trt.float16}
    assert_same(evaluate(lambda net, x: net.add_cast(x, kinds[target]), x), x.to(target))


def test_cast_cuts_off_towards_zero_and_rounding_first_shows():
    x = torch.tensor([1.5, 2.5, -1.5, -2.7, 0.99])
    expected = torch.tensor([1, 2, -1, -2, 0])
    assert_same(evaluate(lambda net, x: net.add_cast(x, trt.int64), x), expected)

    def rounded(net, x):
        return net.add_cast(net.add_unary(x, trt.UnaryOperation.ROUND).get_output(0), trt.int64)

    assert_caught(evaluate(rounded, x), expected)


def test_cast_of_what_does_not_fit_is_an_error():
    with pytest.raises(VerificationError, match="casts values to torch.int32 that it cannot hold"):
        evaluate(lambda net, x: net.add_cast(x, trt.int32), torch.tensor([1, 2**40]))


def test_identity():
    x = random(2, 3)
    assert_same(evaluate(lambda net, x: net.add_identity(x), x), x)


@pytest.mark.parametrize("size", [5, 6])
def test_assertion(size):
    x = random(size)

    def build(net, x):
        wanted = net.constant([5])
        condition = net.add_elementwise(net.add_shape(x).get_output(0), wanted, trt.ElementWiseOperation.EQUAL)
        net.add_assertion(condition.get_output(0), "size must be 5")
        return net.add_identity(x)

    if size == 5:
        assert_same(evaluate(build, x, shapes={0: (-1,)}), x)
    else:
        with pytest.raises(VerificationError, match="does not hold: size must be 5"):
            evaluate(build, x, shapes={0: (-1,)})
