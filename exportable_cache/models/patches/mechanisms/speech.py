"""Speech encoders: masks that are shortened twice, states that are changed in place, and relative positions.

A decoder step gets the mask of the encoder's output, [batch, encoder_length], but these models expect the mask of the
encoder's *input* in every step, and shorten it:

| method | models | upstream (v5.23.0, src/transformers/models) |
|---|---|---|
| `_get_feature_vector_attention_mask` | Speech2Text, SpeechT5 | speech_to_text/modeling_speech_to_text.py, ... |
| `_compute_sub_sample_lengths_from_attention_mask` | Seamless M4T and v2 | seamless_m4t/modeling_seamless_m4t.py, ... |

Inside `short_masks` these methods return the mask unchanged; outside, they are the originals. A test fails once the
models take the mask of the output (tests/patches/test_speech.py).

Moonshine Streaming adds positions to the encoder's output in place, in every step, so its decoder gets a copy. Seamless
M4T shifts relative scores by reshaping, for which ExecuTorch (1.4.1) plans too little memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ....common.compat.transformers import output_lengths_of_mask, output_lengths_of_samples
from ....common.patch import Patch
from ..conditions import only_traced, over_our_cache

if TYPE_CHECKING:
    from torch import nn


class _Masks(threading.local):
    """A thread-local flag. TorchDynamo (2.13) traces attributes of a `threading.local`, but not a `ContextVar`."""

    def __init__(self) -> None:
        # Set on the instance, see `scans._Longest`.
        self.are_short = False


_masks = _Masks()


@contextmanager
def short_masks() -> Iterator[None]:
    """Treat masks inside the block as masks of the encoder's output."""
    before = _masks.are_short
    _masks.are_short = True
    try:
        yield
    finally:
        _masks.are_short = before


def shortened_lengths(model: nn.Module, attention_mask: torch.Tensor) -> torch.Tensor:
    """Return the output length of an audio encoder for each row; the input length if the model has no rule.

    Args:
        model: The encoder-decoder model.
        attention_mask: Mask of the input, int64 [batch, length].

    Returns:
        int64 [batch].
    """
    for module in model.modules():
        if (of_samples := output_lengths_of_samples(module)) is not None:
            return of_samples(attention_mask.sum(-1)).to(torch.int64)
        if (of_mask := output_lengths_of_mask(module)) is not None:
            return of_mask(attention_mask).to(torch.int64)
    return attention_mask.sum(-1)


