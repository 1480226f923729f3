"""Parts of each layer's state that a rank keeps, and key/value heads that several ranks repeat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..common.compat.transformers import is_split_by_transformers
from ..errors import InputError, UnsupportedModelError
from .split import PartOf, is_split, part_of, split_tensor, whole_shape

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
