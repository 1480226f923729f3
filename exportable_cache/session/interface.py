"""Interface of a session for the functions that generate with it, and that save and load its state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

    from ..backends.base import Runner
    from ..cache.layers import CacheLayer
    from ..generation.checkpoint_settings import CheckpointSettings
    from ..generation.sampling import Sampling
    from ..models.tokenizers.text import TextTokenizer
    from .inputs.stages import InputStages
    from .stepper import ProgramStepper


class AnySession(Protocol):
    """The part of a `Session` that these functions use, see there."""

    batch_size: int
    vocab_size: int
    device: torch.device
    target: str
    fingerprint: str | None
    text_tokenizer: PreTrainedTokenizerBase | TextTokenizer | None
    generation_config: GenerationConfig | None
    stepper: ProgramStepper
    stages: InputStages
    parts_of_heads: tuple[int, ...]
    encoded_ids: tuple[torch.Tensor, list[torch.Tensor]] | None

    @property
    def runner(self) -> Runner:
        """Runner of the program."""
        ...

    @property
    def layers(self) -> tuple[CacheLayer, ...]:
        """Layers of the cache."""
        ...

    @property
    def length(self) -> torch.Tensor:
        """Number of tokens in each row, int64 [batch]."""
        ...

    @property
    def unfed(self) -> tuple[int | None, ...]:
        """See `Session.unfed`."""
        ...

    @property
    def max_length(self) -> int | None:
        """Tokens that a row can hold, or None."""
        ...

    @property
    def score_length(self) -> int:
        """Most tokens that `score` takes."""
        ...

    @property
    def codebooks(self) -> int | None:
        """Number of ids in each token, or None."""
        ...

    @property
    def has_encoder(self) -> bool:
        """True for an encoder-decoder."""
        ...

    @property
    def generation_settings(self) -> CheckpointSettings:
        """See `Session.generation_settings`."""
        ...

    def settings_of(self, config: GenerationConfig | None) -> CheckpointSettings:
        """See `Session.settings_of`."""
        ...

    def agreed(self, sampling: Sampling) -> Sampling:
        """See `Session.agreed`."""
        ...

    def reset(self) -> None:
        """Return to position 0."""
        ...

    def encode(self, main_input: torch.Tensor | None = None, **inputs: torch.Tensor) -> torch.Tensor:
        """See `Session.encode`."""
        ...
