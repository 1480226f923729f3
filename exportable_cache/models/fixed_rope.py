"""RoPE with the factors of one sequence length at every position, as llama.cpp and vLLM compute LongRoPE.

Both choose the factors by the length of the context that was asked for, and keep them for every sequence. A program
whose runner does not know the lengths of its rows can then hold more tokens than the threshold.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..errors import InputError
from .patches.mechanisms.rope import ChangingFrequencies, check_follows, patch_rope
from .positions import changing, prefix, rope_rule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .loading.loading import LoadedModel

#: Line about a model of `fix_rope`.
REMARK = "RoPE has the factors of sequences of {:,} tokens at every length"


class _Rotary(nn.Module):
    """A rotary embedding with constant frequencies, for models whose own embedding computes them in every call.

    Args:
        inv_freq: Inverse frequencies, [dim / 2].
        scale: Factor of cosines and sines.
    """

    inv_freq: torch.Tensor

    def __init__(self, inv_freq: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.scale = scale

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [batch, length, dim] of positions [batch, length], in the dtype of `x`."""
        angles = position_ids[..., None].float() * self.inv_freq.float()
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.scale).to(x.dtype), (angles.sin() * self.scale).to(x.dtype)


@torch.no_grad()
def fix_rope(model: PreTrainedModel, length: int) -> PreTrainedModel:
    """Return a copy of a model, with shared weights, whose RoPE has the factors of `length` tokens at every position.

    Args:
        model: A model whose RoPE changes with the length.
        length: Sequence length that chooses the factors.

    Raises:
        InputError: If the factors of its RoPE are the same at every length.
        UnsupportedModelError: If its rotary embedding is not a class of transformers.
    """
    if rope_rule(model) is None:
        raise InputError(
            f"rope_length must be left out for {type(model).__name__}, whose RoPE has the same factors at every "
            f"length, got {length}; remove it"
        )
    # Parameters are shared, also with the model of a caller, which keeps its RoPE.
    model = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    patch_rope(model)
    check_follows(model)
    names = {module: name for name, module in model.named_modules()}
    for module, layer_type, kind in list(changing(model)):
        found = ChangingFrequencies.of(module, layer_type, kind)
        lengths = torch.tensor([[length]], device=found.short.device)
        inv_freq, scale = found.at(lengths)[0], found.scales[length > found.border]
        if found.longer is found.short:
            # PhiMoE, which computes frequencies from its config in every call; the length chooses only the scale.
            model.set_submodule(names[module], _Rotary(inv_freq, scale))
            continue
        is_one = layer_type is None
        module.rope_type = "default" if is_one else {**module.rope_type, layer_type: "default"}  # type: ignore[assignment,dict-item]
        for name in ("inv_freq", "original_inv_freq"):
            setattr(module, f"{prefix(layer_type)}{name}", inv_freq.clone())
    model.rope_length = length  # type: ignore[assignment]
    return model


def fixed(loaded: LoadedModel, length: int | None) -> LoadedModel:
    """Return a loaded model with the RoPE of a length, see `fix_rope`; the same model for None."""
    if length is None:
        return loaded
    model = fix_rope(loaded.model, length)
    return replace(loaded, model=model, remarks=(*loaded.remarks, REMARK.format(length)))


def rope_length_of(model: nn.Module) -> int | None:
    """Return the length of `fix_rope`, or None."""
    return getattr(model, "rope_length", None)
