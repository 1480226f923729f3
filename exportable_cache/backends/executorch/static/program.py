"""Programs in the static form, as NPUs want them: every size is fixed, and the host keeps the cache.

A method takes int32 token ids, additive masks, rows of rotary tables, and each layer's keys and values. It returns the
logits of its last token, and the keys and values of its new tokens alone, which the host writes into the cache. So a
graph has no state, no write at a position, no size that changes and no int64. ExecuTorch's
`examples/models/llama/static_attention.py` has the same division between graph and host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from ....cache.attention.implementation import attention_of
from ....cache.layers import CacheLayer
from ....cache.policies import FullPolicy, RingPolicy
from ....common.tensors import name_forward
from ....errors import UnsupportedModelError, describe_trace_error
from ....models.experts import register_quantized_experts
from ....models.patches.registry import patch_model
from ....models.positions import takes_positions
from ....models.quantized_rows import is_quantized
from .plan import MASKS, StaticLayer, StaticPlan

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from transformers import PreTrainedModel

    from ....program.methods import ProgramMethod
    from ....program.program import Program

REMEDY = "export without form='static' (-O form=static)"
_FULL, _SLIDING = MASKS


class _GivenLayer(CacheLayerMixin):
    """A layer whose old keys and values are given; `new` has those of the step.

    Args:
        keys: Old keys [1, heads, slots, size]; None without a past.
        values: Old values, of the same shape but the size.
        positions: Positions of the new tokens, int32 [1, tokens]; None if no model code needs the number of old tokens.
    """

    def __init__(
        self, keys: torch.Tensor | None, values: torch.Tensor | None, positions: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.positions = positions
        self.past = None if keys is None or values is None else (keys, values)
        self.new: tuple[torch.Tensor, torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None: ...

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the given keys and values, followed by the new ones."""
        self.new = key_states, value_states
        if self.past is None:
            return self.new
        return torch.cat([self.past[0], key_states], 2), torch.cat([self.past[1], value_states], 2)

    def get_seq_length(self) -> torch.Tensor | int:  # type: ignore[override]
        """Return the number of old tokens, from which some models count their positions; 0-D."""
        return 0 if self.positions is None else self.positions[0, 0]

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


class _GivenRotary(nn.Module):
    """A rotary embedding that returns the rows of a table which the host selected.

    Args:
        original: The model's module.
        given: Rows by key, [1, tokens, size] each; a key is this module's name and the call's further arguments.
        name: Name of the module.
    """

    def __init__(self, original: nn.Module, given: dict[Any, Any], name: str) -> None:
        super().__init__()
        self._parts = (original, given, name)
        # Granite with windows chooses the embedding of a layer by it.
        self.config = getattr(original, "config", None)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor | None = None, *rest: Any, **named: Any) -> Any:
        original, given, name = self._parts
        key = (name, *rest, *named.items())
        if key not in given:
            given[key] = None
        if given[key] is not None:
            return given[key]
        return original(x, position_ids, *rest, **named)


@contextmanager
def _given_rotaries(model: nn.Module, given: dict[Any, Any]) -> Iterator[None]:
    """Replace the model's rotary embeddings in a block; calls without an entry in `given` add one that is None."""
    found = [name for name, one in model.named_modules() if type(one).__name__.endswith("RotaryEmbedding")]
    originals = {name: model.get_submodule(name) for name in found}
    for name, original in originals.items():
        model.set_submodule(name, _GivenRotary(original, given, name))
    try:
        yield
    finally:
        for name, original in originals.items():
            model.set_submodule(name, original)


