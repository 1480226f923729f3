"""Faults planted into whole programs, one layer at a time: the difference to the model must show each.

The networks stay as they are, as TensorRT does not always forget that one was invalid for a while: a layer is read,
changed, and put back into the evaluator.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

pytest.importorskip("exportable_cache.backends.tensorrt.upstream", reason="no tensorrt extra is installed")

from exportable_cache.backends.tensorrt.evaluator import NetworkEvaluator
from exportable_cache.backends.tensorrt.evaluator.layer import KINDS, NetworkLayer
from exportable_cache.errors import VerificationError

from ..programs import engine_program

Fault = Callable[[NetworkLayer], "NetworkLayer | None"]
POSITION = 21


def other(attribute: str, pairs: Mapping[str, str]) -> Fault:
    """Another member of an enum."""

    def plant(layer: NetworkLayer) -> NetworkLayer | None:
        value = pairs.get(layer[attribute])
        return None if value is None else replace(layer, attributes={**layer.attributes, attribute: value})

    return plant


def swapped(first: int, second: int) -> Fault:
    """Two inputs exchanged."""

    def plant(layer: NetworkLayer) -> NetworkLayer | None:
        inputs = list(layer.inputs)
        if inputs[first].name == inputs[second].name:
            return None
        inputs[first], inputs[second] = inputs[second], inputs[first]
        return replace(layer, inputs=tuple(inputs))

    return plant


def later_start(layer: NetworkLayer) -> NetworkLayer | None:
    """A slice that begins one later, or earlier where it ends with the tensor, along the last
    dimension that it cuts.
    """
    if layer["start"] is None or layer["shape"] is None or layer["axes"] is not None:
        return None
    start, length = list(layer["start"]), layer.inputs[0].shape
    movable = [dim for dim, size in enumerate(layer["shape"]) if 0 < size < length[dim] and layer["stride"][dim] == 1]
    if not movable:
        return None
    dim = movable[-1]
    start[dim] += 1 if start[dim] + layer["shape"][dim] < length[dim] else -1
    return replace(layer, attributes={**layer.attributes, "start": tuple(start)})


def moved_axis(layer: NetworkLayer) -> NetworkLayer | None:
    """The dimension before."""
    return replace(layer, attributes={**layer.attributes, "axes": layer["axes"] >> 1})


def swapped_dims(layer: NetworkLayer) -> NetworkLayer | None:
    """The last two dimensions exchanged before a reshape that keeps the number of elements."""
    rank = len(layer.inputs[0].shape)
    if rank < 2 or min(layer.inputs[0].shape[-2:]) < 2 or layer["reshape_dims"] is None:
        return None
    order = list(layer["first_transpose"])
    order[rank - 2], order[rank - 1] = order[rank - 1], order[rank - 2]
    return replace(layer, attributes={**layer.attributes, "first_transpose": tuple(order)})


def kept(layer: NetworkLayer) -> NetworkLayer:
    """The layer as it is."""
    return layer


FAULTS: dict[str, Fault] = {
    "ELEMENTWISE": other(
        "op",
        {
            "SUM": "SUB",
            "SUB": "SUM",
            "PROD": "SUM",
            "DIV": "PROD",
            "POW": "SUM",
            "MAX": "MIN",
            "MIN": "MAX",
            "AND": "OR",
            "OR": "AND",
            "GREATER": "LESS",
            "LESS": "GREATER",
            "EQUAL": "GREATER",
            "FLOOR_DIV": "SUM",
        },
    ),  # fmt: skip
    "UNARY": other("op", {"COS": "SIN", "SIN": "COS", "NEG": "ABS", "SQRT": "RECIP", "RECIP": "SQRT", "EXP": "NEG"}),
    "ACTIVATION": other("type", {"SIGMOID": "TANH", "TANH": "SIGMOID"}),
    "REDUCE": other("op", {"AVG": "SUM", "SUM": "MAX", "MAX": "MIN"}),
    "MATRIX_MULTIPLY": other("op1", {"NONE": "TRANSPOSE", "TRANSPOSE": "NONE"}),
    "TOPK": other("op", {"MAX": "MIN"}),
    "SOFTMAX": moved_axis,
    "CONCATENATION": swapped(0, 1),
    "SELECT": swapped(1, 2),
    "SLICE": later_start,
    "SHUFFLE": swapped_dims,
    "SCATTER": swapped(0, 2),
    "ROTARY_EMBEDDING": swapped(1, 2),
    "ATTENTION_INPUT": swapped(1, 2),
    "KV_CACHE_UPDATE": swapped(0, 1),
}
# Kinds of which every fault must show. The others are also used where a step of one token makes no difference (a
# minimum of a size and its bound, the order of two empty tensors).
ALWAYS = (
    "ACTIVATION",
    "ATTENTION_INPUT",
    "KV_CACHE_UPDATE",
    "MATRIX_MULTIPLY",
    "REDUCE",
    "ROTARY_EMBEDDING",
    "SOFTMAX",
    "TOPK",
)

# Layers of these kinds by family, of which no fault shows. One choice of a token has the slot of its expert: the sum of
# factors over choices is their maximum. The score of a group of two experts is the sum of its best two: which come
# first, or their maximum, picks the same group.
_FACTORS = r"\.experts/slot_factors(_\d+)?\]"
ALIKE = {"mixtral": _FACTORS, "deepseek_v3": rf"{_FACTORS}|\.gate/(sum_1|topk_topk)\]"}


def decode_inputs(evaluator: NetworkEvaluator) -> dict[str, torch.Tensor]:
    """A token at `POSITION` over caches that hold something everywhere."""
    generator = torch.Generator().manual_seed(0)
    inputs = {
        name: torch.randn(spec.shape, generator=generator).to(spec.dtype) for name, spec in evaluator.inputs.items()
    }
    return {**inputs, "input_ids": torch.tensor([[37]]), "input_pos": torch.tensor([POSITION])}


def shows(
    evaluator: NetworkEvaluator,
    index: int,
    fault: Fault,
    inputs: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
) -> bool | None:
    """Whether the outputs differ from `expected` with a fault in one layer; None where it has nothing to change."""
    steps = evaluator._steps
    layer = fault(steps[index][0])
    if layer is None:
        return None
    evaluator._steps = steps.copy()
    try:
        evaluator._steps[index] = (layer, KINDS[layer.kind].prepare(layer))
        outputs = evaluator.run(inputs)
    except VerificationError:
        return True
    finally:
        evaluator._steps = steps
    # Not-a-number is a difference.
    return not all((outputs[name].double() - tensor.double()).abs().max() <= 1e-3 for name, tensor in expected.items())


@pytest.mark.full
@pytest.mark.parametrize("family", ["gemma3_text", "mixtral", "deepseek_v3"])
def test_faults_in_a_decode_step_show(family: str) -> None:
    _, _, networks = engine_program(family, engines="separate")
    evaluator = NetworkEvaluator(networks["decode"].definition, networks["decode"].constants)
    # Cache tensors that an earlier step of the list frees may be read by the faulty one: keep all.
    evaluator._last_use = dict.fromkeys(evaluator._last_use, -1)
    inputs = decode_inputs(evaluator)
    expected = evaluator.run(inputs)
    seen: dict[str, dict[str, bool]] = {}
    for index, (layer, _) in enumerate(evaluator._steps):
        if layer.kind in FAULTS:
            caught = shows(evaluator, index, FAULTS[layer.kind], inputs, expected)
            if caught is not None:
                seen.setdefault(layer.kind, {})[layer.name] = caught
    assert shows(evaluator, 0, kept, inputs, expected) is False
    for kind, caught in seen.items():
        assert any(caught.values()), kind
        assert sum(caught.values()) > 0.6 * len(caught), (kind, caught)
    missed = {name for kind in ALWAYS for name, caught in seen.get(kind, {}).items() if not caught}
    alike = {name for kind in ALWAYS for name in seen.get(kind, {}) if re.search(ALIKE.get(family, "^$"), name)}
    assert missed == alike
