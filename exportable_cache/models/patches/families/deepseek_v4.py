"""DeepSeek V4: its compressed attention appends an entry whenever a window of tokens is complete.

Here layers with a compressor keep its inputs for every token, like an indexer's keys, and compute the entries of all
slots in each step. Slots are positions, so window `w` begins at slot `w * rate`. Entries of incomplete windows are
masked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.modeling_outputs import MoeModelOutputWithPast

from ....common.patch import Patch
from ..conditions import CACHE, over_our_cache


class _Entries(NamedTuple):
    """Compressed entries of all windows.

    Attributes:
        entries: [batch, windows, head_dim].
        is_seen: True if the window is complete for a query, bool [batch, length, windows].
    """

    entries: torch.Tensor
    is_seen: torch.Tensor


def _model(
    self: Any,
    input_ids: torch.Tensor | None = None,
    attention_mask: Any = None,
    position_ids: torch.Tensor | None = None,
    cache: Any = None,
    inputs_embeds: torch.Tensor | None = None,
    use_cache: bool | None = None,
    *,
    original: Callable,
    **kwargs: Any,
) -> MoeModelOutputWithPast:
    """Run the layers with one mask for the rings of sliding layers, and one for the slots of the others."""
    embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
    if position_ids is None:
        # A probe cache has no tokens yet.
        start = 0 if getattr(cache, "is_probe", False) else cache.get_query_offset()
        position_ids = (torch.arange(embeds.shape[1], device=embeds.device) + start).reshape(-1, embeds.shape[1])
    is_ring = [layer_type == "sliding_attention" for layer_type in self.config.layer_types]
    masks = {
        kind: create_sliding_window_causal_mask(
            self.config, embeds, attention_mask, cache, position_ids, layer_idx=is_ring.index(kind)
        )
        for kind in set(is_ring)
    }
    hidden_states = embeds.unsqueeze(2).expand(-1, -1, self.config.hc_mult, -1).contiguous()
    rotations = {
        name: self.rotary_emb(embeds, position_ids=position_ids, layer_type=name) for name in ("main", "compress")
    }
    for layer, kind in zip(self.layers, is_ring, strict=True):
        hidden_states = layer(
            hidden_states,
            position_embeddings=rotations,
            position_ids=position_ids,
            attention_mask=masks[kind],
            input_ids=input_ids,
            **{CACHE: cache},
            **kwargs,
        )
    return MoeModelOutputWithPast(last_hidden_state=self.norm(self.hc_head(hidden_states)), **{CACHE: cache})


def _heavily_compressed(
    self: Any,
    hidden_states: torch.Tensor,
    q_residual: torch.Tensor,
    position_ids: torch.Tensor,
    cache: Any,
    layer_idx: int,
    *,
    original: Callable,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return entries [batch, 1, windows, head_dim], and their additive mask [batch, 1, length, windows]."""
    kept = torch.cat([self.kv_proj(hidden_states), self.gate_proj(hidden_states)], dim=-1)
    kv, gate = cache.update_indexer(kept, layer_idx).chunk(2, dim=-1)
    found = _entries(self, _windows(self, kv), _windows(self, gate) + self.position_bias, position_ids)
    return found.entries[:, None], _additive(found.is_seen, hidden_states.dtype)


