"""Convert exported methods to one Core AI program, with a layout of keys and values that its converter takes."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument

from ...cache.layers import CacheLayer
from ...cache.layout import PORTABLE, PortableLayout
from ...cache.policies import is_one
from ...cache.slots import read_slots
from ...common.compat.coreai import dequantized_weight
from ...common.compat.torch import OpOverload, writes_in_place
from ...common.tensors import wide_buffer
from ...errors import UnsupportedModelError, describe_trace_error
from ...models.quantized_rows import is_quantized
from ..decompositions import scatter_by_comparisons

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from transformers import PreTrainedModel

    from ...cache.layout import WrittenLayer
    from ...models.cache_factory import ExportableCache
    from ...program.methods import ProgramMethod


@dataclass(frozen=True)
class GatheredLayout(PortableLayout, kind="gathered"):
    """Layout that writes several tokens by one gather over the old slots and the new tokens.

    Core AI's converter takes `index_put` of a fixed number of tokens only. A gather reads and writes all slots of a
    layer, which costs a prompt little. Single tokens are written in place, as in the portable layout.
    """

    def _write(
        self, layer: WrittenLayer, slots: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> list[torch.Tensor]:
        """See `PortableLayout._write`; the slots of a row follow each other."""
        query_length, storage = key_states.shape[2], layer.storage
        if is_one(query_length):
            return super()._write(layer, slots, key_states, value_states)
        assert storage is not None
        slot = torch.arange(layer.policy.slot_count, device=layer.device)
        offset = slot - slots[:, :1]
        is_new = (offset >= 0) & (offset < query_length)
        source = torch.where(is_new, layer.policy.slot_count + offset, slot)
        written = []
        for name, rows in zip(storage.parts, storage.encode(key_states, value_states), strict=True):
            written.append(read_slots(torch.cat([getattr(layer, name), rows], dim=2), source))
            layer.replace(name, written[-1])
        return written


def gathered_layers(model: PreTrainedModel, cache: ExportableCache) -> ExportableCache:
    """Return the cache with layers as Core AI programs keep them, and the same contents."""
    return cache.with_layers([_gathered(layer) for layer in cache.layers])


def _gathered(layer: CacheLayer) -> CacheLayer:
    if layer.storage is None or layer.layout != PORTABLE:
        return layer
    return layer.with_layout(GatheredLayout(), dict(layer.named_state()))


aten = torch.ops.aten

#: Pointwise operators whose operands the converter broadcasts by reshapes, wrongly if a size is dynamic and their
#: numbers of dimensions differ (coreai-torch 0.4.3).
_BROADCAST = frozenset(
    "add sub mul div pow remainder maximum minimum where eq ne lt le gt ge bitwise_and bitwise_or logical_and "
    "logical_or".split()
)

#: Dtypes in a program of weights up to an integer.
_INTEGERS = {127: torch.int8}


def convert(exported: Mapping[str, ExportedProgram], methods: Mapping[str, ProgramMethod]) -> Any:
    """Return the methods as functions of one program, over the same weights and states.

    Args:
        exported: Traced methods, whose cache tensors are buffers.
        methods: The methods by the same names.

    Raises:
        UnsupportedModelError: If the converter refuses an operator, or a method reads a cache tensor that it does not
            write.
    """
    with warnings.catch_warnings():
        # It warns of each release of torch that is newer than its own tests, among them the one that it names.
        warnings.filterwarnings("ignore", message="coreai-torch has only been validated")
        from coreai_torch import TorchConverter
    converter = TorchConverter(mode=TorchConverter.Mode.RELEASE)
    try:
        for name, program in exported.items():
            program = program.run_decompositions(_decompositions())
            if methods[name].is_step:
                write_states(program)
            _fold_numbers(program, 1 if methods[name].is_step else _MOST_FOLDED)
            drop_unused(program)
            check_complex(program, name)
            _align_ranks(program.graph_module)
            _state_sizes(program)
            method = methods[name]
            converter.add_exported_program(
                program,
                input_names=list(method.input_names),
                output_names=output_names(method),
                state_names=_states(program, name),
                entrypoint_name=name,
            )
        return converter.to_coreai()
    except UnsupportedModelError:
        raise
    except Exception as error:  # the converter raises many classes
        raise UnsupportedModelError(
            f"Core AI's converter refuses method {name!r}: {describe_trace_error(error)}; export for another target"
        ) from error


def write_states(program: ExportedProgram) -> None:
    """Write each cache tensor that a step only reads, such as the keys of cross-attention, in place.

    A tensor that is not written would be a constant of the Core AI program.
    """
    signature, graph = program.graph_signature, program.graph
    written, output = set(signature.buffers_to_mutate.values()), graph.output_node()
    results = list(zip(signature.output_specs, output.args[0], strict=True))
    order: dict[str | None, int] = {}
    for node in graph.find_nodes(op="placeholder"):
        target = signature.inputs_to_buffers.get(node.name, "")
        order[target] = len(order)
        if not target.startswith("layers_") or target in written:
            continue
        with graph.inserting_before(output):
            same = graph.call_function(aten.clone.default, (node,))
        same.meta["val"] = node.meta["val"]
        results.append((OutputSpec(OutputKind.BUFFER_MUTATION, TensorArgument(name=same.name), target), same))
    # Written buffers come before results, in the order of the inputs, by which the converter names them.
    results.sort(key=lambda one: order[one[0].target] if one[0].kind is OutputKind.BUFFER_MUTATION else len(order))
    output.args = (tuple(node for _, node in results),)
    signature.output_specs[:] = [spec for spec, _ in results]
    program.graph_module.recompile()


def drop_unused(program: ExportedProgram) -> None:
    """Remove weights and buffers that no operator reads, in place, such as those of a tower for images."""
    signature, graph = program.graph_signature, program.graph
    written = set(signature.buffers_to_mutate.values())
    kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
    kept = {spec.arg.name for spec in signature.input_specs if spec.kind not in kinds or spec.target in written}
    for node in graph.find_nodes(op="placeholder"):
        if node.users or node.name in kept:
            kept.add(node.name)
        else:
            graph.erase_node(node)
    signature.input_specs = [spec for spec in signature.input_specs if spec.arg.name in kept]
    program.graph_module.recompile()


def check_complex(program: ExportedProgram, method: str) -> None:
    """Refuse complex numbers, because the converter ends the process at them (coreai-torch 0.4.3).

    Raises:
        UnsupportedModelError: If a value is complex.
    """
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.is_complex():
            raise UnsupportedModelError(
                f"numbers must be real for target coreai, and {node.name} in method {method!r} is complex; export for "
                "another target"
            )


def check_symmetric(model: torch.nn.Module) -> None:
    """Refuse weights with zero points, which the program would leave out.

    Raises:
        UnsupportedModelError: If a weight has a zero point that is not zero.
    """
    # By the modules, because a weight may be stored as several parameters.
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if is_quantized(weight) and weight.zero_point is not None and bool(weight.zero_point.any()):
            raise UnsupportedModelError(
                f"the zero points of {name}.weight must be zero for target coreai; quantize it with this package "
                "(--quantize 8w), or export for another target"
            )


def check_integers(model: torch.nn.Module) -> None:
    """Refuse integers of more than 32 bits, because the converter keeps 32: hashes of n-grams would be others.

    Raises:
        UnsupportedModelError: If a buffer has such integers.
    """
    name = wide_buffer(model)
    if name is not None:
        raise UnsupportedModelError(
            f"integers must have 32 bits for target coreai, and {name} of {type(model).__name__} has larger ones, "
            "which would change; export for another target"
        )


def output_names(method: ProgramMethod) -> list[str]:
    """Return the names of a method's outputs."""
    return ["logits"] if method.is_step else [spec.name for spec in method.outputs]


