"""Qwen4 Exp: its indexer's number of key blocks depends on data, and its n-grams need earlier tokens.

Slots are positions, so block `b` begins at slot `b * ratio`. An indexer key is kept with the cosines and sines of its
token, because a block is rotated by those of its first token. Token ids are kept as differences to the end-of-text
token, which upstream uses before the first token, because states begin with zeros.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from ....common.patch import Patch
from ..conditions import over_our_cache

# Index of the convolution state of tokens in a layer, as upstream.
_TOKENS = 2


def _indexer(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor,
    cache: Any,
    *,
    original: Callable,
) -> torch.Tensor:
    """Return the slots that each query may attend to, bool [batch, 1, length, slots].

    They are those of the `block_topk` complete blocks with the highest scores, and those after the last complete block.
    """
    batch_size, length, _ = hidden_states.shape
    cos, sin = position_embeddings
    query, key = self.index_qk_proj(hidden_states).split(
        [self.index_n_heads * self.index_head_dim, self.index_kv_heads * self.index_head_dim], dim=-1
    )
    rotated = sys.modules[type(self).__module__].apply_rotary_pos_emb
    query = self.q_layernorm(query.reshape(batch_size, length, -1, self.index_head_dim))
    query = rotated(query, cos=cos, sin=sin, unsqueeze_dim=2)
    kept = torch.cat([key, cos.expand(batch_size, -1, -1), sin.expand(batch_size, -1, -1)], dim=-1)
    kept = cache.update_indexer(kept, self.layer_idx)
    slots, ratio = kept.shape[1], self.compress_ratio
    blocks = slots // ratio
    groups = kept.narrow(1, 0, blocks * ratio).reshape(batch_size, blocks, ratio, kept.shape[2])
    key, cos, sin = groups.split([self.index_head_dim, cos.shape[-1], sin.shape[-1]], dim=-1)
    key = self.k_layernorm(key.float().mean(dim=2).to(kept.dtype))
    key = rotated(key[:, :, None], cos=cos[:, :, 0], sin=sin[:, :, 0], unsqueeze_dim=2)[:, :, 0]
    # [batch, length, blocks]
    scores = torch.matmul(query.float(), key.float().transpose(-1, -2)[:, None])
    scores = torch.relu(scores).sum(dim=2) / math.sqrt(self.index_head_dim)
    visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
    complete = visible[:, 0].sum(dim=-1, dtype=torch.int64)[..., None] // ratio
    is_complete = torch.arange(blocks, device=scores.device) < complete
    # Scores are not negative. Padded, so that there are always enough columns for top-k.
    scores = F.pad(torch.where(is_complete, scores, -1.0), (0, self.block_topk), value=-1.0)
    chosen = scores.topk(self.block_topk, dim=-1).indices
    is_chosen = torch.zeros_like(scores).scatter(-1, chosen, 1.0).narrow(-1, 0, blocks)
    # Slots after the complete blocks are visible; the mask still applies.
    seen = torch.where(is_complete, is_chosen, 1.0)
    slot = torch.arange(slots, device=scores.device)
    return (F.pad(seen, (0, 1), value=1.0).index_select(-1, slot // ratio) > 0)[:, None]


def _added_indexer(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor,
    cache: Any,
    *,
    original: Callable,
) -> torch.Tensor:
    """Return `_indexer`'s mask, for a float mask as numbers, which transformers 5.20 adds to it."""
    seen = _indexer(self, hidden_states, position_embeddings, attention_mask, cache, original=original)
    if not attention_mask.is_floating_point():
        return seen
    # Nothing is added to masked slots, because the sum would be -inf.
    zero = attention_mask.new_zeros(())
    return torch.where(seen | (attention_mask != 0), zero, torch.finfo(attention_mask.dtype).min)


def _indexer_of(original: Callable) -> Callable:
    """Create the patch of an indexer, whose mask is bool except in transformers 5.20."""
    is_added = "finfo" in inspect.unwrap(original).__code__.co_names
    return over_our_cache(_added_indexer if is_added else _indexer)(original)


def _ngrams(self: Any, input_ids: torch.Tensor, cache: Any, *, original: Callable) -> torch.Tensor:
    """Embed the hashed n-grams that end at each token, [batch, length, dim]; n-grams do not cross an end of text."""
    length, end = input_ids.shape[1], self.eos_token_id
    history = cache.update_conv_state(
        input_ids.long() - end, self.layer_idx, state_idx=_TOKENS, conv_kernel_size=self.context_len
    )
    # Padded, because a probe cache returns only the new tokens.
    history = F.pad(history, (self.context_len + length - history.shape[1], 0)) + end
    shifted = [history.narrow(1, self.context_len - shift, length) for shift in range(self.ngram_size)]
    for shift in range(2, self.ngram_size):
        shifted[shift] = torch.where(shifted[shift - 1] == end, end, shifted[shift])
    blocks = []
    mixed = shifted[0] * self.layer_multipliers[0]
    for ngram in range(2, self.ngram_size + 1):
        mixed = torch.bitwise_xor(mixed, shifted[ngram - 1] * self.layer_multipliers[ngram - 1])
        heads = slice((ngram - 2) * self.heads_per_ngram, (ngram - 1) * self.heads_per_ngram)
        sizes = self.ngram_heads_vocab_sizes[heads]
        rest = torch.remainder(mixed[..., None], sizes)
        # Corrected, because ExecuTorch's integer remainder has the dividend's sign, torch's the divisor's.
        blocks.append(torch.where(rest < 0, rest + sizes, rest) + self.ngram_heads_offsets[heads])
    return self.ngram_embedding(torch.cat(blocks, dim=-1)).flatten(-2)


def _of_file(*digests: tuple[str, ...]) -> tuple[Patch, ...]:
    file = "qwen4_exp.modeling_qwen4_exp"
    return (
        Patch(
            file,
            "Qwen4ExpTextQSAIndexer.forward",
            _indexer_of,
            "its indexer's number of key blocks depends on data",
            digests=digests[0],
            source="Qwen4ExpTextQSAIndexer",
        ),
        Patch(
            file,
            "Qwen4ExpTextNGramEmbedding.forward",
            over_our_cache(_ngrams),
            "it uses the end-of-text token before the first token, where states begin with zeros",
            digests=digests[1],
            source="Qwen4ExpTextNGramEmbedding",
        ),
    )


_PATCHES = _of_file(
    ("310bb729fd5a8edb", "6d404a8edd3c5aa9", "72a5b1fae20c050f"),
    ("874ee437373ae5ed", "5d9af639e2d9f0d1", "37c9c702e6428d2a"),
)
PATCHES = {"qwen4_exp": _PATCHES, "qwen4_exp_text": _PATCHES}
