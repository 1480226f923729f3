"""Attention with soft-capping or sinks as one operator, where TorchDynamo captures a step.

A backend that can compute it as a whole finds it in the graph; every other one gets the plain operators that
`functions.py` decomposes it into. Running a bundle imports this file, without
transformers' models.
"""

from __future__ import annotations

import torch

library = torch.library.Library("exportable_cache", "FRAGMENT")
library.define(
    "extended_attention(Tensor query, Tensor key, Tensor value, Tensor mask, float? scale, float? softcap, "
    "Tensor? sinks) -> Tensor"
)
#: Takes queries [batch, heads, q_length, head_dim], keys and values [batch, kv_heads, kv_length, dim], a mask [batch or
#: 1, heads or 1, q_length, kv_length], and sinks [batch or 1, heads, q_length or 1, 1]; returns what
#: `torch.nn.functional.scaled_dot_product_attention` returns.
EXTENDED_ATTENTION = torch.ops.exportable_cache.extended_attention.default
#: Arguments of models that the operator computes, see `matmul_attention`.
EXTENSIONS = {"softcap", "s_aux", "sinks"}


def is_captured() -> bool:
    """Return True if TorchDynamo captures a graph that is not exported."""
    return torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()