def _states(program: ExportedProgram, method: str) -> list[str]:
    """Return the names of the buffers that are states, in the order of the graph's inputs."""
    written = set(program.graph_signature.buffers_to_mutate.values())
    names = [spec.target for spec in program.graph_signature.input_specs if spec.kind is InputKind.BUFFER]
    for name in names:
        if name is not None and name.startswith("layers_") and name not in written:
            raise UnsupportedModelError(
                f"method {method!r} reads the cache tensor {name} without writing it, which would be a constant in a "
                "Core AI program; export for another target"
            )
    return [name for name in names if name in written]


def _decompositions() -> dict[Any, Callable[..., Any]]:
    from coreai_torch import get_decomp_table

    table = get_decomp_table()
    for overload in ("Scalar", "Tensor"):
        table[getattr(aten.remainder, overload)] = _remainder
    # The runtime crashes at a scatter if a size is dynamic.
    table[aten.scatter.value] = table[aten.scatter.src] = scatter_by_comparisons
    table[aten.index_put.default] = _index_put
    table[aten.var.correction] = _variance
    table[aten.scaled_dot_product_attention.default] = _attention
    if hasattr(torch.ops.torchao, "dequantize_affine"):
        table[torch.ops.torchao.dequantize_affine.default] = _dequantize
    return table