def _unless_short(when_short: Callable) -> Callable[[Callable], Callable]:
    def patch(original: Callable) -> Callable:
        def method(self: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
            return when_short(*args, **kwargs) if _masks.are_short else original(self, *args, **kwargs)

        return method

    return patch


def _with_cloned_states(
    self: nn.Module, *args: Any, encoder_hidden_states: torch.Tensor, original: Callable, **kwargs: Any
) -> Any:
    """Pass a copy to the decoder, because a session reuses encoder states for several prompts."""
    return original(self, *args, encoder_hidden_states=encoder_hidden_states.clone(), **kwargs)


_REASON = "it shortens the mask of its encoder's output again"
_unchanged_mask = _unless_short(lambda feature_vector_length, attention_mask, **kwargs: attention_mask)
_lengths_of_mask = _unless_short(lambda attention_mask: attention_mask.sum(-1))


def _features(file: str, owner: str, *digests: str) -> tuple[Patch, ...]:
    return (Patch(file, f"{owner}._get_feature_vector_attention_mask", _unchanged_mask, _REASON, digests),)


def _lengths(file: str, owner: str, *digests: str) -> tuple[Patch, ...]:
    return (
        Patch(file, f"{owner}._compute_sub_sample_lengths_from_attention_mask", _lengths_of_mask, _REASON, digests),
    )


def _relative_scores(
    self: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    relative_position_embeddings: torch.Tensor,
    *,
    original: Callable,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute relative scores (Dai et al. 2019, arXiv:1901.02860, appendix B) by indexing distances.

    `query` and `key` are [batch, heads, length, head_dim]; `relative_position_embeddings` are [1, 2 * length - 1,
    hidden], from the farthest earlier position to the farthest later one. Returns the query for scores by content, and
    scores by distance [batch, heads, length, length].
    """
    length = query.shape[2]
    embeddings = self.linear_pos(relative_position_embeddings)
    embeddings = embeddings.reshape(*relative_position_embeddings.shape[:2], -1, self.head_size).permute(0, 2, 3, 1)
    scores = torch.matmul(query + self.pos_bias_v[None, :, None, :], embeddings)
    at = torch.arange(length, device=query.device)
    distance = length - 1 - at[:, None] + at[None, :]
    scores = torch.gather(scores, -1, distance.expand(*scores.shape[:2], length, length))
    return query + self.pos_bias_u[None, :, None, :], scores * self.scaling


PATCHES = {
    # Encoders of a `SpeechEncoderDecoderModel`, which shortens the mask with the encoder's method.
    "data2vec-audio": _features("data2vec.modeling_data2vec_audio", "Data2VecAudioPreTrainedModel", "6b9955af64c23f98"),
    "hubert": _features("hubert.modeling_hubert", "HubertPreTrainedModel", "24c2ee004a30f90d"),
    "sew": _features("sew.modeling_sew", "SEWPreTrainedModel", "d44458fa30b68f5a"),
    "sew-d": _features("sew_d.modeling_sew_d", "SEWDPreTrainedModel", "d44458fa30b68f5a"),
    "unispeech": _features("unispeech.modeling_unispeech", "UniSpeechPreTrainedModel", "1813de7ef76e445d"),
    "unispeech-sat": _features(
        "unispeech_sat.modeling_unispeech_sat", "UniSpeechSatPreTrainedModel", "1813de7ef76e445d"
    ),
    "wav2vec2": _features("wav2vec2.modeling_wav2vec2", "Wav2Vec2PreTrainedModel", "6b9955af64c23f98"),
    "wav2vec2-bert": _features(
        "wav2vec2_bert.modeling_wav2vec2_bert", "Wav2Vec2BertPreTrainedModel", "6b9955af64c23f98"
    ),
    "wav2vec2-conformer": _features(
        "wav2vec2_conformer.modeling_wav2vec2_conformer", "Wav2Vec2ConformerPreTrainedModel", "6b9955af64c23f98"
    ),
    "wavlm": _features("wavlm.modeling_wavlm", "WavLMPreTrainedModel", "6b9955af64c23f98"),
    # Encoder-decoders.
    "seamless_m4t": (
        *_lengths("seamless_m4t.modeling_seamless_m4t", "SeamlessM4TPreTrainedModel", "def8b90a1a5c399b"),
        Patch(
            "seamless_m4t.modeling_seamless_m4t",
            "_apply_relative_position_encoding",
            only_traced(_relative_scores),
            "it shifts relative scores by reshaping",
            digests=("a1c4ee739337d77d",),
            needed=False,
        ),
    ),
    "seamless_m4t_v2": _lengths(
        "seamless_m4t_v2.modeling_seamless_m4t_v2", "SeamlessM4Tv2PreTrainedModel", "def8b90a1a5c399b"
    ),
    "speech_to_text": _features(
        "speech_to_text.modeling_speech_to_text", "Speech2TextPreTrainedModel", "ca7dc34de54969ba"
    ),
    "speecht5": _features("speecht5.modeling_speecht5", "SpeechT5SpeechEncoderPrenet", "1813de7ef76e445d"),
    "moonshine_streaming": (
        Patch(
            "moonshine_streaming.modeling_moonshine_streaming",
            "MoonshineStreamingDecoder.forward",
            over_our_cache(_with_cloned_states),
            "it adds positions to the encoder's output in place, in every step",
            digests=("06c52f55a3d1f2f1", "72dd6a2b1c055c7f", "aee27730bd855550"),
        ),
    ),
}
