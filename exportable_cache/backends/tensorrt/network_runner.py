"""Stepping through the network definitions of a program on the CPU, in place of its engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from .evaluator import NetworkEvaluator
from .signature import LOGITS, STATE_IN, STATE_OUT

if TYPE_CHECKING:
    from ...program.methods import ProgramMethod
    from .network import Network


class NetworkRunner:
    """The methods' networks over one cache, which is passed from step to step as an engine's caller would.

    Args:
        methods: By name.
        networks: Of each of them.

    Raises:
        VerificationError: If a network has a layer that the evaluator does not model.
    """

    def __init__(self, methods: Mapping[str, ProgramMethod], networks: Mapping[str, Network]) -> None:
        self.methods = methods
        self._inputs = {name: [spec.name for spec in network.inputs] for name, network in networks.items()}
        self._evaluators = {
            name: NetworkEvaluator(network.definition, network.constants) for name, network in networks.items()
        }
        first = next(iter(networks.values()))
        self._state = {
            spec.name: torch.zeros(spec.min_shape, dtype=spec.dtype)
            for spec in first.inputs
            if spec.name.startswith(STATE_IN)
        }

    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor:
        given = dict(zip((name for name in self._inputs[method] if not name.startswith(STATE_IN)), inputs, strict=True))
        outputs = self._evaluators[method].run({**given, **self._state})
        self._state = {name: outputs[STATE_OUT + name.removeprefix(STATE_IN)] for name in self._state}
        return outputs[LOGITS]
