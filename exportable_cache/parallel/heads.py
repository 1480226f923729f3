"""Parts of each layer's state that a rank keeps, key/value heads that several ranks repeat, and a rank's memory.

Memory and messages of a rank are computed from transformers' plan of the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..common.compat.transformers import is_split_by_transformers
from ..errors import InputError, UnsupportedModelError
from .ranks import PartOf, is_split, name_in_plan, part_of, split_tensor, whole_shape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from ..cache.layer_spec import LayerSpec
    from .rank_model import RankOf
    from .ranks import Ranks

#: Names of the projections of attention in transformers' models: of queries, and of keys or values.
_QUERIES = ("q_proj", "q_b_proj")
_KEYS = ("k_proj", "v_proj", "kv_b_proj")
#: Types whose tiny models, split by transformers' plan over two ranks, gave other logits than whole (5.23).
_WRONG_WHEN_SPLIT = ("gemma3n", "gemma3n_text", "hrm_text")


def check_heads(model: PreTrainedModel, ranks: Ranks) -> None:
    """Refuse weights that were cut through a head, or whose queries and keys were not cut alike.

    Raises:
        UnsupportedModelError: If the weights were; the message has the numbers.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} is an encoder-decoder, of which there are no parallel sessions; load it without a "
            "tensor parallel plan"
        )
    check_type(model.config)
    for name, module in model.named_modules():
        queries, keys = _split_of(module, _QUERIES), _split_of(module, _KEYS)
        if queries and keys and any(queries) != any(keys):
            whole, cut = ("keys and values", "queries") if any(queries) else ("queries", "keys and values")
            raise UnsupportedModelError(
                f"{name} has its {cut} split over {ranks.size} ranks and its {whole} not, so that queries would meet "
                "the keys of other heads; split both, or neither"
            )
        if any(keys):
            _check_divides(name, module, model, ranks)


def check_type(config: PreTrainedConfig) -> None:
    """Refuse models that are wrong when they are split.

    Raises:
        UnsupportedModelError: If the model is one of them.
    """
    found = {config.model_type, config.get_text_config(decoder=True).model_type} & set(_WRONG_WHEN_SPLIT)
    if found:
        raise UnsupportedModelError(
            f"{found.pop()!r} gives other logits when transformers' plan splits it over ranks than in one process; run "
            "it in one process"
        )


def heads_of(config: PreTrainedConfig) -> int | None:
    """Return the number of attention heads in a config, or None if it is absent or differs by layer."""
    try:
        return config.num_attention_heads
    except Exception:  # transformers raises a class of its own where layers differ
        return None


def _split_of(module: nn.Module, names: Sequence[str]) -> list[bool]:
    found = (getattr(module, name, None) for name in names)
    weights = (getattr(one, "weight", None) for one in found)
    return [is_split(weight) for weight in weights if weight is not None]


def _check_divides(name: str, module: nn.Module, model: PreTrainedModel, ranks: Ranks) -> None:
    config = model.config.get_text_config(decoder=True)
    queries = heads_of(config)
    keys = getattr(module, "k_proj", None)
    head_dim = getattr(module, "head_dim", None)
    heads = queries
    if keys is not None and isinstance(head_dim, int):
        heads = whole_shape(keys.weight)[0] // head_dim
    # Those that are fewer than ranks, and that ranks divide, have been repeated.
    repeated = keys is not None and part_of(keys.weight) is not None
    for kind, count in (("key and value heads", None if repeated else heads), ("attention heads", queries)):
        if isinstance(count, int) and count % ranks.size:
            raise UnsupportedModelError(
                f"{name} has {count} {kind}, which {ranks.size} ranks cannot have equal parts of; "
                f"use {_divisors(count, queries)} ranks"
            )


def _divisors(heads: int, queries: int | None) -> str:
    found = [size for size in range(1, heads + 1) if heads % size == 0 and (queries or heads) % size == 0]
    return str(found[0]) if len(found) == 1 else f"{', '.join(map(str, found[:-1]))} or {found[-1]}"


def parts_of_heads(
    model: PreTrainedModel,
    local: Sequence[LayerSpec],
    ranks: Ranks | RankOf,
    specs_of: Callable[[PreTrainedConfig], Sequence[LayerSpec]],
) -> tuple[int, ...]:
    """Return the number of parts that each layer's heads are cut into.

    It is the number of ranks; fewer, if several ranks keep the same head; 1, if all ranks keep all of the layer.

    Args:
        model: The model, split over ranks.
        local: Specs of the layers on this rank.
        ranks: The ranks.
        specs_of: Function that returns the layers' specs of a whole model from its config.

    Raises:
        UnsupportedModelError: If a rank keeps neither all of a layer nor its share of the heads.
    """
    try:
        whole = specs_of(model.config)
    except (InputError, UnsupportedModelError) as error:
        raise UnsupportedModelError(
            f"the layers of {model.config.model_type!r} must be known from its config to split them over {ranks.size} "
            f"ranks, got an error ({error}); run it in one process"
        ) from error
    return tuple(_parts(index, *pair, ranks) for index, pair in enumerate(zip(local, whole, strict=True)))


