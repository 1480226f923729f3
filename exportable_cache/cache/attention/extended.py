"""Attention with soft-capping or sinks as one operator, where TorchDynamo captures a step.

A backend that can compute it as a whole finds it in the graph; to any other it is the plain operators it is made of.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_library = torch.library.Library("exportable_cache", "FRAGMENT")
_library.define(
    "extended_attention(Tensor query, Tensor key, Tensor value, Tensor mask, float? scale, float? softcap, "
    "Tensor? sinks) -> Tensor"
)
#: Of queries [batch, heads, q_length, head_dim], keys and values [batch, kv_heads, kv_length, dim], a mask [batch or 1,
#: heads or 1, q_length, kv_length], and sinks [batch or 1, heads, q_length or 1, 1]: as
#: `torch.nn.functional.scaled_dot_product_attention` gives it.
EXTENDED_ATTENTION = torch.ops.exportable_cache.extended_attention.default
#: Arguments of models that it stands for, see `matmul_attention`.
EXTENSIONS = {"softcap", "s_aux", "sinks"}


def define(plain: Callable[..., torch.Tensor]) -> None:
    """Say what the operator is made of: a function of its arguments."""
    _library.impl("extended_attention", plain, "CompositeImplicitAutograd")


def is_captured() -> bool:
    """Whether TorchDynamo captures a graph that nobody exports."""
    return torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()
