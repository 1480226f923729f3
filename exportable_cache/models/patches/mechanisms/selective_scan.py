"""Mamba, Falcon-Mamba, Jamba and Zamba: their scan starts from zeros whatever was seen before, and two of them apply
the padding mask of all tokens to the new ones.

A prompt in two parts then comes out wrong, and the scan loops over tokens. Upstream says so: "Initial hidden state is
not supported by the kernel path".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ....cache.layers.linear import take_carried
from ....common.patch import Patch
from ...scans import selective_scan

if TYPE_CHECKING:
    import torch


def _selective_scan(original: Callable) -> Callable:
    def mamba_selective_scan(
        hidden_states: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        # Upstream's signature has no initial state: the layer whose inputs were just taken in is the one to ask.
        initial = take_carried()
        if initial is None:
            return original(hidden_states, dt, A, *args, **kwargs)
        B, C = args
        output, last = selective_scan(
            hidden_states,
            dt,
            A,
            B,
            C,
            initial_state=initial,
            **{name: kwargs[name] for name in ("D", "z", "delta_bias", "delta_softplus") if name in kwargs},
        )
        return (output, last) if kwargs.get("return_last_state") else output

    return mamba_selective_scan


def _mask_of_new_tokens(original: Callable) -> Callable:
    def apply_mask_to_padding_states(hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        # The mask of a call that goes on is of all tokens; the states are those of the new ones.
        if attention_mask is not None and attention_mask.shape[-1] > hidden_states.shape[1]:
            attention_mask = attention_mask[:, -hidden_states.shape[1] :]
        return original(hidden_states, attention_mask)

    return apply_mask_to_padding_states


def _masking(file: str, digest: str) -> Patch:
    return Patch(
        file,
        "apply_mask_to_padding_states",
        _mask_of_new_tokens,
        "it multiplies the new tokens by the padding mask of all tokens: an error, or, of one token, wrong states",
        digests=(digest,),
    )


#: Every modeling file with this function has a copy of its own.
COPIED = ("mamba_selective_scan",)

_REASON = "its scan starts from zeros, whatever was seen before"

PATCHES = {
    "falcon_mamba": (
        Patch(
            "falcon_mamba.modeling_falcon_mamba",
            "mamba_selective_scan",
            _selective_scan,
            _REASON,
            digests=("0cdbead6611bc917",),
        ),
        _masking("falcon_mamba.modeling_falcon_mamba", "47478cac7762c361"),
    ),
    "jamba": (
        Patch("jamba.modeling_jamba", "mamba_selective_scan", _selective_scan, _REASON, digests=("0cdbead6611bc917",)),
    ),
    "mamba": (
        Patch("mamba.modeling_mamba", "mamba_selective_scan", _selective_scan, _REASON, digests=("0cdbead6611bc917",)),
        _masking("mamba.modeling_mamba", "a2d86c66e17c9073"),
    ),
    "zamba": (
        Patch("zamba.modeling_zamba", "mamba_selective_scan", _selective_scan, _REASON, digests=("15d519e5f8a5daba",)),
    ),
}
