import pytest
import torch

from exportable_cache.errors import VerificationError

from .networks import assert_caught, assert_same, evaluate, random, trt

G, S = trt.GatherMode, trt.ScatterMode


def gather(mode, axis=0, leading=0):
    def add(net, x, index):
        layer = net.add_gather_v2(x, index, mode)
        layer.axis, layer.num_elementwise_dims = axis, leading
        return layer

    return add


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_gather_rows(dtype):
    x, index = random(2, 5, 3), torch.tensor([[4, 0], [2, 2]], dtype=dtype)
    expected = x[:, index.long()]
    assert_same(evaluate(gather(G.DEFAULT, 1), x, index), expected)
    assert_caught(evaluate(gather(G.DEFAULT, 2), random(2, 3, 5), index), expected)


def test_gather_of_a_scalar_index_drops_the_dimension():
    x = random(2, 5, 3)
    assert_same(evaluate(gather(G.DEFAULT, 1), x, torch.tensor(3)), x[:, 3])
    assert_caught(evaluate(gather(G.DEFAULT, 1), x, torch.tensor(4)), x[:, 3])
    assert_same(evaluate(gather(G.DEFAULT), x[0, :, 0], torch.tensor(3)), x[0, 3, 0])


def test_gather_rows_elementwise_over_the_batch():
    x, index = random(2, 5, 3), torch.tensor([[4, 0, 1], [2, 2, 3]])
    expected = torch.stack([x[row, index[row]] for row in range(2)])
    assert_same(evaluate(gather(G.DEFAULT, 1, leading=1), x, index), expected)
    assert_caught(evaluate(gather(G.DEFAULT, 1), x, index), expected)


def test_gather_elements():
    x, index = random(3, 4), torch.tensor([[2, 0, 1, 1], [0, 0, 2, 1]])
    assert_same(evaluate(gather(G.ELEMENT, 0), x, index), x.gather(0, index))
    assert_caught(evaluate(gather(G.ELEMENT, 1), x, index), x.gather(0, index))


def test_gather_tuples():
    x, index = random(3, 4, 2), torch.tensor([[[2, 1], [0, 3]], [[1, 1], [0, 0]]])
    expected = x[index[..., 0], index[..., 1]]
    assert_same(evaluate(gather(G.ND), x, index), expected)
    assert_caught(evaluate(gather(G.ND), x, index.flip(1)), expected)


def test_gather_tuples_elementwise_over_the_batch():
    x, index = random(2, 4, 3), torch.tensor([[[3], [0]], [[1], [2]]])
    expected = torch.stack([x[row, index[row, :, 0]] for row in range(2)])
    assert_same(evaluate(gather(G.ND, leading=1), x, index), expected)
    assert_caught(evaluate(gather(G.ND, leading=1), x, index.flip(0)), expected)


def test_index_beyond_the_dimension_is_an_error():
    with pytest.raises(VerificationError, match="uses index 5; -5 to 4 are defined"):
        evaluate(gather(G.DEFAULT), random(5), torch.tensor([5]))
    with pytest.raises(VerificationError, match="uses index -1; 0 to 4 are defined"):
        evaluate(gather(G.DEFAULT), random(5), torch.tensor([-1]), shapes={0: (-1,)})


def test_negative_index_of_a_static_dimension_counts_from_the_end():
    x = random(5)
    assert_same(evaluate(gather(G.DEFAULT), x, torch.tensor([-1, 0])), x[[4, 0]])


def scatter(mode, axis=0):
    def add(net, x, index, updates):
        layer = net.add_scatter(x, index, updates, mode)
        layer.axis = axis
        return layer

    return add


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_scatter_elements(dtype):
    x, updates = random(1, 2, 6, 3, dtype=dtype), random(1, 2, 2, 3, dtype=dtype, seed=1)
    index = torch.tensor([4, 5]).reshape(1, 1, 2, 1).expand(1, 2, 2, 3).contiguous()
    expected = x.scatter(2, index, updates)
    assert_same(evaluate(scatter(S.ELEMENT, 2), x, index, updates), expected)
    assert_caught(evaluate(scatter(S.ELEMENT, 2), x, index - 1, updates), expected)


def test_scatter_tuples():
    x, index, updates = random(3, 4, 2), torch.tensor([[2, 1], [0, 3]]), random(2, 2, seed=1)
    expected = x.index_put((index[:, 0], index[:, 1]), updates)
    assert_same(evaluate(scatter(S.ND), x, index, updates), expected)
    assert_caught(evaluate(scatter(S.ND), x, index, updates.flip(0)), expected)


def test_scatter_of_two_values_to_one_place_is_an_error():
    index = torch.tensor([1, 1])
    with pytest.raises(VerificationError, match="writes different values to one index"):
        evaluate(scatter(S.ELEMENT), random(3), index, torch.tensor([1.0, 2.0]))
    assert evaluate(scatter(S.ELEMENT), torch.zeros(3), index, torch.tensor([2.0, 2.0])).tolist() == [0, 2, 0]


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_one_hot(axis):
    index = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)

    def build(values, axis):
        def add(net, index):
            return net.add_one_hot(index, net.constant(values, torch.float32), net.constant(4, torch.int32), axis)

        return add

    expected = torch.nn.functional.one_hot(index.long(), 4).float().movedim(-1, axis) * 1.5 - 0.5
    assert_same(evaluate(build([-0.5, 1.0], axis), index), expected)
    assert_caught(evaluate(build([1.0, -0.5], axis), index), expected)


def test_non_zero():
    x = torch.tensor([[True, False, True], [False, True, False]])
    expected = torch.tensor([[0, 0, 1], [0, 2, 1]])

    def build(net, x):
        return net.add_cast(net.add_non_zero(x).get_output(0), trt.int64)

    assert_same(evaluate(build, x), expected)
    assert_caught(evaluate(build, ~x), expected)
