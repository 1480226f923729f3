"""Mamba 2, Bamba, Falcon-H1, Granite hybrid, Nemotron-H and Zamba 2: their scan pads to whole chunks.

That fixes the length of a traced step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ....common.patch import Patch
from ...scans import state_space_scan


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


#: Every modeling file with this function has a copy of its own.
COPIED = ("mamba2_chunk_scan",)

_REASON = "its scan pads to whole chunks, which fixes the length of a traced step"

PATCHES = {
    "bamba": (Patch("bamba.modeling_bamba", "mamba2_chunk_scan", _chunk_scan, _REASON, digests=("cad13e35c634d074",)),),
    "falcon_h1": (
        Patch("falcon_h1.modeling_falcon_h1", "mamba2_chunk_scan", _chunk_scan, _REASON, digests=("cad13e35c634d074",)),
    ),
    "granitemoehybrid": (
        Patch(
            "granitemoehybrid.modeling_granitemoehybrid",
            "mamba2_chunk_scan",
            _chunk_scan,
            _REASON,
            digests=("cad13e35c634d074",),
        ),
    ),
    "mamba2": (
        Patch("mamba2.modeling_mamba2", "mamba2_chunk_scan", _chunk_scan, _REASON, digests=("cad13e35c634d074",)),
    ),
    "nemotron_h": (
        Patch(
            "nemotron_h.modeling_nemotron_h", "mamba2_chunk_scan", _chunk_scan, _REASON, digests=("cad13e35c634d074",)
        ),
    ),
    "zamba2": (
        Patch("zamba2.modeling_zamba2", "mamba2_chunk_scan", _chunk_scan, _REASON, digests=("cad13e35c634d074",)),
    ),
}
