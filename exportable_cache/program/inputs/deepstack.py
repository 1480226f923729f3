"""Images that a decoder sees in several layers (Qwen3-VL): features of the vision encoder added behind its first
layers.

They travel with the embeddings, in one tensor [batch, length, (1 + layers) * hidden_size]: first the embedding, then
what is added behind each of the first layers, zeros for text. So every chunk of a prompt has its own, and no size
depends on data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class EveryToken:
    """Stands for the mask `visual_pos_masks`, by which the decoder picks tokens with a size that depends on data: picks
    all.
    """

    def to(self, *_: Any) -> slice:
        return slice(None)


def is_stacked(model: PreTrainedModel, embeds: torch.Tensor) -> bool:
    """Whether `embeds` [..., size] hold features for further layers behind the embedding."""
    return embeds.shape[-1] != model.config.get_text_config().hidden_size


def deepstack_logits(model: PreTrainedModel, embeds: torch.Tensor, keeps_last: bool, **options: Any) -> torch.Tensor:
    """Logits [batch, 1 or length, vocab] of a decoder's step. The whole model takes no features from outside, its
    decoder does.

    Args:
        embeds: [batch, length, (1 + layers) * hidden_size].
        keeps_last: Of the last token only.
        **options: Of the decoder, such as position_ids and past_key_values.
    """
    first, *further = embeds.split(model.config.get_text_config().hidden_size, dim=-1)
    decoder = model.get_decoder()
    hidden = decoder(
        inputs_embeds=first, visual_pos_masks=EveryToken(), deepstack_visual_embeds=further, use_cache=True, **options
    ).last_hidden_state
    return model.get_output_embeddings()(hidden[:, -1:] if keeps_last else hidden)
