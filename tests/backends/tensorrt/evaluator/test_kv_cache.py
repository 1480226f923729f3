import pytest
import torch

from exportable_cache.errors import VerificationError

from .networks import Net, assert_caught, assert_same, evaluate, random, trt


def update(net, cache, new, start):
    return net.add_kv_cache_update(cache, new, start, trt.KVCacheMode.LINEAR)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_are_written_at_their_own_start(dtype):
    cache, new = random(2, 3, 8, 4, dtype=dtype), random(2, 3, 2, 4, dtype=dtype, seed=1)
    start = torch.tensor([6, 1], dtype=torch.int32)
    expected = cache.clone()
    expected[0, :, 6:8], expected[1, :, 1:3] = new[0], new[1]
    before = cache.clone()
    assert_same(evaluate(update, cache, new, start, shapes={1: (2, 3, -1, 4)}), expected)
    assert torch.equal(cache, before)
    assert_caught(evaluate(update, cache, new, start - 1), expected)
    assert_caught(evaluate(update, cache, new, start.flip(0)), expected)
    assert_caught(evaluate(update, cache, new.flip(2), start), expected)


@pytest.mark.parametrize("start", [7, -1])
def test_write_out_of_bounds_is_an_error(start):
    with pytest.raises(VerificationError, match=f"writes 2 tokens at {start} into a cache of 8 slots"):
        evaluate(update, random(1, 3, 8, 4), random(1, 3, 2, 4), torch.tensor([start], dtype=torch.int32))


def network(read_cache=False):
    net = Net()
    cache, new = random(1, 2, 8, 4), random(1, 2, 1, 4)
    inputs = [
        net.input("cache", cache),
        net.input("new", new),
        net.input("start", torch.tensor([0], dtype=torch.int32)),
    ]
    outputs = [update(net, *inputs).get_output(0)]
    if read_cache:
        outputs.append(net.add_unary(inputs[0], trt.UnaryOperation.NEG).get_output(0))
    return net, outputs


def test_aliases_name_output_and_input():
    net, outputs = network()
    assert net.evaluator(*outputs).aliases == {"out0": "cache"}


def test_cache_that_something_else_reads_is_refused():
    net, outputs = network(read_cache=True)
    with pytest.raises(VerificationError, match=r"updates 'cache' in place while layer .* \(UNARY\) reads it"):
        net.evaluator(*outputs)


def test_update_that_is_no_network_output_is_refused():
    net, outputs = network()
    negated = net.add_unary(outputs[0], trt.UnaryOperation.NEG).get_output(0)
    with pytest.raises(VerificationError, match="not a network input, or whose update is not a network output"):
        net.evaluator(negated)
