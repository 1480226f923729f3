"""Convert an exported program to TensorRT's network definition: one network for the whole method, or an error."""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ...common.compat.torch_tensorrt import builder_config, construct_network
from ...errors import UnsupportedModelError, first_line
from .converters import decompositions, pin_reshape_sizes
from .plain_layers import TORCH_DTYPES
from .simplify import JoinedWeights, simplify
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
    """A network definition, with everything that must live as long.

    Attributes:
        definition: The network.
        inputs: Inputs of the network, in order.
        outputs: Names of the outputs, in order.
        aliases: Names of inputs by the output that is written over them.
        scored_tokens: Most tokens that have logits, if the second dimension of the logits is that of tokens; else 0.
        results: Largest shape of each output of a method that is not a step.
        digest: sha256 of what the network was made from: lowered operators, their order and connections, and all
            constants.
        interpreter: Interpreter that built the network; it owns builder and weights.
    """

    definition: trt.INetworkDefinition
    inputs: tuple[InputSpec, ...]
    outputs: tuple[str, ...]
    aliases: dict[str, str]
    digest: str
    interpreter: NetworkInterpreter
    scored_tokens: int = 0
    results: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        """Constants by layer name, because TensorRT cannot show bfloat16 ones."""
        return self.interpreter.ctx.weight_refit_map

    @property
    def multiplies_float32(self) -> bool:
        """True if a product or an attention layer has float32 inputs."""
        layers = (self.definition.get_layer(index) for index in range(self.definition.num_layers))
        products = (layer for layer in layers if layer_kind(layer) in ("MATRIX_MULTIPLY", "ATTENTION_INPUT"))
        return any(layer.get_input(0).dtype == trt.DataType.FLOAT for layer in products)

    @property
    def layer_counts(self) -> dict[str, int]:
        """Number of layers by kind, such as `KV_CACHE_UPDATE`."""
        layers = (self.definition.get_layer(index) for index in range(self.definition.num_layers))
        return dict(sorted(Counter(layer_kind(layer) for layer in layers).items()))

    def build_plan(
        self, capabilities: Sequence[int] = (), profiles: Sequence[Sequence[InputSpec]] | None = None
    ) -> bytes:
        """Return the serialized plan, including weights.

        Args:
            capabilities: Compute capabilities to build for, such as 80 or 120; TensorRT's portable default if empty.
            profiles: Inputs of each method that shares the plan, which get an optimization profile each; those of the
                network by default.

        Raises:
            UnsupportedModelError: If TensorRT cannot build the network.
        """
        return self.interpreter.build_plan(capabilities, (self.inputs,) if profiles is None else profiles)


class NetworkInterpreter(TRTInterpreter):
    """torch_tensorrt's interpreter up to the plan; only what `run` does afterwards needs a GPU.

    Every tensor is compared with the trace, because converters have changed dtypes and dimensions silently.
    """

    #: Errors in TensorRT's log so far.
    logged: Sequence[str] = ()

    def run_node(self, node: Node) -> Any:
        """Convert one node and check its result."""
        try:
            result = super().run_node(node)
        except UnsupportedModelError:
            raise
        except Exception as error:  # converters raise arbitrary errors
            raise UnsupportedModelError(
                f"TensorRT cannot convert {describe_node(node)}: {first_line(error)}; {_REMEDY}"
            ) from error
        traced = node.meta.get("val")
        if isinstance(result, trt.ITensor) and isinstance(traced, torch.Tensor):
            try:
                _check_like_traced(node, result, traced)
            except ValueError as error:  # a shape of rank -1
                said = "; ".join(self.logged[-1:]) or "no reason given"
                raise UnsupportedModelError(
                    f"TensorRT cannot convert {describe_node(node)}: {said}; {_REMEDY}"
                ) from error
            # Cast, because some converters compute int64 in int32 (arange of a dynamic length).
            return cast_trt_tensor(self.ctx, result, traced.dtype, f"{node.name}_as_traced")
        return result

    def get_attr(self, target: str, args: Any, kwargs: Any) -> torch.Tensor:
        """Return a contiguous constant."""
        # torch_tensorrt passes the address of `weight.contiguous()` but keeps only `weight`, so a copy would be freed.
        return super().get_attr(target, args, kwargs).contiguous()

    def build_plan(self, capabilities: Sequence[int], profiles: Sequence[Sequence[InputSpec]]) -> bytes:
        """See `Network.build_plan`."""
        net = self.ctx.net
        self.optimization_profiles = [
            self._profile(inputs)
            for inputs in profiles
            if any(-1 in tuple(net.get_input(index).shape) for index in range(len(inputs)))
        ]
        config = builder_config(self)
        if capabilities:
            config.num_compute_capabilities = len(capabilities)
            for index, capability in enumerate(capabilities):
                config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{capability}"), index)
        with collected_errors() as errors:
            plan = self.builder.build_serialized_network(self.ctx.net, config)
        if plan is None:
            raise UnsupportedModelError(
                f"TensorRT cannot build the network: {'; '.join(errors) or 'no reason given'}; {_REMEDY}"
            )
        return bytes(plan)

    def _profile(self, inputs: Sequence[InputSpec]) -> trt.IOptimizationProfile:
        """Return the optimization profile of one method's inputs."""
        profile = self.builder.create_optimization_profile()
        for spec in inputs:
            profile.set_shape(spec.name, spec.min_shape, spec.opt_shape, spec.max_shape)
        return profile


