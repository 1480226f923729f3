"""xLSTM: it keeps its states in an xLSTMCache, and loops over the tokens of a step in chunks of a fixed length."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from ....common.patch import Patch
from ...scans import MemoryState, matrix_memory
from ..conditions import over_our_cache


def _xlstm(
    self: Any,
    input_ids: torch.Tensor | None = None,
    inputs_embeds: torch.Tensor | None = None,
    cache: Any = None,
    *,
    original: Callable,
    **kwargs: Any,
) -> Any:
    """Run the blocks with their memory in the cache."""
    hidden_states = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
    for index, block in enumerate(self.blocks):
        hidden_states = hidden_states + _memory_layer(block.mlstm_layer, block.norm_mlstm(hidden_states), index, cache)
        hidden_states = hidden_states + block.ffn(block.norm_ffn(hidden_states))
    output = sys.modules[type(self).__module__].xLSTMOutput
    return output(self.out_norm(hidden_states), cache)


def _memory_layer(self: Any, hidden_states: torch.Tensor, index: int, cache: Any) -> torch.Tensor:
    """Run an `xLSTMLayer`, with float32 instead of `autocast_kernel_dtype` in its chunks."""
    config = self.config
    length = hidden_states.shape[1]
    if config.weight_mode == "single":
        query, key, value, gate = (linear(hidden_states) for linear in (self.q, self.k, self.v, self.ogate_preact))
        inputs, forgets = self.igate_preact(hidden_states), self.fgate_preact(hidden_states)
    else:
        sizes = [self.qk_dim, self.qk_dim, self.v_dim, self.v_dim]
        query, key, value, gate = self.qkv_opreact(hidden_states).split(sizes, dim=-1)
        inputs, forgets = self.ifgate_preact(hidden_states).chunk(2, dim=-1)
    query, key, value = (
        one.reshape(*one.shape[:2], config.num_heads, -1).transpose(1, 2) for one in (query, key, value)
    )
    soft_cap = sys.modules[type(self).__module__].soft_cap
    gates = [soft_cap(one, cap_value=config.gate_soft_cap).transpose(1, 2) for one in (inputs, forgets)]
    states = [cache.get_recurrent_state(index, number) for number in range(3)]
    if states[0] is None:
        shape = (*query.shape[:2], query.shape[3])
        zeros = query.new_zeros(shape, dtype=torch.float32)
        states = [zeros[..., None].repeat(1, 1, 1, value.shape[3]), zeros, zeros[..., :1]]
    output, after = matrix_memory(query, key, value, (gates[0], gates[1]), MemoryState(*states), config.eps)
    for number, state in enumerate(after):
        cache.update_recurrent_state(state, index, number, tokens=length)
    output = self.multihead_norm(output.to(hidden_states.dtype).transpose(1, 2))
    return self.out_proj(self.ogate_act_fn(gate) * output.reshape(gate.shape))


PATCHES = {
    "xlstm": (
        Patch(
            "xlstm.modeling_xlstm",
            "xLSTMModel.forward",
            over_our_cache(_xlstm),
            "it keeps its states in an xLSTMCache, and loops over the tokens of a step",
            digests=("29ba2f28c8830ddd", "0b04bf4e08001330", "468aa5fa142b20f0"),
            source=(
                "xLSTMModel xLSTMBlock xLSTMLayer xLSTMBackend mlstm_recurrent_sequence_native "
                "mlstm_recurrent_step_native"
            ),
        ),
    )
}
