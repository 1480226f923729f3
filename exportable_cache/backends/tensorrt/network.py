"""From an exported program to TensorRT's network definition: one network for the whole method, or an error that says
why not.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...common.compat.torch_tensorrt import builder_config, construct_network
from ...errors import UnsupportedModelError, first_line
from .converters import TORCH_DTYPES, decompositions, pin_reshape_sizes
from .upstream import (
    DYNAMO_CONVERTERS,
    CompilationSettings,
    TRTInterpreter,
    cast_trt_tensor,
    collected_errors,
    get_decompositions,
    infer_module_output_dtypes,
    post_lowering,
    pre_export_lowering,
    torch_tensorrt,
    trt,
)

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import GraphModule, Node

    from .engine_io import EngineIO, InputSpec


@dataclass(frozen=True)
class Network:
    """A network definition with what must live as long as it.

    Attributes:
        definition: The network.
        inputs: Of the network, in order.
        outputs: Names, in order.
        aliases: Output name -> name of the input that it is written over.
        digest: sha256 of what the network was made from: lowered operators, their order and wiring, and every constant.
        interpreter: What built it; owns builder and weights.
    """

    definition: trt.INetworkDefinition
    inputs: tuple[InputSpec, ...]
    outputs: tuple[str, ...]
    aliases: dict[str, str]
    digest: str
    interpreter: NetworkInterpreter

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        """Constants by name of their layer: TensorRT cannot show bfloat16 ones."""
        return self.interpreter.ctx.weight_refit_map

    @property
    def layer_counts(self) -> dict[str, int]:
        """Number of layers by kind, such as `KV_CACHE_UPDATE`."""
        layers = (self.definition.get_layer(index) for index in range(self.definition.num_layers))
        return dict(sorted(Counter(layer_kind(layer) for layer in layers).items()))

    def build_plan(self, capabilities: Sequence[int] = ()) -> bytes:
        """The serialized plan, weights inside.

        Args:
            capabilities: Compute capabilities to build for, as 80 or 120; TensorRT's portable default if empty.

        Raises:
            UnsupportedModelError: If TensorRT cannot build the network.
        """
        return self.interpreter.build_plan(capabilities)


class NetworkInterpreter(TRTInterpreter):
    """torch_tensorrt's interpreter, stopped at the plan: only what `run` does after it needs a GPU.

    Every tensor is compared with what was traced, as converters have lost dtypes and dimensions silently.
    """

    #: What TensorRT's log said of the network so far.
    logged: Sequence[str] = ()

    def run_node(self, node: Node) -> Any:
        try:
            result = super().run_node(node)
        except UnsupportedModelError:
            raise
        except Exception as error:  # converters raise whatever they meet
            raise UnsupportedModelError(
                f"TensorRT cannot take {describe_node(node)}: {first_line(error)}; {_REMEDY}"
            ) from error
        traced = node.meta.get("val")
        if isinstance(result, trt.ITensor) and isinstance(traced, torch.Tensor):
            try:
                _check_like_traced(node, result, traced)
            except ValueError as error:  # a shape of rank -1
                said = "; ".join(self.logged[-1:]) or "it gives no reason"
                raise UnsupportedModelError(f"TensorRT cannot take {describe_node(node)}: {said}; {_REMEDY}") from error
            # Some converters count in int32 (arange of a dynamic length); positions stay what they were traced as.
            return cast_trt_tensor(self.ctx, result, traced.dtype, f"{node.name}_as_traced")
        return result

    def get_attr(self, target: str, args: Any, kwargs: Any) -> torch.Tensor:
        # torch_tensorrt hands TensorRT the address of `weight.contiguous()` and keeps `weight`: a copy would be gone by
        # then.
        return super().get_attr(target, args, kwargs).contiguous()

    def build_plan(self, capabilities: Sequence[int]) -> bytes:
        config = builder_config(self)
        if capabilities:
            config.num_compute_capabilities = len(capabilities)
            for index, capability in enumerate(capabilities):
                config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{capability}"), index)
        with collected_errors() as errors:
            plan = self.builder.build_serialized_network(self.ctx.net, config)
        if plan is None:
            raise UnsupportedModelError(
                f"TensorRT cannot build the network: {'; '.join(errors) or 'it gives no reason'}; {_REMEDY}"
            )
        return bytes(plan)


_REMEDY = "export for another target, or report it with the model type"


def build_network(program: ExportedProgram, signature: EngineIO, *, in_place: bool = True) -> Network:
    """Lower one exported method.

    Args:
        program: Traced in the explicit form.
        signature: Names and sizes of what goes in and out.
        in_place: Keep cache writes as TensorRT's KVCacheUpdate layer; otherwise they become scatters.

    Raises:
        UnsupportedModelError: On an operator without converter, naming it and the layer it belongs to; and where
            torch_tensorrt would compute something else than was traced.
    """
    settings = _settings()
    with warnings.catch_warnings(), collected_errors() as errors:
        # Deprecations inside torch_tensorrt's passes, none of the caller's making.
        warnings.simplefilter("ignore")
        graph = _lowered(program, settings, in_place)
        inputs = signature.bind(graph)
        _check_convertible(graph)
        interpreter = NetworkInterpreter(
            graph, [_trt_input(spec) for spec in inputs], infer_module_output_dtypes(graph), settings
        )
        interpreter.logged = errors
        # Otherwise torch puts the traceback of the traced call behind every error's sentence.
        interpreter.extra_traceback = False
        construct_network(interpreter)
    _check_weights(interpreter)
    network = interpreter.ctx.net
    _check_outputs(graph, network, signature.outputs)
    _rename(network, inputs, signature.outputs)
    aliases = _aliases(network)
    return Network(network, inputs, signature.outputs, aliases, _digest(graph, interpreter), interpreter)


def _settings() -> CompilationSettings:
    return CompilationSettings(
        # Any GPU id: nothing asks for the device before a plan is run.
        device=torch_tensorrt.Device(gpu_id=0),
        min_block_size=1,
        require_full_compilation=True,
        # Otherwise masks are dropped for a causal flag.
        attn_bias_is_causal=False,
        # Refittable plans cannot be built without a GPU.
        immutable_weights=True,
        # torch_tensorrt's default rounds float32 products to 10 bits on a GPU, which no check on a CPU would see.
        disable_tf32=True,
    )


def _lowered(program: ExportedProgram, settings: CompilationSettings, in_place: bool) -> GraphModule:
    table = get_decompositions(settings.enable_experimental_decompositions, settings.decompose_attention, False)
    program = pre_export_lowering(program, settings).run_decompositions({**table, **decompositions(in_place)})
    check_nothing_mutated(program)
    graph = post_lowering(program.module(), settings)
    pin_reshape_sizes(graph)
    return graph


def check_nothing_mutated(program: ExportedProgram) -> None:
    """Refuse a program that mutates state: torch_tensorrt 2.13.0 freezes it as a constant, and only the first step is
    right.

    Raises:
        UnsupportedModelError: Naming what is mutated.
    """
    signature = program.graph_signature
    mutated = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
    if mutated:
        raise UnsupportedModelError(
            f"the program mutates {', '.join(mutated)}, which torch_tensorrt would freeze as it is; "
            "state must be an input and an output: " + _REMEDY
        )


def _check_convertible(graph: GraphModule) -> None:
    missing = [
        describe_node(node)
        for node in graph.graph.nodes
        if node.op in ("call_function", "call_method", "call_module")
        and node.users
        and DYNAMO_CONVERTERS.get(node) is None
    ]
    if missing:
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UnsupportedModelError(f"TensorRT has nothing for {missing[0]}{more}; {_REMEDY}")


def describe_node(node: Node) -> str:
    """An operator and the module it comes from: `aten.sort.default in model.layers.0.mlp`."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next((path for path, _ in reversed(stack.values()) if path), None)
    return f"{node.target}" + (f" in {path}" if path else "")