_REMEDY = "export for another target, or report it with the model type"


def build_network(
    program: ExportedProgram, signature: EngineIO, *, in_place: bool = True, joined: JoinedWeights | None = None
) -> Network:
    """Lower one exported method.

    Args:
        program: Program traced in the explicit form.
        signature: Names and sizes of inputs, outputs and state.
        in_place: Keep cache writes as TensorRT's KVCacheUpdate layer; otherwise they become scatters.
        joined: Joined weights of the networks of the same model, which share them.

    Raises:
        UnsupportedModelError: If an operator has no converter, with its name and module; or if torch_tensorrt would
            compute something different from the trace.
    """
    settings = _settings()
    with warnings.catch_warnings(), collected_errors() as errors:
        # Deprecations inside torch_tensorrt, which callers cannot change.
        warnings.simplefilter("ignore")
        graph = _lowered(program, settings, in_place, joined)
        inputs, outputs = signature.bind(graph)
        _check_convertible(graph)
        interpreter = NetworkInterpreter(
            graph, [_trt_input(spec) for spec in inputs], infer_module_output_dtypes(graph), settings
        )
        interpreter.logged = errors
        # Otherwise torch appends the traceback of the traced call to every error.
        interpreter.extra_traceback = False
        construct_network(interpreter)
    _check_weights(interpreter)
    network = interpreter.ctx.net
    _check_outputs(graph, network, outputs)
    _rename(network, inputs, outputs)
    aliases = _aliases(network)
    digest = _digest(graph, interpreter)
    return Network(network, inputs, outputs, aliases, digest, interpreter, signature.scored_tokens, signature.results)


def _settings() -> CompilationSettings:
    return CompilationSettings(
        # Any GPU id, because the device is not used before a plan runs.
        device=torch_tensorrt.Device(gpu_id=0),
        min_block_size=1,
        require_full_compilation=True,
        # Otherwise masks are dropped for a causal flag.
        attn_bias_is_causal=False,
        # Refittable plans cannot be built without a GPU.
        immutable_weights=True,
        # The default rounds float32 products to 10 bits on a GPU, which no check on a CPU would detect.
        # TensorRT-RTX 1.5 does so in spite of this flag.
        disable_tf32=True,
    )


def _lowered(
    program: ExportedProgram, settings: CompilationSettings, in_place: bool, joined: JoinedWeights | None
) -> GraphModule:
    table = get_decompositions(settings.enable_experimental_decompositions, settings.decompose_attention, False)
    program = pre_export_lowering(program, settings).run_decompositions({**table, **decompositions(in_place)})
    check_nothing_mutated(program)
    graph = post_lowering(program.module(), settings)
    pin_reshape_sizes(graph)
    simplify(graph, joined)
    return graph