def _parts(index: int, local: LayerSpec, whole: LayerSpec, ranks: Ranks | RankOf) -> int:
    others = [one.name for one in fields(local) if _sizes(local, one.name) != _sizes(whole, one.name)]
    if not others:
        return 1
    if others == ["num_heads"]:
        own, heads = local.num_heads or 0, whole.num_heads or 0
        if own * ranks.size == heads:
            return ranks.size
        if own == 1 and ranks.size % heads == 0:
            return heads
    kept = ", ".join(f"{name} {_sizes(local, name)} of {_sizes(whole, name)}" for name in others)
    raise UnsupportedModelError(
        f"layer {index} keeps {kept} on rank {ranks.rank} of {ranks.size}; only key and value heads are kept in parts: "
        "leave the projections of that layer's states whole, or gather what they give"
    )


def _sizes(layer_spec: LayerSpec, name: str) -> Any:
    """Return a field of a layer spec; of states only the shapes, because a config does not say the loading dtype."""
    value = getattr(layer_spec, name)
    return [one and one.shape for one in value] if name in ("conv_states", "recurrent_states") else value


_PROJECTIONS = ("k_proj", "v_proj")


@torch.no_grad()
def repeat_heads(model: PreTrainedModel, ranks: Ranks) -> None:
    """Give each rank the whole of the key and value head that its queries meet, where ranks have cut through heads.

    Transformers cuts the rows of these projections into equal parts and ignores heads: with two heads of 64 over four
    ranks each has half a head, and the model does not run. Its weights are changed in place, once; a model whose heads
    divide is left alone, and so is one that ranks do not divide either.

    Args:
        model: Split by transformers' own plan.
        ranks: The processes, all of which have to call this.
    """
    for module in model.modules():
        head_dim = getattr(module, "head_dim", None)
        projections = [getattr(module, name, None) for name in _PROJECTIONS]
        if not isinstance(head_dim, int) or not all(
            isinstance(one, nn.Linear) and is_split_by_transformers(one) for one in projections
        ):
            continue
        rows = projections[0].weight.shape[0]  # type: ignore[union-attr]
        heads = rows // head_dim
        if rows % head_dim or heads == 0 or heads % ranks.size == 0 or ranks.size % heads:
            continue
        for projection in projections:
            assert projection is not None
            _take_head(projection, heads, ranks)


def _take_head(projection: nn.Module, heads: int, ranks: Ranks) -> None:
    for name, parameter in list(projection.named_parameters(recurse=False)):
        split = split_tensor(parameter)
        if split is None or part_of(parameter) is not None:
            continue
        size = split.shape[0] // heads
        first = ranks.rank // (ranks.size // heads) * size
        own = nn.Parameter(split.full_tensor()[first : first + size].clone(), requires_grad=False)
        own.part_of = PartOf(tuple(split.shape), 0, first, ranks.group)  # type: ignore[attr-defined]
        setattr(projection, name, own)


#: Styles of transformers' plans (5.23): by columns, by rows, and of tables that tokens are looked up in.
_COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep", "packed_colwise")
_ROWS = ("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise")
_TABLES = {"embedding_rowwise": 0, "embedding_colwise": 1}
#: Those whose output is summed, and those whose output is gathered.
_SUMMED = ("rowwise", "rowwise_rep", "rowwise_split_input", "embedding_rowwise", "all_reduce", "moe_tp_experts")
_GATHERED = ("colwise_gather_output", "colwise_rep", "embedding_colwise")
_PLANNED_KEYS = ("k_proj", "qkv_proj", "query_key_value")
_PLANNED_QUERIES = ("q_proj", "q_b_proj", *_PLANNED_KEYS)
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
    if isinstance(queries, int) and any(name.rsplit(".", 1)[-1] in _PLANNED_QUERIES for name in model.tp_plan):
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
    for name, style, _ in _planned(model):
        number = _LAYER.search(name)
        if number is None or style != "colwise" or int(number[1]) >= len(layer_specs):
            continue
        heads, last = layer_specs[int(number[1])].num_heads, name.rsplit(".", 1)[-1]
        # What expands latents gives keys only where those are kept, of more than one head.
        if heads is not None and (last in _PLANNED_KEYS or last == "kv_b_proj" and heads > 1):
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
        style = plan.get(name_in_plan(name), plan.get(name_in_plan(module)))
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
    for _, style, module in _planned(model):
        width = getattr(module, "out_features", None) or getattr(module, "embedding_dim", None) or hidden
        size = rows * width * dtype.itemsize
        if style in _SUMMED and not isinstance(module, torch.nn.Parameter):
            yield "sum", size, 2 * size * (ranks - 1) // ranks
        elif style in _GATHERED:
            yield "gather", size, size * (ranks - 1) // ranks
    yield "token", 8 * rows, 8 * rows


def _planned(model: PreTrainedModel) -> Iterator[tuple[str, str, nn.Module | nn.Parameter]]:
    """Modules and parameters that the plan names, with their style."""
    plan = model.tp_plan
    for name, part in (*model.named_modules(), *model.named_parameters()):
        style = plan.get(name_in_plan(name))
        if style is not None:
            yield name, style, part