def _check_like_traced(node: Node, tensor: trt.ITensor, traced: torch.Tensor) -> None:
    """Refuse a tensor of another dtype or shape than the traced one; a 0-D one may come out as [1], which broadcasts
    alike.
    """
    shape = tuple(tensor.shape)
    expected = tuple(size if isinstance(size, int) else -1 for size in traced.shape)
    same_shape = len(shape) == len(expected) and all(
        a == b or -1 in (a, b) for a, b in zip(shape, expected, strict=True)
    )
    if not same_shape and not (expected == () and shape == (1,)):
        raise UnsupportedModelError(
            f"TensorRT gives {describe_node(node)} the shape {list(shape)}, it was traced as {list(expected)}; "
            f"{_REMEDY}"
        )
    dtype = TORCH_DTYPES.get(tensor.dtype)
    if dtype != traced.dtype and {dtype, traced.dtype} != {torch.int32, torch.int64}:
        raise UnsupportedModelError(
            f"TensorRT gives {describe_node(node)} the dtype {tensor.dtype}, it was traced as {traced.dtype}; {_REMEDY}"
        )


def _check_outputs(graph: GraphModule, network: trt.INetworkDefinition, names: Sequence[str]) -> None:
    """Refuse an output of other dimensions than traced: a 0-D result comes out as [1], which callers
    would not expect.
    """
    output = next(node for node in graph.graph.nodes if node.op == "output")
    for index, (name, node) in enumerate(zip(names, output.args[0], strict=True)):
        shape, traced = tuple(network.get_output(index).shape), node.meta["val"].shape
        if len(shape) != len(traced):
            raise UnsupportedModelError(
                f"output {name!r} of the network has shape {list(shape)}, it was traced as {list(traced)}; {_REMEDY}"
            )


