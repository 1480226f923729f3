"""A model whose layers are split over processes (pipeline parallelism), as transformers loads it: what a stage has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...common.compat.transformers import pipeline_stage
from ...errors import UnsupportedModelError
from ..weights import is_split
from .ranks import Ranks

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Stage:
    """One process's layers.

    Attributes:
        ranks: All processes, in the order of the layers.
        layers: Those that this one has.
    """

    ranks: Ranks
    layers: range

    @property
    def is_first(self) -> bool:
        """Whether it looks the tokens up."""
        return self.ranks.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether it gives the logits."""
        return self.ranks.rank == self.ranks.size - 1

    # As the group in it is.
    def __deepcopy__(self, memo: dict[int, object]) -> Stage:
        return self


def stage_of(model: PreTrainedModel, device: torch.device | str = "cpu") -> Stage | None:
    """What this process has of a model's layers, None of a model that has all of them; every process has to ask.

    Args:
        model: Loaded with `DistributedConfig(pp_size=N)`.
        device: Where the processes take tensors to send.

    Raises:
        UnsupportedModelError: If its weights are split as well, or it is an encoder-decoder.
    """
    found = pipeline_stage(model)
    if found is None:
        return None
    import torch

    if any(is_split(parameter) for parameter in model.parameters()) or model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{type(model).__name__} has its layers split over {found.pp_size} stages, and its weights too, or is an "
            "encoder-decoder; a session takes stages of text decoders alone: load it with pp_size and no other size"
        )
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    layers = range(*found.layer_range_for_rank(found.pp_rank, count))
    return Stage(Ranks(found.pp_group, torch.device(device)), layers)
