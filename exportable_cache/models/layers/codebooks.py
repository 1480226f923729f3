"""Models that take several ids for each token: one of each codebook of sound, and one of text where there is any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Codebooks:
    """How a model takes and gives the ids of a token. Sessions and programs have them in one order, [batch, length,
    count].

    Attributes:
        count: Ids of each token.
        vocab_size: Ids of every codebook run from 0 to vocab_size - 1; those of some may be fewer.
        folds_ids: Whether the model takes them as [batch * count, length].
        folds_logits: Whether it gives logits of every codebook, [batch * count, length, vocab]; of others one kind of
            token is predicted, [batch, length, vocab].
    """

    count: int
    vocab_size: int
    folds_ids: bool = False
    folds_logits: bool = False

    def taken(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids int64 [batch, length, count] as the model takes them."""
        return ids.transpose(1, 2).reshape(-1, ids.shape[1]) if self.folds_ids else ids

    def given(self, logits: torch.Tensor) -> torch.Tensor:
        """The model's logits, those of every codebook as [batch, length, count, vocab]."""
        return logits.unflatten(0, (-1, self.count)).transpose(1, 2) if self.folds_logits else logits


def codebooks_of(config: PreTrainedConfig) -> Codebooks | None:
    """Of a model that takes several ids for each token; None of all others."""
    if config.model_type in ("musicgen_decoder", "musicgen_melody_decoder"):
        # One id more than there are codes begins and pads.
        return Codebooks(config.num_codebooks, config.vocab_size + 1, folds_ids=True, folds_logits=True)
    if config.model_type == "dia":
        decoder = config.decoder_config
        return Codebooks(decoder.num_channels, decoder.vocab_size, folds_logits=True)
    if config.model_type == "kyutai_speech_to_text":
        # All codebooks share a table behind that of the text, whose last row pads.
        rows = config.vocab_size + config.num_codebooks * config.codebook_vocab_size + 1
        return Codebooks(config.num_codebooks + 1, rows)
    return None
