"""One rank's part of a whole model, for programs: its weights cut by transformers' plan, and sums that files can hold.

Transformers splits a model in processes that talk to each other, into tensors (`DTensor`) and sums that no file has.
Here one process makes the part of any rank, without a group: ordinary tensors, and functional collectives that name
one. Gathers are sums over zeros as well, since AOTInductor has no other collective for the CPU (torch 2.13).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..common.compat.torch_distributed import sum_in_graph
from ..errors import UnsupportedModelError
from .ranks import PartOf, name_in_plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Styles of transformers' plans (5.23) that cut weights: the dimension, and how many groups are packed along it.
_CUTS: dict[str, tuple[int, int]] = {
    "colwise": (-2, 1),
    "colwise_gather_output": (-2, 1),
    "colwise_rep": (-2, 1),
    "packed_colwise": (-2, 2),
    "rowwise": (-1, 1),
    "rowwise_rep": (-1, 1),
    "rowwise_split_input": (-1, 1),
    "packed_rowwise": (-1, 2),
    "embedding_rowwise": (-2, 1),
    "embedding_colwise": (-1, 1),
}
#: Those that change nothing of a forward without gradients.
_AS_IT_IS = ("colwise", "packed_colwise", "packed_rowwise", "mla_kv_a_proj", "local_params", "replicate")
_ROWWISE = ("rowwise", "rowwise_rep", "rowwise_split_input")


@dataclass(frozen=True)
class RankOf:
    """A rank of several.

    Attributes:
        rank: From 0.
        size: How many there are.
    """

    rank: int
    size: int

    def span(self, length: int) -> tuple[int, int]:
        """First index and length of this rank's part of a dimension: equal parts, except the last ones."""
        each = -(-length // self.size)
        first = min(self.rank * each, length)
        return first, min(each, length - first)


def part_of_model(model: PreTrainedModel, one: RankOf) -> PreTrainedModel:
    """Return a copy of a model with a rank's part of its weights; whole weights are shared with the original.

    Trace it before use: without tracing it sums nothing, so that shapes are right and values are not.

    Args:
        model: In one process, in eval mode.
        one: The rank.

    Raises:
        UnsupportedModelError: If transformers' plan of it has a style that programs do not have.
    """
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    part = copy.deepcopy(model, shared)
    plan, cut = dict(model.tp_plan), _Cutter(one)
    for name, module in part.named_modules():
        style = plan.get(name_in_plan(name))
        # Counted before the weight is cut, because the bias is cut after it, into the same heads.
        whole_heads = _heads(part, name)
        for field, parameter in list(module.named_parameters(recurse=False)):
            of_parameter = plan.get(name_in_plan(f"{name}.{field}"), style)
            if of_parameter in _CUTS:
                heads = whole_heads if of_parameter == "colwise" else None
                own = cut.parameter(parameter, of_parameter, field == "bias", heads)
                setattr(module, field, own)
                if heads is not None and heads < one.size and field == "weight" and name.endswith("k_proj"):
                    _fewer_queries(part.get_submodule(name.rpartition(".")[0]), one.size // heads)
        if style is not None:
            _wrap(name, module, style, one)
    return part


def _heads(model: nn.Module, name: str) -> int | None:
    """Return the number of heads of a whole projection of keys or values; None of other modules."""
    parent, _, last = name.rpartition(".")
    if last not in ("k_proj", "v_proj"):
        return None
    head_dim = getattr(model.get_submodule(parent), "head_dim", None)
    weight = getattr(model.get_submodule(name), "weight", None)
    if not isinstance(head_dim, int) or weight is None or weight.shape[0] % head_dim:
        return None
    return weight.shape[0] // head_dim


def _fewer_queries(attention: nn.Module, ranks: int) -> None:
    """Tell an attention module, whose heads of keys are each kept by `ranks` ranks, how many queries share one here.

    Its own attention functions repeat keys by that number; ours go by shapes.
    """
    groups = getattr(attention, "num_key_value_groups", None)
    if isinstance(groups, int):
        attention.num_key_value_groups = max(groups // ranks, 1)  # type: ignore[assignment]


class _Cutter:
    """Cuts parameters; one that two modules share is cut once, if both cut it alike."""

    def __init__(self, one: RankOf) -> None:
        self._one = one
        # The originals are kept by the model that is cut.
        self._parts: dict[tuple, nn.Parameter] = {}

    def parameter(self, whole: nn.Parameter, style: str, is_bias: bool, heads: int | None) -> nn.Parameter:
        if is_bias and style in _ROWWISE:
            # It is added once, before the sum.
            return whole if self._one.rank == 0 else nn.Parameter(torch.zeros_like(whole), requires_grad=False)
        dim, groups = _CUTS[style]
        dim = max(whole.dim() + dim, 0)
        key = (id(whole), dim, groups, heads)
        if key not in self._parts:
            self._parts[key] = self._cut(whole, dim, groups, heads)
        return self._parts[key]

    def _cut(self, whole: nn.Parameter, dim: int, groups: int, heads: int | None) -> nn.Parameter:
        if heads is not None and heads < self._one.size:
            # Several ranks keep the same head: the one that their queries meet.
            length = whole.shape[dim] // heads
            first = self._one.rank // (self._one.size // heads) * length
        else:
            first, length = self._one.span(whole.shape[dim] // groups)
        each = whole.shape[dim] // groups
        pieces = [whole.detach().narrow(dim, group * each + first, length) for group in range(groups)]
        # A copy, also of one piece: a view would keep the whole.
        own = nn.Parameter(torch.cat(pieces, dim).clone(memory_format=torch.contiguous_format), requires_grad=False)
        own.part_of = PartOf(tuple(whole.shape), dim, first, None)  # type: ignore[attr-defined]
        return own


def _wrap(name: str, module: nn.Module, style: str, one: RankOf) -> None:
    """Put what ranks owe each other around a module's forward."""
    if style in _AS_IT_IS or style == "replicated_with_grad_allreduce":
        return
    made = _WRAPPERS.get(style)
    if made is None:
        raise UnsupportedModelError(
            f"transformers' plan splits {name} in the style {style!r}, which programs of ranks do not have; run the "
            "model in a live session over ranks (docs/guides/parallel.md)"
        )
    module.forward = made(module, module.forward, one)


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    # Where a cache is allocated a token runs through the part alone, for shapes.
    return sum_in_graph(tensor) if torch.compiler.is_compiling() else tensor


def _gathered(tensor: torch.Tensor, length: int, one: RankOf) -> torch.Tensor:
    """Parts of a last dimension side by side, as the sum of each between zeros."""
    first, own = one.span(length)
    return _sum(nn.functional.pad(tensor, (first, length - first - own)))


def _summed(module: nn.Module, forward: Callable[..., Any], one: RankOf) -> Callable[..., Any]:
    return lambda *args, **kwargs: _sum(forward(*args, **kwargs))


def _summed_of_own_inputs(module: nn.Module, forward: Callable[..., Any], one: RankOf) -> Callable[..., Any]:
    def run(given: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        first, length = one.span(given.shape[-1])
        return _sum(forward(given.narrow(-1, first, length), *args, **kwargs))

    return run


def _gathered_outputs(module: nn.Module, forward: Callable[..., Any], one: RankOf) -> Callable[..., Any]:
    length: Any = getattr(module, "out_features", None) or module.embedding_dim
    return lambda *args, **kwargs: _gathered(forward(*args, **kwargs), length, one)


def _own_rows(module: nn.Module, forward: Callable[..., Any], one: RankOf) -> Callable[..., Any]:
    """Look tokens up in a table that has a part of them."""
    rows_of_all: Any = module.num_embeddings
    first, length = one.span(rows_of_all)
    # Unset, because its row may be on another rank.
    module.padding_idx = None  # type: ignore[assignment]

    def run(ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        own = ids - first
        has = (own >= 0) & (own < length)
        rows = forward(torch.where(has, own, 0), *args, **kwargs)
        return _sum(rows.masked_fill(~has[..., None], 0))

    return run


def _divided(module: nn.Module, forward: Callable[..., Any], one: RankOf) -> Callable[..., Any]:
    return lambda given, *args, **kwargs: forward(given / one.size, *args, **kwargs)


_WRAPPERS: dict[str, Callable[[nn.Module, Callable[..., Any], RankOf], Callable[..., Any]]] = {
    "rowwise": _summed,
    "all_reduce": _summed,
    "moe_tp_experts": _summed,
    "rowwise_rep": _summed_of_own_inputs,
    "rowwise_split_input": _summed_of_own_inputs,
    "colwise_gather_output": _gathered_outputs,
    "colwise_rep": _gathered_outputs,
    "embedding_colwise": _gathered_outputs,
    "embedding_rowwise": _own_rows,
    "moe_identity_expert": _divided,
}
