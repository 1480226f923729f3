import pytest
import torch

from exportable_cache.errors import VerificationError

from .networks import Net, assert_caught, assert_same, evaluate, random


def test_shape_at_a_length_never_seen_by_the_builder():
    for length in (4, 9):
        result = evaluate(lambda net, x: net.add_shape(x), random(2, length), shapes={0: (2, -1)})
        assert_same(result, torch.tensor([2, length]))


def shuffle(first=None, dims=None, second=None, placeholder=True):
    def add(net, x):
        layer = net.add_shuffle(x)
        layer.zero_is_placeholder = placeholder
        if first is not None:
            layer.first_transpose = first
        if dims is not None:
            layer.reshape_dims = dims
        if second is not None:
            layer.second_transpose = second
        return layer

    return add


@pytest.mark.parametrize(
    ("arguments", "reference", "fault"),
    [
        ({"dims": (6, 4)}, lambda x: x.reshape(6, 4), {"dims": (4, 6)}),
        ({"dims": (0, -1)}, lambda x: x.reshape(2, 12), {"dims": (-1, 0)}),
        ({"first": (2, 0, 1)}, lambda x: x.permute(2, 0, 1), {"first": (1, 2, 0)}),
        ({"second": (1, 0, 2)}, lambda x: x.permute(1, 0, 2), {}),
        ({"first": (1, 0, 2), "dims": (0, -1)}, lambda x: x.permute(1, 0, 2).reshape(3, 8), {"dims": (3, 8)}),
        (
            {"first": (0, 2, 1), "dims": (8, 3), "second": (1, 0)},
            lambda x: x.permute(0, 2, 1).reshape(8, 3).T,
            {"first": (0, 2, 1), "dims": (3, 8)},
        ),
    ],
)
def test_shuffle(arguments, reference, fault):
    x = random(2, 3, 4)
    assert_same(evaluate(shuffle(**arguments), x), reference(x))
    assert_caught(evaluate(shuffle(**fault), x), reference(x))


def test_shuffle_by_a_dynamic_shape():
    x = random(2, 3, 4)

    def build(order):
        def add(net, x):
            layer = net.add_shuffle(x)
            dims = net.add_gather(net.add_shape(x).get_output(0), net.constant(order), 0)
            layer.set_input(1, dims.get_output(0))
            return layer

        return add

    expected = x.reshape(4, 2, 3)
    assert_same(evaluate(build([2, 0, 1]), x, shapes={0: (-1, -1, 4)}), expected)
    assert_caught(evaluate(build([1, 0, 2]), x, shapes={0: (-1, -1, 4)}), expected)


def test_zero_without_placeholder_is_an_empty_dimension():
    empty = torch.zeros(0, 3)
    assert evaluate(shuffle(dims=(3, 0), placeholder=False), empty, shapes={0: (-1, 3)}).shape == (3, 0)


def test_unsqueeze_and_squeeze_count_negative_axes_from_the_end():
    x = random(2, 3)
    assert_same(evaluate(lambda net, x: net.add_unsqueeze(x, net.constant([0, -1])), x), x[None, :, :, None])
    assert_caught(evaluate(lambda net, x: net.add_unsqueeze(x, net.constant([0, 1])), x), x[None, :, :, None])
    y = random(2, 1, 3, 1)
    assert_same(evaluate(lambda net, y: net.add_squeeze(y, net.constant([-1])), y), y[..., 0])
    assert_caught(evaluate(lambda net, y: net.add_squeeze(y, net.constant([1])), y), y[..., 0])


def test_squeeze_of_a_dynamic_dimension_that_is_not_one_is_an_error():
    with pytest.raises(VerificationError, match=r"removes dimensions \[1\] of \[2, 3\]"):
        evaluate(lambda net, x: net.add_squeeze(x, net.constant([1])), random(2, 3), shapes={0: (2, -1)})


def test_concatenation():
    a, b = random(2, 3, 4), random(2, 5, 4, seed=1)

    def build(*order, axis=1):
        def add(net, *inputs):
            layer = net.add_concatenation([inputs[index] for index in order])
            layer.axis = axis
            return layer

        return add

    expected = torch.cat([a, b], 1)
    assert_same(evaluate(build(0, 1), a, b, shapes={0: (2, -1, 4)}), expected)
    assert_caught(evaluate(build(1, 0), a, b, shapes={0: (2, -1, 4)}), expected)
    c = random(2, 3, 4, seed=2)
    assert_caught(evaluate(build(0, 1, axis=2), a, c), torch.cat([a, c], 1))


def test_layers_are_found_whatever_their_order():
    net = Net()
    x = random(2, 3)
    source = net.input("in0", x, (2, -1))
    first = net.add_shuffle(source)
    dims = net.add_gather(net.add_shape(source).get_output(0), net.constant([1, 0]), 0)
    first.set_input(1, dims.get_output(0))
    names = [net.get_layer(index).name for index in range(net.num_layers)]
    assert names.index(first.name) < names.index(dims.name)
    assert_same(net.evaluator(first.get_output(0)).run({"in0": x})["out0"], x.reshape(3, 2))