def check_nothing_mutated(program: ExportedProgram) -> None:
    """Refuse a program that mutates state.

    torch_tensorrt 2.13.0 would freeze the state as a constant, and only the first step would be correct.

    Raises:
        UnsupportedModelError: If state is mutated; with its names.
    """
    signature = program.graph_signature
    mutated = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
    if mutated:
        raise UnsupportedModelError(
            f"state must be an input and an output, but the program mutates {', '.join(mutated)}, which torch_tensorrt "
            "would freeze; " + _REMEDY
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
        raise UnsupportedModelError(f"TensorRT has no converter for {missing[0]}{more}; {_REMEDY}")


def describe_node(node: Node) -> str:
    """Return an operator and its module, such as `aten.sort.default in model.layers.0.mlp`."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next((path for path, _ in reversed(stack.values()) if path), None)
    return f"{node.target}" + (f" in {path}" if path else "")


def _check_like_traced(node: Node, tensor: trt.ITensor, traced: torch.Tensor) -> None:
    """Refuse a tensor whose dtype or shape differs from the trace.

    A 0-D tensor may become [1], because that broadcasts alike.
    """
    shape = tuple(tensor.shape)
    expected = tuple(size if isinstance(size, int) else -1 for size in traced.shape)
    same_shape = len(shape) == len(expected) and all(
        a == b or -1 in (a, b) for a, b in zip(shape, expected, strict=True)
    )
    if not same_shape and not (expected == () and shape == (1,)):
        raise UnsupportedModelError(
            f"TensorRT infers shape {list(shape)} for {describe_node(node)}, traced as {list(expected)}; {_REMEDY}"
        )
    dtype = TORCH_DTYPES.get(tensor.dtype)
    if dtype != traced.dtype and {dtype, traced.dtype} != {torch.int32, torch.int64}:
        raise UnsupportedModelError(
            f"TensorRT infers dtype {tensor.dtype} for {describe_node(node)}, traced as {traced.dtype}; {_REMEDY}"
        )


def _check_outputs(graph: GraphModule, network: trt.INetworkDefinition, names: Sequence[str]) -> None:
    """Refuse an output with other dimensions than traced: a 0-D result becomes [1], which callers do not expect."""
    output = next(node for node in graph.graph.nodes if node.op == "output")
    for index, (name, node) in enumerate(zip(names, output.args[0], strict=True)):
        shape, traced = tuple(network.get_output(index).shape), node.meta["val"].shape
        if len(shape) != len(traced):
            raise UnsupportedModelError(
                f"output {name!r} of the network has shape {list(shape)}, traced as {list(traced)}; {_REMEDY}"
            )


def _check_weights(interpreter: NetworkInterpreter) -> None:
    """Refuse strided constants.

    TensorRT holds the addresses of constants, and that of a strided one points to a freed contiguous copy.
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
    """Rename inputs and outputs, because a runtime binds by name and the order is torch_tensorrt's."""
    if network.num_inputs != len(inputs) or network.num_outputs != len(outputs):
        raise UnsupportedModelError(
            f"the network has {network.num_inputs} inputs and {network.num_outputs} outputs, expected {len(inputs)} "
            f"and {len(outputs)}: an input is unused or an output repeated; {_REMEDY}"
        )
    for index, spec in enumerate(inputs):
        network.get_input(index).name = spec.name
    for index, name in enumerate(outputs):
        network.get_output(index).name = name


def layer_kind(layer: trt.ILayer) -> str:
    """Return the name of a layer's `LayerType`, by the base class because an activation layer hides `type`."""
    return trt.ILayer.type.fget(layer).name


def _aliases(network: trt.INetworkDefinition) -> dict[str, str]:
    """Return the input by output of every KVCacheUpdate.

    Both must be inputs and outputs of the network for TensorRT to write in place.
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
                    f"the cache update {layer.name} must go from a network input to a network output, got {source} to "
                    f"{result}; {_REMEDY}"
                )
            aliases[result] = source
    return aliases


def _digest(graph: GraphModule, interpreter: NetworkInterpreter) -> str:
    """Return sha256 of the lowered graph and of all constants of the network."""
    digest = hashlib.sha256()
    for node in graph.graph.nodes:
        digest.update(f"{node.op} {node.name} {node.target} {node.args} {node.kwargs}\n".encode())
    for weight in interpreter.ctx.cpu_weights_reference_holder:
        digest.update(f"{list(weight.shape)} {weight.dtype}\n".encode())
        digest.update(weight.detach().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