def _dequantize(
    integers: torch.Tensor,
    block_size: Sequence[int],
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    input_dtype: torch.dtype,
    least: int,
    most: int,
    output_dtype: torch.dtype = torch.float32,
) -> Any:
    """Keep the integers of a weight, which the program stores; they are symmetric."""
    if integers.dim() != 2 or block_size[0] != 1 or most not in _INTEGERS or output_dtype != scale.dtype:
        return NotImplemented
    scales = scale.reshape(integers.shape[0], -1)
    return dequantized_weight()(integers, scales, None, None, _INTEGERS[most], output_dtype)


def _remainder(value: torch.Tensor, divisor: Any) -> torch.Tensor:
    """Compute `torch.remainder`, which the converter lacks."""
    return value - divisor * torch.div(value, divisor, rounding_mode="floor")


def _index_put(
    target: torch.Tensor, indices: list[torch.Tensor | None], source: torch.Tensor, accumulate: bool = False
) -> Any:
    """Write a dynamic number of rows by one gather over the old and the new ones; their indices differ."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if accumulate or len(given) != 1 or given[0][1].dim() != 1 or isinstance(given[0][1].shape[0], int):
        return NotImplemented
    dim, index = given[0]
    slot, order = torch.arange(target.shape[dim]), torch.arange(index.shape[0])
    hits = index[None] == slot[:, None]
    source_row = torch.where(hits.any(1), target.shape[dim] + (hits * order[None]).sum(1), slot)
    return torch.cat([target, source], dim=dim).index_select(dim, source_row)


def _variance(
    given: torch.Tensor, dim: list[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> torch.Tensor:
    """Compute `torch.var`, which the converter lacks."""
    dims = list(range(given.dim())) if dim is None else dim
    count = 1
    for one in dims:
        count = count * given.shape[one]
    squares = (given - given.mean(dims, keepdim=True)).square().sum(dims, keepdim=keepdim)
    return squares / (count - (1 if correction is None else correction))


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    """Spell attention out if values are of another size than queries, which the converter does not take."""
    if value.shape[-1] == query.shape[-1] or is_causal or options.get("enable_gqa"):
        return NotImplemented
    scale = options.get("scale")
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1) @ value


def _fold_numbers(program: ExportedProgram, largest: int = 1) -> None:
    """Replace what is computed from constants alone, such as a quantile, by its value.

    Args:
        program: Program to change.
        largest: Most elements of a value. Encoders compute positions and masks of items of one size by operators that
            the converter lacks, such as `sort`.
    """
    signature, graph = program.graph_signature, program.graph
    kinds = (InputKind.CONSTANT_TENSOR,) if largest == 1 else (InputKind.CONSTANT_TENSOR, InputKind.BUFFER)
    stored = {**program.state_dict, **program.constants}
    constants = {
        spec.arg.name: stored[spec.target]
        for spec in signature.input_specs
        if spec.kind in kinds and isinstance(stored.get(spec.target or ""), torch.Tensor)
    }
    known = {
        node: constants[node.name]
        for node in graph.find_nodes(op="placeholder")
        if node.name in constants and constants[node.name].numel() <= largest
    }
    for node in graph.nodes:
        if node.op != "call_function" or not (node.all_input_nodes or largest > 1):
            continue
        if any(one not in known for one in node.all_input_nodes) or not _is_pure(node.target):
            continue
        value = node.target(*torch.fx.map_arg(node.args, known.get), **torch.fx.map_arg(node.kwargs, known.get))
        if not isinstance(value, torch.Tensor) or value.numel() <= largest:
            known[node] = value
    for node, value in reversed(known.items()):
        if node.op != "call_function":
            continue
        if isinstance(value, torch.Tensor) and any(user not in known for user in node.users):
            with graph.inserting_before(node):
                folded = _constant(program, f"{node.name}_value", value)
            folded.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(folded)
        if not node.users:
            graph.erase_node(node)
    program.graph_module.recompile()


#: Most elements of a value that is folded in an encoder.
_MOST_FOLDED = 2**22


def _is_pure(target: Any) -> bool:
    """Return True if an operator has the same result each time."""
    tags = getattr(target, "tags", ())
    return target is operator.getitem or (
        isinstance(target, OpOverload)
        and target.namespace == "aten"
        and not writes_in_place(target)
        and torch.Tag.nondeterministic_seeded not in tags
    )


def _constant(program: ExportedProgram, name: str, value: torch.Tensor) -> torch.fx.Node:
    """Insert a constant: a call for one number, else an input that the program stores."""
    graph = program.graph
    if value.numel() == 1:
        return graph.call_function(
            aten.full.default, (list(value.shape), value.item()), {"dtype": value.dtype, "device": value.device}
        )
    with graph.inserting_before(next(iter(graph.nodes))):
        node = graph.placeholder(name)
    spec = InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(name=node.name), node.name)
    program.graph_signature.input_specs.insert(0, spec)
    program.constants[node.name] = value.detach().clone().contiguous()
    return node


def _align_ranks(module: torch.fx.GraphModule) -> None:
    """Give the operands of pointwise operators the result's number of dimensions."""
    graph = module.graph
    for node in list(graph.nodes):
        result = node.meta.get("val")
        if node.op != "call_function" or not isinstance(result, torch.Tensor):
            continue
        if getattr(node.target, "namespace", "") != "aten" or _name_of(node.target) not in _BROADCAST:
            continue
        for operand in [one for one in node.all_input_nodes if isinstance(one.meta.get("val"), torch.Tensor)]:
            missing = result.dim() - operand.meta["val"].dim()
            widened = operand
            with graph.inserting_before(node):
                for _ in range(missing):
                    value = widened.meta["val"].unsqueeze(0)
                    widened = graph.call_function(aten.unsqueeze.default, (widened, 0))
                    widened.meta["val"] = value
            if missing:
                node.replace_input_with(operand, widened)
    module.recompile()


def _state_sizes(program: ExportedProgram) -> None:
    """Give the new recurrent states their fixed sizes, which the converter forgets after some operators.

    It refuses to write a tensor of unknown sizes to a state, such as the last state of a scan over a dynamic length.
    """
    written, graph = program.graph_signature.buffers_to_mutate, program.graph
    output = graph.output_node()
    for node in output.all_input_nodes:
        # Not keys and values, which are written in place.
        if not written.get(node.name, "").rpartition("_")[0].endswith("state"):
            continue
        with graph.inserting_before(output):
            fixed = graph.call_function(aten.view.default, (node, list(node.meta["val"].shape)))
        fixed.meta["val"] = node.meta["val"]
        output.replace_input_with(node, fixed)
        for spec in program.graph_signature.output_specs:
            if spec.arg.name == node.name:
                spec.arg.name = fixed.name
    program.graph_module.recompile()


def _name_of(operator: Any) -> str:
    return operator.name().removeprefix("aten::").partition(".")[0]
