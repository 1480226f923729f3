"""A context that is split over processes: who they are, and that the model's attention merges what they see."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from ...cache.context_ranks import check_taken
from ...errors import InputError, UnsupportedModelError
from ..layers.layout import cache_argument
from .ranks import Ranks

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from ...cache.cache import LayeredCache


def ranks_of_context(model: nn.Module, found: Ranks | None, device: torch.device | str) -> Ranks:
    """The processes of the default group, for a context that is split over them; the model is whole in each.

    Args:
        model: For messages.
        found: What `ranks_of` gave.
        device: Where their collectives take tensors.

    Raises:
        InputError: If there is no group of several, or the model's weights are split.
    """
    if found is not None:
        raise InputError(
            f"{type(model).__name__} is split over {found.size} ranks, and split_context takes one that is whole on "
            "each; leave out one of them"
        )
    size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if size < 2:
        raise InputError(
            f"split_context splits the slots over the processes of the default group, and there is {size}; start "
            "several (torchrun --nproc-per-node 2 script.py) and call torch.distributed.init_process_group() first"
        )
    group = dist.group.WORLD
    assert group is not None
    return Ranks(group, torch.device(device))


@torch.no_grad()
def check_split(model: PreTrainedModel, cache: LayeredCache) -> None:
    """Refuse a model whose attention would see this rank's slots alone, by a token that every rank runs.

    Raises:
        InputError: If no layer has slots to split.
        UnsupportedModelError: If the model's attention is not ours, or is of a kind that is not merged.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} is an encoder-decoder, whose context is not split over ranks; leave out "
            "split_context"
        )
    if not any(layer.over is not None for layer in cache.layers):
        raise InputError(
            f"no layer of {type(model).__name__} keeps all tokens and nothing else, so there is nothing to split; "
            "leave out split_context"
        )
    token = torch.zeros(cache.batch_size, 1, dtype=torch.int64, device=model.device)
    model(input_ids=token, use_cache=True, **{cache_argument(model): cache})
    check_taken()
    cache.reset()
