"""TensorRT computes integers that become shapes itself, on the CPU: an oracle that is not our reading
of its documents.
"""

from __future__ import annotations

import pytest
import torch

from .networks import LOG, Net, trt

E, U, R, M = trt.ElementWiseOperation, trt.UnaryOperation, trt.ReduceOperation, trt.SampleMode
A, B = [7, -7, 7, -7, 6, 0], [2, 2, -2, -2, 3, 5]
_OFFSET = 1000


def computed_by_tensorrt(build):
    """A 1-D int64 tensor as TensorRT folds it: each element, made positive, becomes the size of a network tensor."""
    values = []
    count = len(computed_here(build))
    for index in range(count):
        net = Net()
        element = net.add_slice(build(net), (index,), (1,), (1,)).get_output(0)
        size = net.add_elementwise(element, net.constant([_OFFSET]), E.SUM).get_output(0)
        fill = net.add_fill((), trt.FillOperation.LINSPACE, trt.int64)
        fill.set_input(0, size)
        LOG.errors.clear()
        shape = fill.get_output(0).shape
        assert not LOG.errors, LOG.errors
        assert shape[0] >= 0, "not folded"
        values.append(shape[0] - _OFFSET)
    return values


def computed_here(build):
    net = Net()
    return net.evaluator(build(net)).run({})["out0"].tolist()


def elementwise(op, a=A, b=B):
    return lambda net: net.add_elementwise(net.constant(a), net.constant(b), op).get_output(0)


def chosen(op):
    def build(net):
        condition = net.add_elementwise(net.constant([1, 2, 3]), net.constant([2, 2, 2]), op).get_output(0)
        return net.add_select(condition, net.constant([7, 8, 9]), net.constant([1, 2, 3])).get_output(0)

    return build


def sampled(mode, start, size, stride):
    def build(net):
        layer = net.add_slice(net.constant([10, 20, 30, 40, 50]), (start,), (size,), (stride,))
        layer.mode = mode
        return layer.get_output(0)

    return build


def filled(net):
    layer = net.add_fill((2, 3), trt.FillOperation.LINSPACE, trt.int64)
    layer.set_input(1, net.constant(3))
    layer.set_input(2, net.constant([50, 5]))
    flat = net.add_shuffle(layer.get_output(0))
    flat.reshape_dims = (6,)
    return flat.get_output(0)


def counted(net):
    layer = net.add_fill((4,), trt.FillOperation.LINSPACE, trt.int64)
    layer.alpha, layer.beta = 3, 5
    return layer.get_output(0)


def shuffled(net):
    layer = net.add_shuffle(net.constant([[1, 2, 3], [4, 5, 6]]))
    layer.first_transpose = (1, 0)
    layer.reshape_dims = (0, -1)
    layer.second_transpose = (1, 0)
    flat = net.add_shuffle(layer.get_output(0))
    flat.reshape_dims = (6,)
    return flat.get_output(0)


CASES = {
    **{f"elementwise {op.name}": elementwise(op) for op in (E.DIV, E.FLOOR_DIV, E.PROD, E.SUB, E.SUM, E.MIN, E.MAX)},
    "elementwise POW": elementwise(E.POW, [7, -7, 2], [2, 3, 5]),
    **{f"comparison {op.name}": chosen(op) for op in (E.EQUAL, E.GREATER, E.LESS)},
    **{
        f"unary {op.name}": lambda net, op=op: net.add_unary(net.constant(A), op).get_output(0)
        for op in (U.NEG, U.ABS, U.SIGN)
    },
    "cast": lambda net: net.add_cast(net.constant([1.5, 2.5, -1.5, -2.7, 0.99], torch.float32), trt.int64).get_output(
        0
    ),
    "gather": lambda net: net.add_gather(net.constant([10, 20, 30]), net.constant([2, 0, -1]), 0).get_output(0),
    "gather elements": lambda net: net.add_gather_v2(
        net.constant([10, 20, 30]), net.constant([2, 0, 1]), trt.GatherMode.ELEMENT
    ).get_output(0),
    **{
        f"reduce {op.name}": lambda net, op=op: net.add_reduce(
            net.constant([[1, 2, -6], [4, 5, 1]]), op, 0b01, False
        ).get_output(0)
        for op in (R.SUM, R.PROD, R.MAX, R.MIN, R.AVG)
    },
    **{f"slice {mode.name}": sampled(mode, -2, 8, 1) for mode in (M.WRAP, M.CLAMP, M.REFLECT)},
    **{f"slice {mode.name} by 2": sampled(mode, -3, 6, 2) for mode in (M.WRAP, M.CLAMP, M.REFLECT)},
    "slice backwards": sampled(M.STRICT_BOUNDS, 3, 3, -1),
    "fill": filled,
    "fill with numbers": counted,
    "shuffle": shuffled,
}


@pytest.mark.parametrize("name", CASES)
def test_integers_come_out_as_in_tensorrt(name):
    assert computed_here(CASES[name]) == computed_by_tensorrt(CASES[name])


def test_the_oracle_is_independent():
    """What it says of the division is not what another rounding gives."""
    assert computed_by_tensorrt(elementwise(E.DIV, [-7], [2])) == [-3]
    assert computed_by_tensorrt(elementwise(E.FLOOR_DIV, [-7], [2])) == [-4]
