"""Memory and messages of a rank of a tensor parallel model, by transformers' plan of the model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..errors import InputError, UnsupportedModelError
from .heads import check_type, heads_of

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from ..cache.layer_spec import LayerSpec

#: Styles of transformers' plans (5.23): by columns, by rows, and of tables that tokens are looked up in.
_COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep", "packed_colwise")
_ROWS = ("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise")
_TABLES = {"embedding_rowwise": 0, "embedding_colwise": 1}
#: Those whose output is summed, and those whose output is gathered.
_SUMMED = ("rowwise", "rowwise_rep", "rowwise_split_input", "embedding_rowwise", "all_reduce", "moe_tp_experts")
_GATHERED = ("colwise_gather_output", "colwise_rep", "embedding_colwise")
_KEYS = ("k_proj", "qkv_proj", "query_key_value")
_QUERIES = ("q_proj", "q_b_proj", *_KEYS)
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class RankPlan:
    """One rank of several, by transformers' plan.

    Attributes:
        ranks: How many there are.
        weights_bytes: Of the rank with the most.
        cache_bytes: Of each rank.
        split_layers: Layers of which a rank keeps its own heads; every rank keeps all of the others. Fewer heads than
            ranks are kept by several each.
        replicated_bytes: What every rank keeps alike of the cache.
        messages: Collective operations of a decode step: sums of the layers and of the embedding, parts of the logits
            that are gathered, and the token that ranks agree on.
        sums: Those among them that are all-reduces.
        message_bytes: What they are of, together.
        sent_bytes: What a rank sends at least: an all-reduce takes twice its bytes except a rank's own part, a gather
            the part.
    """

    ranks: int
    weights_bytes: int
    cache_bytes: int
    split_layers: tuple[int, ...]
    replicated_bytes: int
    messages: int
    sums: int
    message_bytes: int
    sent_bytes: int


def check_tensor_parallel(model: PreTrainedModel, layer_specs: Sequence[LayerSpec], ranks: int) -> None:
    """Refuse a number of ranks that cannot have equal parts of the model's heads.

    Raises:
        InputError: If it is not an int of at least 2, or does not divide the heads.
        UnsupportedModelError: If transformers has no plan of the model.
    """
    if type(ranks) is not int or ranks < 2:
        raise InputError(f"tensor_parallel must be an int of at least 2, got {ranks!r}; leave it out for one process")
    check_type(model.config)
    if not model.tp_plan:
        raise UnsupportedModelError(
            f"transformers has no tensor parallel plan of {type(model).__name__}; leave out tensor_parallel, or split "
            "it by torch's parallelize_module"
        )
    split = {layer_specs[index].num_heads for index in split_layers(model, layer_specs)}
    # Of fewer heads than ranks each is kept by several ranks.
    heads = [count for count in split if count is not None and (count % ranks == 0 or ranks % count)]
    queries = heads_of(model.config.get_text_config(decoder=True))
    if isinstance(queries, int) and any(name.rsplit(".", 1)[-1] in _QUERIES for name in model.tp_plan):
        heads.append(queries)
    if any(count % ranks for count in heads):
        least = math.gcd(*heads)
        fits = [str(size) for size in range(1, least + 1) if least % size == 0]
        raise InputError(
            f"{ranks} ranks cannot have equal parts of {' and '.join(map(str, sorted(set(heads))))} heads; "
            f"use {' or '.join(fits)}"
        )


def split_layers(model: PreTrainedModel, layer_specs: Sequence[LayerSpec]) -> tuple[int, ...]:
    """Layers of which each rank would keep its own heads: those whose projection of keys is split by columns."""
    found = set()
    for name, style, _ in _parts(model):
        number = _LAYER.search(name)
        if number is None or style != "colwise" or int(number[1]) >= len(layer_specs):
            continue
        heads, last = layer_specs[int(number[1])].num_heads, name.rsplit(".", 1)[-1]
        # What expands latents gives keys only where those are kept, of more than one head.
        if heads is not None and (last in _KEYS or last == "kv_b_proj" and heads > 1):
            found.add(int(number[1]))
    return tuple(sorted(found))


def weights_of_rank(
    model: PreTrainedModel,
    layer_specs: Sequence[LayerSpec],
    ranks: int,
    dtype: torch.dtype,
) -> int:
    """Return the bytes of the weights of the rank that has most."""
    heads = min((layer_specs[index].num_heads or 0 for index in split_layers(model, layer_specs)), default=0)
    plan, count = model.tp_plan, 0
    for name, parameter in model.named_parameters():
        module, _, last = name.rpartition(".")
        style = plan.get(_wild(name), plan.get(_wild(module)))
        parts = ranks
        if style == "colwise" and module.rsplit(".", 1)[-1] in ("k_proj", "v_proj") and heads:
            parts = min(ranks, heads)
        count += _part(parameter, style, last == "bias", parts)
    return count * dtype.itemsize


def _part(parameter: torch.Tensor, style: str | None, is_bias: bool, ranks: int) -> int:
    """Elements of a parameter that a rank has at most."""
    if style in _COLUMNS:
        dim = max(parameter.ndim - 2, 0)
    elif style in _TABLES:
        dim = _TABLES[style]
    elif style in _ROWS and not is_bias:
        dim = parameter.ndim - 1
    else:
        return parameter.numel()
    return parameter.numel() // parameter.shape[dim] * math.ceil(parameter.shape[dim] / ranks)


def messages_of_token(
    model: PreTrainedModel, ranks: int, rows: int, dtype: torch.dtype
) -> Iterator[tuple[str, int, int]]:
    """Yield each collective operation of a decode step: its kind, its bytes, and bytes that a rank sends."""
    hidden = model.config.get_text_config(decoder=True).hidden_size
    for _, style, module in _parts(model):
        width = getattr(module, "out_features", None) or getattr(module, "embedding_dim", None) or hidden
        size = rows * width * dtype.itemsize
        if style in _SUMMED and not isinstance(module, torch.nn.Parameter):
            yield "sum", size, 2 * size * (ranks - 1) // ranks
        elif style in _GATHERED:
            yield "gather", size, size * (ranks - 1) // ranks
    yield "token", 8 * rows, 8 * rows


def _parts(model: PreTrainedModel) -> Iterator[tuple[str, str, nn.Module | nn.Parameter]]:
    """Modules and parameters that the plan names, with their style."""
    plan = model.tp_plan
    for name, part in (*model.named_modules(), *model.named_parameters()):
        style = plan.get(_wild(name))
        if style is not None:
            yield name, style, part


def _wild(name: str) -> str:
    """Return a name in the form of plans: `model.layers.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
