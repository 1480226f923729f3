"""Models that take several ids per token: one for each audio codebook, and possibly one of text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Codebooks:
    """A description of a model's codebooks. Sessions and programs use ids of shape [batch, length, count].

    Attributes:
        count: Number of ids per token.
        vocab_size: Ids are less than this; some codebooks may have fewer.
        folds_ids: True if the model takes ids as [batch * count, length].
        folds_logits: True if the model returns logits of every codebook, [batch * count, length, vocab]. Others predict
            one id, [batch, length, vocab].
    """

    count: int
    vocab_size: int
    folds_ids: bool = False
    folds_logits: bool = False

    def taken(self, ids: torch.Tensor) -> torch.Tensor:
        """Convert ids, int64 [batch, length, count], to the model's layout."""
        return ids.transpose(1, 2).reshape(-1, ids.shape[1]) if self.folds_ids else ids

    def given(self, logits: torch.Tensor) -> torch.Tensor:
        """Convert the model's logits to [batch, length, count, vocab] if it predicts every codebook."""
        return logits.unflatten(0, (-1, self.count)).transpose(1, 2) if self.folds_logits else logits


def codebooks_of(config: PreTrainedConfig) -> Codebooks | None:
    """Return the codebooks of a model that takes several ids per token, or None."""
    if config.model_type in ("musicgen_decoder", "musicgen_melody_decoder"):
        # One more id than codes, which begins and pads a sequence.
        return Codebooks(config.num_codebooks, config.vocab_size + 1, folds_ids=True, folds_logits=True)
    if config.model_type == "dia":
        decoder = config.decoder_config
        return Codebooks(decoder.num_channels, decoder.vocab_size, folds_logits=True)
    if config.model_type == "kyutai_speech_to_text":
        # All codebooks share a table after that of the text; its last row pads.
        rows = config.vocab_size + config.num_codebooks * config.codebook_vocab_size + 1
        return Codebooks(config.num_codebooks + 1, rows)
    return None