def _compressed(
    self: Any,
    hidden_states: torch.Tensor,
    q_residual: torch.Tensor,
    position_ids: torch.Tensor,
    cache: Any,
    layer_idx: int,
    *,
    original: Callable,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `_heavily_compressed` with a mask of the `index_topk` entries that the indexer selects per query."""
    indexer = self.indexer
    projections = (self.kv_proj, self.gate_proj, indexer.kv_proj, indexer.gate_proj)
    parts = [linear(hidden_states) for linear in projections]
    kept = cache.update_indexer(torch.cat(parts, dim=-1), layer_idx)
    kv, gate, index_kv, index_gate = kept.split([part.shape[-1] for part in parts], dim=-1)
    found = _entries(self, *_overlapping(self, kv, gate), position_ids)
    keys = _entries(indexer, *_overlapping(indexer, index_kv, index_gate), position_ids).entries

    cos, sin = indexer.rotary_emb(hidden_states, position_ids=position_ids, layer_type=indexer.rope_layer_type)
    query = indexer.q_b_proj(q_residual).reshape(*hidden_states.shape[:2], -1, indexer.head_dim).transpose(1, 2)
    query = _rotated(self, query, cos, sin).transpose(1, 2)
    scores = indexer.scorer(query, keys, hidden_states)
    lowest = torch.finfo(scores.dtype).min
    # Padded, so that there are always enough columns for top-k.
    scores = F.pad(torch.where(found.is_seen, scores, lowest), (0, indexer.index_topk), value=lowest)
    chosen = scores.topk(indexer.index_topk, dim=-1).indices
    is_chosen = torch.zeros_like(scores).scatter(-1, chosen, 1.0).narrow(-1, 0, keys.shape[1]) > 0
    return found.entries[:, None], _additive(found.is_seen & is_chosen, hidden_states.dtype)


def _windows(self: Any, kept: torch.Tensor) -> torch.Tensor:
    """Reshape [batch, slots, dim] to windows, [batch, windows, rate, dim]."""
    rate = self.compress_rate
    windows = kept.shape[1] // rate
    return kept.narrow(1, 0, windows * rate).reshape(kept.shape[0], windows, rate, kept.shape[2])


def _overlapping(self: Any, kv: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Join each window with the previous one, [batch, windows, 2 * rate, head_dim].

    The first half of a window's dimensions is for the next window, the second half for this one.
    """
    joined = []
    for kept, bias, fill in ((kv, 0.0, 0.0), (gate, self.position_bias, torch.finfo(gate.dtype).min)):
        of_next, current = (_windows(self, kept) + bias).chunk(2, dim=-1)
        before = F.pad(of_next, (0, 0, 0, 0, 1, 0), value=fill).narrow(1, 0, of_next.shape[1])
        joined.append(torch.cat([before, current], dim=2))
    return joined[0], joined[1]


def _entries(self: Any, kv: torch.Tensor, gate: torch.Tensor, position_ids: torch.Tensor) -> _Entries:
    """Average each window [batch, windows, tokens, head_dim] by its gates, and rotate it by its first position."""
    weights = gate.softmax(dim=2, dtype=torch.float32).to(kv.dtype)
    mean = self.kv_norm((kv * weights).sum(dim=2))
    window = torch.arange(kv.shape[1], device=kv.device)
    first = (window * self.compress_rate)[None].expand(kv.shape[0], -1)
    cos, sin = self.rotary_emb(mean, position_ids=first, layer_type=self.rope_layer_type)
    is_seen = window < ((position_ids + 1) // self.compress_rate)[..., None]
    return _Entries(_rotated(self, mean[:, None], cos, sin)[:, 0], is_seen)


def _rotated(self: Any, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return sys.modules[type(self).__module__].apply_rotary_pos_emb(states, cos, sin)


def _additive(is_seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.where(is_seen, 0.0, torch.finfo(dtype).min).to(dtype)[:, None]


def _of_class(name: str, replacement: Callable, others: str, *digests: str) -> Patch:
    return Patch(
        "deepseek_v4.modeling_deepseek_v4",
        f"{name}.forward",
        over_our_cache(replacement),
        "its compressors append an entry whenever a window of tokens is complete",
        digests=digests,
        source=f"{name} {others}",
    )


_INDEXER = "DeepseekV4Indexer DeepseekV4IndexerScorer DeepseekV4CSACache"
PATCHES = {
    "deepseek_v4": (
        _of_class(
            "DeepseekV4Model", _model, "DeepseekV4Attention", "2362df87b4cf7ea8", "d6af01d34283c189", "cb7848701b158308"
        ),
        _of_class(
            "DeepseekV4HCACompressor",
            _heavily_compressed,
            "DeepseekV4HCACache",
            "18a5e7843d05aa38",
            "f778e92da6dbe6d9",
            "952f2a3fa3e65828",
        ),
        _of_class(
            "DeepseekV4CSACompressor", _compressed, _INDEXER, "4095deea97c80063", "eac9f43f06822d34", "63cddc717385a0d2"
        ),
    )
}
