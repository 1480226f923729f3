"""Memory and messages of pipeline stages, as transformers would split a model's layers. Sessions do not run stages."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import InputError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class StagePlan:
    """Stages, of a step of one token a row.

    Attributes:
        stages: How many there are.
        layers: Of each stage the first layer, and the one after its last.
        weights_bytes: Of the rank that has most, of each stage.
        cache_bytes: Of a rank, of each stage.
        sent_bytes: Hidden states that each stage but the last sends on.
        logits_bytes: That the last one sends to all.
    """

    stages: int
    layers: tuple[tuple[int, int], ...]
    weights_bytes: tuple[int, ...]
    cache_bytes: tuple[int, ...]
    sent_bytes: int
    logits_bytes: int

    @property
    def fullest(self) -> int:
        """The stage that takes most."""
        taken = [sum(pair) for pair in zip(self.weights_bytes, self.cache_bytes, strict=True)]
        return taken.index(max(taken))


def layers_of_stages(count: int, stages: int) -> tuple[tuple[int, int], ...]:
    """First layer of each stage and the one after its last: as many each, and what is left over to the last.

    Raises:
        InputError: If there are more stages than layers.
    """
    if stages > count:
        raise InputError(f"pipeline is {stages}, but the model has {count} layers; use at most {count} stages")
    each = count // stages
    return tuple((stage * each, count if stage == stages - 1 else (stage + 1) * each) for stage in range(stages))


def plan_stages(
    model: PreTrainedModel,
    stages: int,
    cache_bytes: Sequence[int],
    weights: Callable[[Callable[[str], bool]], int],
    sizes: tuple[int, torch.dtype],
) -> StagePlan:
    """Return the memory and messages of a model's stages.

    Args:
        model: Without weights.
        stages: How many there are.
        cache_bytes: Of each layer, on a rank.
        weights: Bytes of the parameters that a rank has most of, among those whose name it is asked with.
        sizes: Rows, and the dtype of hidden states.
    """
    layers, (rows, dtype) = layers_of_stages(len(cache_bytes), stages), sizes
    config = model.config.get_text_config(decoder=True)
    table = model.get_input_embeddings().weight
    tables = {name for name, parameter in model.named_parameters() if parameter is table}
    is_tied = getattr(model.get_output_embeddings(), "weight", None) is table

    def has(stage: int) -> Callable[[str], bool]:
        first, end = layers[stage]

        def asked(name: str) -> bool:
            number = _LAYER.search(name)
            if number is not None:
                return first <= int(number[1]) < end
            if name in tables:
                return stage == 0 or (is_tied and stage == stages - 1)
            return stage == stages - 1

        return asked

    return StagePlan(
        stages=stages,
        layers=layers,
        weights_bytes=tuple(weights(has(stage)) for stage in range(stages)),
        cache_bytes=tuple(sum(cache_bytes[first:end]) for first, end in layers),
        sent_bytes=rows * config.hidden_size * dtype.itemsize,
        logits_bytes=rows * config.vocab_size * dtype.itemsize,
    )
