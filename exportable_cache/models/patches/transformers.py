"""Functions of transformers' modeling files that a static cache cannot use as they are.

Each patch names the function, which every modeling file has a copy of, so one patch serves several models. A replacement
acts only where one of our layers is being stepped and hands everything else to the original.

| function | models | why |
|---|---|---|
| `mamba_selective_scan` | Mamba, Falcon-Mamba, Jamba, Zamba | starts from zeros whatever was seen before, so a prompt in two parts comes out wrong; loops over tokens |
| `mamba2_chunk_scan` | Mamba 2, Bamba, Falcon-H1, Granite hybrid, Nemotron-H, Zamba 2 | pads to whole chunks, which fixes the length of a traced step |
| `torch_chunk_gated_delta_rule` | Qwen3-Next, Qwen3.5, OLMo hybrid | the same; traced, it loops over every row of a chunk |
| `chunk_kimi_delta_attention` | Kimi Linear, GLM 5 Next, Bailing hybrid | the same |

Upstream: https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/models/mamba/modeling_mamba.py ("Initial
hidden state is not supported by the kernel path"), and the functions of these names in the modeling files of the models.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...cache.layers.carried import take_carried
from ..scans import delta_rule, selective_scan, state_space_scan
from .marked import marked
from .transformers_layers import patch_layers


def patch_model(model: nn.Module) -> list[str]:
    """Replace the functions of the table in the modeling files of this model. Calling it again changes nothing.

    Returns:
        Names of the patches that the model's files have need of, and of the classes of `transformers_layers`, sorted.
    """
    found = set()
    for name in {type(module).__module__ for module in model.modules()}:
        file = sys.modules.get(name)
        for function, patch in PATCHES.items():
            original = getattr(file, function, None)
            if original is None or not name.startswith("transformers."):
                continue
            found.add(function)
            setattr(file, function, marked(patch, original))
    return sorted({*found, *patch_layers(model)})


def _selective_scan(original: Callable) -> Callable:
    def mamba_selective_scan(
        hidden_states: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        # Upstream's signature has no initial state: the layer whose inputs were just taken in is the one to ask.
        initial = take_carried()
        if initial is None:
            return original(hidden_states, dt, A, *args, **kwargs)
        output, last = selective_scan(
            hidden_states,
            dt,
            A,
            *args,
            initial_state=initial,
            **{name: kwargs[name] for name in ("D", "z", "delta_bias", "delta_softplus") if name in kwargs},
        )
        return (output, last) if kwargs.get("return_last_state") else output

    return mamba_selective_scan


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


PATCHES: dict[str, Callable[[Callable], Callable]] = {
    "mamba_selective_scan": _selective_scan,
    "mamba2_chunk_scan": _chunk_scan,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
}
