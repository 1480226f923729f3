import weakref

import pytest
import torch

from exportable_cache.backends.tensorrt.evaluator import NetworkEvaluator
from exportable_cache.backends.tensorrt.evaluator.layer import KINDS, LayerKind
from exportable_cache.errors import InputError, VerificationError

from .networks import LOG, Net, assert_same, evaluate, random, trt

SUM = trt.ElementWiseOperation.SUM


def sum_network():
    net = Net()
    a, b = random(2, 3), random(2, 3, seed=1)
    output = net.add_elementwise(net.input("a", a, (2, -1)), net.input("b", b, (2, -1)), SUM).get_output(0)
    return net.evaluator(output), a, b


def test_runs_at_any_size_and_again():
    evaluator, a, b = sum_network()
    for size in (3, 1, 2):
        assert_same(evaluator.run({"a": a[:, :size], "b": b[:, :size]})["out0"], a[:, :size] + b[:, :size])
    assert evaluator.layer_counts == {"ELEMENTWISE": 1}
    assert evaluator.aliases == {}


def test_two_evaluators_of_one_network_read_the_same():
    """An activation's `type` hides its layer's: the second reading must still find the kind."""
    net = Net()
    x = random(2, 3)
    output = net.add_activation(net.input("x", x), trt.ActivationType.TANH).get_output(0)
    layer = net.get_layer(0)
    first = net.evaluator(output).run({"x": x})
    assert_same(NetworkEvaluator(net.network).run({"x": x})["out0"], first["out0"])
    assert type(layer) is trt.ILayer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": None}, "inputs must be a, b; missing or unknown: b"),
        ({"c": torch.zeros(1)}, "missing or unknown: c"),
        (
            {"b": torch.zeros(2, 3, dtype=torch.int64)},
            "input 'b' has dtype torch.int64, TensorRT inferred torch.float32",
        ),
        ({"b": torch.zeros(3, 3)}, r"input 'b' has shape \[3, 3\], TensorRT inferred \[2, -1\]"),
        ({"b": torch.zeros(2)}, r"input 'b' has shape \[2\]"),
    ],
)
def test_inputs_are_checked(change, message):
    evaluator, a, b = sum_network()
    inputs = {name: tensor for name, tensor in ({"a": a, "b": b} | change).items() if tensor is not None}
    with pytest.raises(InputError, match=message):
        evaluator.run(inputs)


def test_layer_that_cannot_take_its_operands_is_named():
    evaluator, a, b = sum_network()
    with pytest.raises(VerificationError, match=r"\(ELEMENTWISE\) cannot be evaluated on \[2, 3\], \[2, 2\]"):
        evaluator.run({"a": a, "b": b[:, :2]})


def test_unknown_kind_is_named():
    def build(net, x):
        layer = net.add_resize(x)
        layer.shape = (1, 1, 4, 4)
        return layer

    with pytest.raises(
        VerificationError, match="is of kind RESIZE, which the reference evaluator does not know; it knows ACTIVATION"
    ):
        evaluate(build, random(1, 1, 2, 2))


def replaced(monkeypatch, kind, **changes):
    """Put a changed entry into the registry."""
    known = KINDS[kind]
    fields = {
        name: getattr(known, name)
        for name in ("class_name", "prepare", "honours", "expects", "replaced", "inputs", "same_dtype")
    }
    monkeypatch.setitem(KINDS, kind, LayerKind(**(fields | changes)))


def test_attribute_that_nobody_looks_at_is_named(monkeypatch):
    replaced(monkeypatch, "TOPK", honours=("op", "k", "axes"))
    with pytest.raises(
        VerificationError, match=r"\(TOPK\) has an attribute indices_type, which the reference evaluator"
    ):
        evaluate(lambda net, x: net.add_topk(x, trt.TopKOperation.MAX, 1, 2), random(2, 3))


def test_nothing_stale_is_read():
    """A start that a tensor replaces is not looked at: TensorRT would warn of it in its log."""

    def build(net, x, start):
        layer = net.add_slice(x, (1,), (2,), (1,))
        layer.set_input(1, start)
        return layer

    x = random(5)
    LOG.warnings.clear()
    assert_same(evaluate(build, x, torch.tensor([3])), x[3:])
    assert not LOG.warnings


def test_every_attribute_of_every_kind_is_looked_at():
    """Those of TensorRT's classes and no others, so that a release that adds one is noticed here."""
    from exportable_cache.backends.tensorrt.evaluator.layer import _COMMON, attribute_names

    for kind, known in KINDS.items():
        handled = {*known.honours, *known.expects}
        assert set(attribute_names(getattr(trt, known.class_name), _COMMON)) == handled, kind


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda layer: lambda x: x.double(), r"'out0' has dtype torch.float64, TensorRT inferred torch.float32"),
        (lambda layer: lambda x: x[:1], r"'out0' has shape \[1, 3\], TensorRT inferred \[2, 3\]"),
        (lambda layer: lambda x: x[None], r"'out0' has shape \[1, 2, 3\], TensorRT inferred \[2, 3\]"),
    ],
)
def test_results_are_compared_with_what_tensorrt_inferred(monkeypatch, prepare, message):
    replaced(monkeypatch, "UNARY", prepare=prepare)
    with pytest.raises(VerificationError, match=message):
        evaluate(lambda net, x: net.add_unary(x, trt.UnaryOperation.NEG), random(2, 3))


def test_invalid_network_is_refused():
    with pytest.raises(VerificationError, match="TensorRT could not infer the shape of"):
        evaluate(lambda net, a, b: net.add_elementwise(a, b, SUM), random(2, 3), random(2, 4))


def test_memory_of_intermediate_tensors_is_given_back():
    net = Net()
    x = random(2, 3)
    tensor = net.input("x", x)
    for _ in range(5):
        tensor = net.add_unary(tensor, trt.UnaryOperation.NEG).get_output(0)
    evaluator = net.evaluator(tensor)
    made: list[weakref.ref] = []

    def watched(compute):
        def run(x):
            # The operand, and the result before it.
            assert sum(tensor() is not None for tensor in made) <= 2
            result = compute(x)
            made.append(weakref.ref(result))
            return result

        return run

    evaluator._steps = [(layer, watched(compute)) for layer, compute in evaluator._steps]
    assert_same(evaluator.run({"x": x})["out0"], -x)
    assert len(made) == 5
