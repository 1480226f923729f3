"""Evaluate TensorRT network definitions with torch on a CPU, as the oracle for programs that no GPU has run."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, Any

import torch

from ....errors import InputError, VerificationError
from ....models.lora import WRITE_ADAPTER, write_slot
from ..engine_io import LOGITS, LORA_IN, STATE_IN, STATE_OUT, engine_inputs
from .layer import KINDS, read_layer, read_tensor
from .products import check_aliases

if TYPE_CHECKING:
    from ....program.methods import ProgramMethod
    from ..network import Network
    from .layer import NetworkLayer, TensorSpec


class NetworkEvaluator:
    """An `INetworkDefinition` as a function of torch tensors.

    It reads the network that TensorRT compiles, so converters and lowering are covered; the compiler is not. Every
    tensor is checked against the dtype and shape that TensorRT inferred. The semantics of each layer follow TensorRT's
    documentation, and were tested against torch and, for integers, against TensorRT's shape arithmetic.

    Args:
        network: Complete network from `tensorrt` or `tensorrt_rtx`; the memory of its weights must be alive.
        constants: Tensors by layer name, for constants that TensorRT's Python cannot show (bfloat16).

    Raises:
        VerificationError: If a kind of layer or a setting is not modeled, or the network is invalid.

    Example:
        >>> evaluator = NetworkEvaluator(network)
        >>> evaluator.run({"input_ids": torch.tensor([[7]]), ...})["output0"]
    """

    def __init__(self, network: Any, constants: Mapping[str, torch.Tensor] | None = None) -> None:
        # Not imported, because regular TensorRT and TensorRT-RTX have equal classes under two names.
        module = sys.modules[type(network).__module__]
        if not network.get_flag(module.NetworkDefinitionCreationFlag.STRONGLY_TYPED):
            raise VerificationError(
                "the network must be strongly typed, because TensorRT may otherwise change the precision of a layer"
            )
        constants = dict(constants or {})
        layers = [read_layer(network.get_layer(index), module, constants) for index in range(network.num_layers)]
        self.inputs = {
            spec.name: spec for spec in (read_tensor(network.get_input(i)) for i in range(network.num_inputs))
        }
        self.outputs = {
            spec.name: spec for spec in (read_tensor(network.get_output(i)) for i in range(network.num_outputs))
        }
        #: Names of inputs by the output that shares their memory.
        self.aliases = check_aliases(layers, self.inputs.keys(), self.outputs.keys())
        #: Number of layers by kind.
        self.layer_counts = dict(Counter(layer.kind for layer in layers))
        self._steps = [(layer, KINDS[layer.kind].prepare(layer)) for layer in _ordered(layers, self.inputs)]
        self._last_use = {
            spec.name: step
            for step, (layer, _) in enumerate(self._steps)
            for spec in (*layer.inputs, *layer.outputs)
            if spec
        }

    @torch.no_grad()
    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Execute the network once.

        Args:
            inputs: A CPU tensor for each network input, by name; they are not changed.

        Returns:
            The network's outputs by name; they may share memory with inputs.

        Raises:
            InputError: If an input is missing, unknown, or has another dtype or shape.
            VerificationError: If a tensor contradicts what TensorRT inferred, or TensorRT defines no result for a
                layer's values.
        """
        tensors = self._checked(inputs)
        for step, (layer, compute) in enumerate(self._steps):
            operands = [None if spec is None else tensors[spec.name] for spec in layer.inputs]
            try:
                results = compute(*operands)
            except (RuntimeError, IndexError, ValueError, TypeError, ArithmeticError) as error:
                shapes = ", ".join("none" if tensor is None else str(list(tensor.shape)) for tensor in operands)
                raise VerificationError(f"{layer} cannot be evaluated on {shapes}: {error}") from error
            results = results if isinstance(results, tuple) else (results,)
            for spec, result in zip(layer.outputs, results, strict=True):
                contradiction = spec.check(result)
                if contradiction:
                    raise VerificationError(f"{layer}: {spec.name!r} {contradiction}")
                tensors[spec.name] = result
            for used in (*layer.inputs, *layer.outputs):
                if used and self._last_use[used.name] == step and used.name not in self.outputs:
                    tensors.pop(used.name, None)
        return {name: tensors[name] for name in self.outputs}

    def _checked(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        wrong = sorted(inputs.keys() ^ self.inputs.keys())
        if wrong:
            raise InputError(f"inputs must be {', '.join(self.inputs)}; missing or unknown: {', '.join(wrong)}")
        for name, spec in self.inputs.items():
            contradiction = spec.check(inputs[name])
            if contradiction:
                raise InputError(f"input {name!r} {contradiction}")
        return dict(inputs)


def _ordered(layers: list[NetworkLayer], inputs: Mapping[str, TensorSpec]) -> list[NetworkLayer]:
    """Sort producers before consumers; networks list layers in insertion order, and dynamic shapes refer forward."""
    producers = {spec.name: index for index, layer in enumerate(layers) for spec in layer.outputs}
    graph: dict[int, list[int]] = {}
    for index, layer in enumerate(layers):
        read = [spec.name for spec in layer.inputs if spec and spec.name not in inputs]
        unknown = [name for name in read if name not in producers]
        if unknown:
            raise layer.wrong(f"reads {unknown[0]!r}, which no layer makes")
        graph[index] = [producers[name] for name in read]
    return [layers[index] for index in TopologicalSorter(graph).static_order()]


class NetworkRunner:
    """Runs the methods' networks over one cache, which is passed from step to step.

    Args:
        methods: Methods by name.
        networks: Network of each method.

    Raises:
        VerificationError: If the evaluator does not model a layer.
    """

    def __init__(self, methods: Mapping[str, ProgramMethod], networks: Mapping[str, Network]) -> None:
        self.methods = methods
        self._inputs = {name: [spec.name for spec in network.inputs] for name, network in networks.items()}
        self._evaluators = {
            name: NetworkEvaluator(network.definition, network.constants) for name, network in networks.items()
        }
        self._scores = {name: network.scored_tokens > 0 for name, network in networks.items()}
        specs = {spec.name: spec for network in networks.values() for spec in network.inputs}
        self._state, self._lora = (
            {
                name: torch.zeros(spec.min_shape, dtype=spec.dtype)
                for name, spec in specs.items()
                if name.startswith(prefix)
            }
            for prefix in (STATE_IN, LORA_IN)
        )

    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run one step and return its logits, return all outputs of another method, or write an adapter."""
        if method == WRITE_ADAPTER:
            return write_slot(list(self._lora.values()), *inputs)
        own = [name for name in self._inputs[method] if not name.startswith((STATE_IN, LORA_IN))]
        given = dict(zip(own, engine_inputs(self.methods, method, own, inputs, self._embedded), strict=True))
        kept = {**self._state, **self._lora}
        given |= {name: kept[name] for name in self._inputs[method] if name in kept}
        outputs = self._evaluators[method].run(given)
        if not self.methods[method].is_step:
            return tuple(outputs.values())
        # A step leaves the part of an encoder unchanged.
        for name in self._state:
            self._state[name] = outputs.get(STATE_OUT + name.removeprefix(STATE_IN), self._state[name])
        logits = outputs[LOGITS]
        # A network that methods share returns logits of several tokens; a third dimension may also be of codebooks.
        return logits[:, -1] if self._scores[method] and not self.methods[method].scored_tokens else logits

    def _embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of ids."""
        return self.run("embed", ids)[0]
