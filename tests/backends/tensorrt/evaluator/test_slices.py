import pytest
import torch

from exportable_cache.errors import VerificationError

from .networks import assert_caught, assert_same, evaluate, random, trt

M = trt.SampleMode


def slice_(start, size, stride, mode=M.STRICT_BOUNDS, fill=None):
    def add(net, x):
        layer = net.add_slice(x, start, size, stride)
        layer.mode = mode
        if fill is not None:
            layer.set_input(4, net.constant(fill, torch.float32))
        return layer

    return add


def test_slice():
    x = random(3, 7)
    expected = x[1:3, 1:7:2]
    assert_same(evaluate(slice_((1, 1), (2, 3), (1, 2)), x), expected)
    for fault in (
        ((0, 1), (2, 3), (1, 2)),
        ((1, 0), (2, 3), (1, 2)),
        ((1, 1), (2, 3), (1, 1)),
        ((1, 1), (2, 2), (1, 2)),
    ):
        assert_caught(evaluate(slice_(*fault), x), expected)


def test_negative_stride():
    x = random(5)
    assert_same(evaluate(slice_((3,), (3,), (-1,)), x), x[[3, 2, 1]])
    assert_caught(evaluate(slice_((3,), (3,), (-1,)), x), x[[1, 2, 3]])


@pytest.mark.parametrize("offset", [0, 1])
def test_dynamic_start_and_size(offset):
    """The last rows from a start that is an input: start off by one must show."""
    x, start = random(6, 4), torch.tensor([2, 1])

    def build(net, x, start):
        moved = net.add_elementwise(start, net.constant([offset, 0]), trt.ElementWiseOperation.SUM).get_output(0)
        layer = net.add_slice(x, (), (), (1, 1))
        layer.set_input(1, moved)
        layer.set_input(2, net.constant([3, 3]))
        return layer

    result = evaluate(build, x, start)
    if offset == 0:
        assert_same(result, x[2:5, 1:4])
    else:
        assert_caught(result, x[2:5, 1:4])


def test_axes_name_the_dimensions():
    x = random(3, 4, 5)

    def build(axis):
        def add(net, x):
            layer = net.add_slice(x, (1,), (2,), (1,))
            layer.axes = (axis,)
            return layer

        return add

    assert_same(evaluate(build(2), x), x[:, :, 1:3])
    assert_caught(evaluate(build(1), x), x[:, :, 1:3])


@pytest.mark.parametrize(
    ("mode", "fill", "expected", "fault"),
    [
        (M.WRAP, None, [3, 4, 0, 1, 2, 3, 4, 0], M.CLAMP),
        (M.CLAMP, None, [0, 0, 0, 1, 2, 3, 4, 4], M.REFLECT),
        (M.REFLECT, None, [2, 1, 0, 1, 2, 3, 4, 3], M.WRAP),
        (M.FILL, 9.0, [9, 9, 0, 1, 2, 3, 4, 9], M.CLAMP),
    ],
)
def test_modes_outside_the_bounds(mode, fill, expected, fault):
    x, expected = torch.arange(5.0), torch.tensor(expected, dtype=torch.float32)
    assert_same(evaluate(slice_((-2,), (8,), (1,), mode, fill), x), expected)
    assert_caught(evaluate(slice_((-2,), (8,), (1,), fault), x), expected)


def test_bounds_are_strict_by_default():
    def build(net, x, start):
        layer = net.add_slice(x, (), (2,), (1,))
        layer.set_input(1, start)
        return layer

    with pytest.raises(VerificationError, match="reads index 5 of dimension 0, which has 5"):
        evaluate(build, random(5), torch.tensor([4]))
