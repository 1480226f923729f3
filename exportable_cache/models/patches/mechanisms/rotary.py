"""Rotary embeddings of complex numbers, in real ones: ExecuTorch and Inductor's C++ have no complex operators.

| class | models | upstream (v5.23.0, src/transformers/models) |
|---|---|---|
| `Llama4TextRotaryEmbedding` | Llama 4 | llama4/modeling_llama4.py |
| `DeepseekV2RotaryEmbedding` | DeepSeek V2 | deepseek_v2/modeling_deepseek_v2.py |

Each comes with a function `apply_rotary_emb(xq, xk, freqs_cis)` in its file. Traced, the class gives cosines and
sines instead of complex numbers, and the function rotates by them; not traced, both are the originals
(tests/patches/test_rotary.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ....common.patch import Patch
from .rope_lengths import by_lengths

if TYPE_CHECKING:
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2RotaryEmbedding
    from transformers.models.llama4.modeling_llama4 import Llama4TextRotaryEmbedding

    _Rotary: TypeAlias = DeepseekV2RotaryEmbedding | Llama4TextRotaryEmbedding


def _cosines_and_sines(original: Callable) -> Callable:
    def forward(self: _Rotary, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        # Those that change their frequencies with the length are static here within `rope_lengths.rope_by`.
        if not torch.compiler.is_compiling() or "dynamic" in (self.rope_type or "") or self.rope_type == "longrope":
            return original(self, x, position_ids)
        angles = position_ids[..., None].float() * self.inv_freq.float()
        return torch.stack([torch.cos(angles), torch.sin(angles)], dim=-1) * self.attention_scaling

    return forward


def _by_lengths(original: Callable) -> Callable:
    return by_lengths(_cosines_and_sines(original))


def _rotated_by(heads: int) -> Callable[[Callable], Callable]:
    def patch(original: Callable) -> Callable:
        def apply_rotary_emb(xq: torch.Tensor, xk: torch.Tensor, freqs_cis: torch.Tensor, **kwargs: Any) -> tuple:
            if freqs_cis.is_complex():
                return original(xq, xk, freqs_cis, **kwargs)
            cos, sin = freqs_cis.unsqueeze(heads).unbind(-1)
            return _rotated(xq, cos, sin), _rotated(xk, cos, sin)

        return apply_rotary_emb

    return patch


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Neighbours in the last dimension of `x` [batch, _, _, dim], rotated by an angle [batch, _, _, dim // 2]."""
    even, odd = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(3).type_as(x)


_REASON = (
    "its rotary embeddings are complex numbers, which ExecuTorch and Inductor's generated code have no operators for"
)


def _of_file(
    model: str, name: str, heads: int, of_class: tuple[str, ...], of_function: tuple[str, ...]
) -> tuple[Patch, ...]:
    """Args: heads: The dimension that heads take in queries and keys."""
    file = f"{model}.modeling_{model}"
    return (
        Patch(file, f"{name}.forward", _by_lengths, _REASON, of_class, source=name),
        Patch(file, "apply_rotary_emb", _rotated_by(heads), _REASON, of_function),
    )


_LLAMA = _of_file("llama4", "Llama4TextRotaryEmbedding", 2, ("8ef5ce218b1c39f6",), ("6449c30f36c9d1f4",))
_DEEPSEEK = _of_file("deepseek_v2", "DeepseekV2RotaryEmbedding", 1, ("b3340f5c8a939cad",), ("e0760ae8e20f4090",))

PATCHES = {"llama4": _LLAMA, "llama4_text": _LLAMA, "deepseek_v2": _DEEPSEEK}
