"""Scan functions that modeling files copy, replaced by those of `models/scans.py`.

The scan of Mamba, Falcon-Mamba, Jamba and Zamba loops over tokens and always starts from zeros, so a prompt in two
parts gives wrong results. Upstream states: "Initial hidden state is not supported by the kernel path". Mamba and
Falcon-Mamba also apply the padding mask of all tokens to the new ones. The scans of Mamba 2 and its hybrids and the
gated delta rule (per head in Qwen3-Next, Qwen3.5, Lara mini and OLMo hybrid; per channel in Kimi Linear, GLM 5 Next
and Bailing hybrid) pad to whole chunks, which fixes the length of a traced step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ....cache.layers.linear import take_carried
from ....common.patch import Patch
from ...scans import delta_rule, selective_scan, state_space_scan


def _selective_scan(original: Callable) -> Callable:
    def mamba_selective_scan(
        hidden_states: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        # Taken from the layer that was updated last, because upstream's signature has no initial state.
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
        # In a continued sequence the mask covers all tokens, but the states only the new ones.
        if attention_mask is not None and attention_mask.shape[-1] > hidden_states.shape[1]:
            attention_mask = attention_mask[:, -hidden_states.shape[1] :]
        return original(hidden_states, attention_mask)

    return apply_mask_to_padding_states


def _chunk_scan(original: Callable) -> Callable:
    def mamba2_chunk_scan(
        hidden_states: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, **kwargs: Any
    ) -> Any:
        if kwargs.get("initial_states") is None or not torch.compiler.is_compiling():
            return original(hidden_states, dt, A, B, C, **kwargs)
        options = {name: kwargs[name] for name in ("D", "dt_bias", "dt_softplus", "dt_limit") if name in kwargs}
        output, last = state_space_scan(hidden_states, dt, A, B, C, kwargs["initial_states"], **options)
        return (output, last) if kwargs.get("return_final_states") else output

    return mamba2_chunk_scan


def _delta_rule(original: Callable) -> Callable:
    def chunk_delta_rule(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **kwargs: Any
    ) -> Any:
        if kwargs.get("initial_state") is None or not torch.compiler.is_compiling():
            return original(query, key, value, g=g, beta=beta, **kwargs)
        output, state = delta_rule(
            query, key, value, g, beta, kwargs["initial_state"], normalize=kwargs.get("use_qk_l2norm_in_kernel", False)
        )
        return output, state if kwargs.get("output_final_state") else None

    return chunk_delta_rule


#: Functions that modeling files copy, so each file needs a patch of its own.
COPIED = ("mamba_selective_scan", "mamba2_chunk_scan", "torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")


def _masking(model: str, digest: str) -> Patch:
    return Patch(
        f"{model}.modeling_{model}",
        "apply_mask_to_padding_states",
        _mask_of_new_tokens,
        "it multiplies the new tokens by the padding mask of all tokens, which fails or gives wrong states",
        digests=(digest,),
    )


def _mamba(model: str, digest: str) -> Patch:
    reason = "its scan always starts from zeros"
    return Patch(f"{model}.modeling_{model}", "mamba_selective_scan", _selective_scan, reason, digests=(digest,))


def _mamba2(model: str) -> tuple[Patch, ...]:
    reason = "its scan pads to whole chunks, which fixes the length of a traced step"
    digests = ("cad13e35c634d074",)
    return (Patch(f"{model}.modeling_{model}", "mamba2_chunk_scan", _chunk_scan, reason, digests=digests),)


def _delta(model: str, function: str, *digests: str) -> tuple[Patch, ...]:
    reason = (
        "its delta rule pads to whole chunks, which fixes the length of a traced step, and loops over the rows of each"
    )
    return (Patch(f"{model}.modeling_{model}", function, _delta_rule, reason, digests),)


def _gated(model: str) -> tuple[Patch, ...]:
    return _delta(model, "torch_chunk_gated_delta_rule", "907bbba3ffc5bf47", "e4e4df965ab934a6")


def _kimi(model: str) -> tuple[Patch, ...]:
    return _delta(model, "chunk_kimi_delta_attention", "71d597c214685c9f")


PATCHES = {
    "falcon_mamba": (_mamba("falcon_mamba", "0cdbead6611bc917"), _masking("falcon_mamba", "47478cac7762c361")),
    "jamba": (_mamba("jamba", "0cdbead6611bc917"),),
    "mamba": (_mamba("mamba", "0cdbead6611bc917"), _masking("mamba", "a2d86c66e17c9073")),
    "zamba": (_mamba("zamba", "15d519e5f8a5daba"),),
    "bamba": _mamba2("bamba"),
    "falcon_h1": _mamba2("falcon_h1"),
    "granitemoehybrid": _mamba2("granitemoehybrid"),
    "mamba2": _mamba2("mamba2"),
    "nemotron_h": _mamba2("nemotron_h"),
    "zamba2": _mamba2("zamba2"),
    "bailing_hybrid": _kimi("bailing_hybrid"),
    "glm5_next": _kimi("glm5_next"),
    "glm5_next_text": _kimi("glm5_next"),
    "kimi_linear": _kimi("kimi_linear"),
    "lara_mini": _gated("lara_mini"),
    "olmo_hybrid": _gated("olmo_hybrid"),
    "qwen3_5": _gated("qwen3_5"),
    "qwen3_5_text": _gated("qwen3_5"),
    "qwen3_5_moe": _gated("qwen3_5_moe"),
    "qwen3_5_moe_text": _gated("qwen3_5_moe"),
    "qwen3_next": _gated("qwen3_next"),
    "qwen4_exp": _gated("qwen4_exp"),
    "qwen4_exp_text": _gated("qwen4_exp"),
}