class StaticModule(nn.Module):
    """One method over a plan; `forward` takes `StaticPlan.inputs`."""

    def __init__(self, model: PreTrainedModel, plan: StaticPlan, keys: Sequence[Any]) -> None:
        super().__init__()
        self.model, self.plan, self.keys = model, plan, keys
        name_forward(self, plan.inputs)

    def call(self, input_ids: torch.Tensor, **given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute logits [1, vocab], and each layer's new keys and values."""
        plan = self.plan
        if is_quantized(self.model.get_input_embeddings().weight):
            # ExecuTorch's operator takes no int32, and ends the process.
            input_ids = input_ids.to(torch.int64)
        positions = given.get("positions")
        layers = [
            _GivenLayer(given[f"layers_{index}_keys"], given[f"layers_{index}_values"], positions)
            for index in range(len(plan.layers))
        ]
        if plan.transposed:
            for layer in layers:
                assert layer.past is not None
                layer.past = layer.past[0].transpose(2, 3), layer.past[1]
        rows = [given[name] for name in plan.tables]
        rotary = dict(zip(self.keys, zip(rows[::2], rows[1::2], strict=True), strict=True))
        with _given_rotaries(self.model, rotary):
            logits = _run(self.model, input_ids, {name: given[name] for name in plan.masks}, layers, positions)
        new = [tensor for layer in layers for tensor in _new_of(layer, plan.transposed)]
        return (logits[:, -1], *new)


def _run(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    masks: Mapping[str, torch.Tensor],
    layers: Sequence[_GivenLayer],
    positions: torch.Tensor | None,
) -> torch.Tensor:
    if positions is None:
        positions = torch.arange(input_ids.shape[1], dtype=torch.int32)[None]
    # Models without kinds of layers take one mask.
    mask = next(iter(masks.values())) if len(masks) == 1 else dict(masks)
    # Others count from `_GivenLayer.get_seq_length`, as the RoBERTa family does from its padding index.
    further = {"position_ids": positions} if takes_positions(model) else {}
    output = model(
        input_ids=input_ids,
        attention_mask=mask,
        **further,
        past_key_values=Cache(layers=list(layers)),
        use_cache=True,
        logits_to_keep=1,
    )
    return output.logits


def _new_of(layer: _GivenLayer, transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    assert layer.new is not None
    keys, values = layer.new
    return (keys.transpose(2, 3) if transposed else keys).contiguous(), values.contiguous()


@torch.no_grad()
def static_programs(
    program: Program, transposed: bool
) -> tuple[dict[str, ExportedProgram], StaticPlan, dict[str, torch.Tensor]]:
    """Trace each method of a program in the static form.

    Args:
        program: Program whose methods have fixed lengths.
        transposed: True to give and return keys as [1, heads, key size, slots].

    Returns:
        The graphs by method, what the host must know, and the rotary tables by name, [positions, size].

    Raises:
        UnsupportedModelError: If a layer is neither full nor a sliding window over plain keys and values, or the
            model's code cannot be traced so.
    """
    model = program.model
    patch_model(model)
    layers = [_layer(model, index, layer) for index, layer in enumerate(program.cache.layers)]
    with attention_of(model, "eager", register_quantized_experts()):
        try:
            keys = _rotary_calls(model, layers)
            most = max((layer.slots for layer in layers if layer.window is None), default=0)
            most = most or model.config.get_text_config(decoder=True).max_position_embeddings
            tables = _tables(model, keys, most)
            plan = StaticPlan(layers, list(tables), positions=True, transposed=transposed)
            # The shortest method tells whether positions are read, because all run the same code.
            shortest = min(program.methods.values(), key=lambda method: method.max_length)
            plan = replace(plan, positions=_uses_positions(_traced(model, plan, keys, tables, shortest)))
            graphs = {name: _traced(model, plan, keys, tables, method) for name, method in program.methods.items()}
        except UnsupportedModelError:
            raise
        except Exception as error:  # any model code runs here
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot be traced in the static form ({describe_trace_error(error)}); {REMEDY}"
            ) from error
    return graphs, plan, tables


def _layer(model: PreTrainedModel, index: int, layer: Any) -> StaticLayer:
    kind = type(layer).__name__
    if isinstance(layer, CacheLayer):
        policy, tensors = layer.policy, dict(layer.named_state())
        kind = f"of policy {policy.kind!r} with {', '.join(tensors)}"
        if isinstance(policy, FullPolicy | RingPolicy) and tensors.keys() <= {"keys", "values", "cumulative_length"}:
            keys, values = tensors["keys"], tensors["values"]
            if keys.is_floating_point() and keys.dim() == 4:
                window = policy.window if isinstance(policy, RingPolicy) else None
                return StaticLayer(
                    mask=_FULL if window is None else _SLIDING,
                    slots=policy.slot_count,
                    window=window,
                    heads=keys.shape[1],
                    key_size=keys.shape[3],
                    value_size=values.shape[3],
                )
    raise UnsupportedModelError(
        f"the static form needs layers of full attention or of a sliding window over float keys and values, and layer "
        f"{index} of {type(model).__name__} is {kind}; {REMEDY}"
    )


def _rotary_calls(model: PreTrainedModel, layers: Sequence[StaticLayer]) -> list[Any]:
    """Run one token without a past, and return the keys of the calls of rotary embeddings, in order.

    Raises:
        UnsupportedModelError: If the model writes other keys and values than the layers have.
    """
    given: dict[Any, Any] = {}
    empty = [_GivenLayer(None, None) for _ in layers]
    zeros = {name: torch.zeros(1, 1, 1, 1, dtype=model.dtype) for name in {layer.mask for layer in layers}}
    with _given_rotaries(model, given):
        _run(model, torch.zeros(1, 1, dtype=torch.int32), zeros, empty, None)
    for index, (expected, layer) in enumerate(zip(layers, empty, strict=True)):
        found = None if layer.new is None else [tuple(tensor.shape) for tensor in layer.new]
        shapes = [(1, expected.heads, 1, size) for size in (expected.key_size, expected.value_size)]
        if found != shapes:
            raise UnsupportedModelError(
                f"layer {index} of {type(model).__name__} must write keys and values of {shapes[0]} and {shapes[1]} "
                f"for a token in the static form, got {found or 'nothing'}; {REMEDY}"
            )
    return list(given)


def _tables(model: PreTrainedModel, keys: Sequence[Any], most: int) -> dict[str, torch.Tensor]:
    """Return cosines and sines of all positions by name, [positions, size]."""
    tables: dict[str, torch.Tensor] = {}
    x = torch.zeros(1, 1, 1, dtype=model.dtype)
    for index, (name, *rest) in enumerate(keys):
        module = model.get_submodule(name)
        arguments = [one for one in rest if not isinstance(one, tuple)]
        named: dict[str, Any] = dict(one for one in rest if isinstance(one, tuple))
        found = module(x, torch.arange(most, dtype=torch.int64)[None], *arguments, **named)
        if not isinstance(found, tuple) or len(found) != 2 or found[0].is_complex() or found[0].dim() != 3:
            raise UnsupportedModelError(
                f"{name} of {type(model).__name__} must return cosines and sines [1, tokens, size] in the static form; "
                f"{REMEDY}"
            )
        tables |= {f"rope_{index}_cos": found[0][0].contiguous(), f"rope_{index}_sin": found[1][0].contiguous()}
    return tables


def _traced(
    model: PreTrainedModel,
    plan: StaticPlan,
    keys: Sequence[Any],
    tables: Mapping[str, torch.Tensor],
    method: ProgramMethod,
) -> ExportedProgram:
    length, dtype = method.max_length, model.dtype
    slots = {layer.mask: layer.slots for layer in plan.layers}
    inputs = [torch.zeros(1, length, dtype=torch.int32)] * (1 + plan.positions)
    inputs += [torch.zeros(1, 1, length, slots[name] + length, dtype=dtype) for name in plan.masks]
    inputs += [table[None, :length] for table in tables.values()]
    for layer in plan.layers:
        keys_shape = (layer.key_size, layer.slots) if plan.transposed else (layer.slots, layer.key_size)
        inputs += [
            torch.zeros(1, layer.heads, *keys_shape, dtype=dtype),
            torch.zeros(1, layer.heads, layer.slots, layer.value_size, dtype=dtype),
        ]
    # Distinct tensors, because the tracer takes equal ones for one input.
    return _with_wide_gathers(
        torch.export.export(StaticModule(model, plan, keys), tuple(one.clone() for one in inputs))
    )


def _with_wide_gathers(program: ExportedProgram) -> ExportedProgram:
    """Gather by int64, in place, because ExecuTorch's operator refuses the int32 that positions have."""
    graph = program.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.gather.default):
        index = node.args[2]
        if index.meta["val"].dtype == torch.int32:
            with graph.inserting_before(node):
                wide = graph.call_function(torch.ops.aten.to.dtype, (index, torch.int64))
            wide.meta["val"] = index.meta["val"].to(torch.int64)
            node.update_arg(2, wide)
    program.graph_module.recompile()
    return program


def _uses_positions(graph: ExportedProgram) -> bool:
    nodes = graph.graph.find_nodes(op="placeholder")
    return any(node.users for node in nodes if node.name == "positions")