def _check_weights(interpreter: NetworkInterpreter) -> None:
    """TensorRT was given the address of every weight that is kept; of a strided one it was given that of a copy which
    is gone.
    """
    strided = [name for name, weight in interpreter.ctx.weight_refit_map.items() if not weight.is_contiguous()]
    if strided or not all(weight.is_contiguous() for weight in interpreter.ctx.cpu_weights_reference_holder):
        raise UnsupportedModelError(
            f"the constant {strided[0] if strided else '(unnamed)'} is not contiguous in memory; {_REMEDY}"
        )


def _trt_input(spec: InputSpec) -> torch_tensorrt.Input:
    if spec.is_dynamic:
        return torch_tensorrt.Input(
            min_shape=spec.min_shape,
            opt_shape=spec.opt_shape,
            max_shape=spec.max_shape,
            dtype=spec.dtype,
            name=spec.name,
        )
    return torch_tensorrt.Input(shape=spec.min_shape, dtype=spec.dtype, name=spec.name)


def _rename(network: trt.INetworkDefinition, inputs: Sequence[InputSpec], outputs: Sequence[str]) -> None:
    """Give inputs and outputs their own names, by which a runtime binds them: their order is torch_tensorrt's."""
    if network.num_inputs != len(inputs) or network.num_outputs != len(outputs):
        raise UnsupportedModelError(
            f"the network has {network.num_inputs} inputs and {network.num_outputs} outputs, the program {len(inputs)} "
            f"and {len(outputs)}: a tensor goes unused or comes out twice; {_REMEDY}"
        )
    for index, spec in enumerate(inputs):
        network.get_input(index).name = spec.name
    for index, name in enumerate(outputs):
        network.get_output(index).name = name


def layer_kind(layer: trt.ILayer) -> str:
    """Name of a layer's `LayerType`. By way of the base class: an activation layer's own `type` hides it."""
    return trt.ILayer.type.fget(layer).name


def _aliases(network: trt.INetworkDefinition) -> dict[str, str]:
    """Output -> input of every KVCacheUpdate, which must be outputs and inputs of the network for TensorRT to write in
    place.
    """
    inputs = {network.get_input(index).name for index in range(network.num_inputs)}
    outputs = {network.get_output(index).name for index in range(network.num_outputs)}
    aliases = {}
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer_kind(layer) == "KV_CACHE_UPDATE":
            source, result = layer.get_input(0).name, layer.get_output(0).name
            if source not in inputs or result not in outputs:
                raise UnsupportedModelError(
                    f"the cache write {layer.name} goes from {source} to {result}, not from an input of the network "
                    "to an output; " + _REMEDY
                )
            aliases[result] = source
    return aliases


def _digest(graph: GraphModule, interpreter: NetworkInterpreter) -> str:
    """sha256 of the lowered graph and of every constant the network points to."""
    digest = hashlib.sha256()
    for node in graph.graph.nodes:
        digest.update(f"{node.op} {node.name} {node.target} {node.args} {node.kwargs}\n".encode())
    for weight in interpreter.ctx.cpu_weights_reference_holder:
        digest.update(f"{list(weight.shape)} {weight.dtype}\n".encode())
        digest.update(weight.detach().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
