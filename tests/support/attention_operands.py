"""Random arguments of `filled_attention` in many forms, and what it should return."""

from __future__ import annotations

from typing import Any

import torch


def operands(
    rows: int = 2,
    heads: int = 8,
    kv_heads: int = 2,
    queries: int = 1,
    slots: int = 200,
    dim: int = 64,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    stored: str | None = None,
    ends: list[int] | None = None,
    mask: str | None = None,
    softcap: float | None = None,
    has_sinks: bool = False,
    of_latents: bool = False,
) -> tuple[Any, ...]:
    """Return random arguments of the operator. Latents are of size `dim`, and rotated parts of size `value_dim`."""
    torch.manual_seed(0)
    query_dim = dim + (value_dim or 0) * of_latents
    query = torch.randn(rows, queries, heads, query_dim).to(dtype).transpose(1, 2)
    keys, values = (torch.randn(rows, kv_heads, slots, size) for size in (dim, value_dim or dim))
    if stored == "int8":
        scales = [part.abs().amax(-1, keepdim=True) / 127 for part in (keys, values)]
        parts = [(part / scale).round().to(torch.int8) for part, scale in zip((keys, values), scales, strict=True)]
        parts += scales
    else:
        parts = [part.to(dtype if stored is None else getattr(torch, stored)) for part in (keys, values)]
    masks = {
        None: None,
        "added": torch.where(torch.rand(rows, 1, queries, slots) > 0.3, 0.0, torch.finfo(dtype).min).to(dtype),
        "bool": torch.rand(1, heads, queries, slots) > 0.3,
        "narrowed": (torch.rand(rows, 1, queries, 2 * slots) > 0.3)[..., :slots],
        "hides all": torch.full((rows, 1, queries, slots), torch.finfo(dtype).min, dtype=dtype),
    }
    sinks = torch.randn(1, heads, 1, 1).to(dtype) if has_sinks else None
    return query, parts, None if ends is None else torch.tensor(ends), masks[mask], None, softcap, sinks


_LATENTS: dict[str, Any] = {"kv_heads": 1, "of_latents": True}
CASES: dict[str, dict[str, Any]] = {
    "grouped heads, ragged rows": {"ends": [1, 190]},
    "one query head for each key head": {"rows": 1, "kv_heads": 8, "ends": [17]},
    "all slots": {"queries": 3, "mask": "added"},
    "a length past the slots": {"ends": [500, 200]},
    "heads of 80 and 96": {"queries": 4, "dim": 80, "value_dim": 96, "ends": [1, 190], "mask": "added"},
    "16 queries, a soft cap and sinks": {
        **{"heads": 4, "kv_heads": 1, "queries": 16, "dim": 128, "mask": "bool", "ends": [99, 200]},
        **{"softcap": 30.0, "has_sinks": True},
    },
    "heads of 256 and 192": {
        **{"heads": 4, "queries": 2, "dim": 256, "value_dim": 192, "mask": "narrowed", "ends": [50, 200]}
    },
    "8 bits": {"stored": "int8", "queries": 3, "ends": [1, 190], "mask": "added"},
    "keys in 16 bits of a float32 model": {"stored": "float16", "ends": [1, 190]},
    "a row that sees nothing": {"mask": "hides all", "ends": [20, 190]},
    "float16": {"dtype": torch.float16, "ends": [1, 190], "mask": "added"},
    "latents of 512 and 64": {**_LATENTS, "heads": 20, "dim": 512, "value_dim": 64, "ends": [1, 190], "mask": "added"},
    "latents of 80 and 24, 3 queries, a soft cap and sinks": {
        **{**_LATENTS, "heads": 4, "queries": 3, "dim": 80, "value_dim": 24, "mask": "bool", "ends": [99, 200]},
        **{"softcap": 30.0, "has_sinks": True},
    },
    "latents in 8 bits": {**_LATENTS, "dim": 128, "value_dim": 32, "stored": "int8", "ends": [1, 190]},
    "latents in float16": {**_LATENTS, "dim": 128, "value_dim": 64, "dtype": torch.float16, "ends": [1, 190]},
}  # fmt: skip


def exact(query: Any, parts: Any, ends: Any, mask: Any, scale: Any, softcap: Any, sinks: Any) -> torch.Tensor:
    """Return attention by `scaled_dot_product_attention`, in float64 and one row at a time."""
    keys, values, *scales = [part.to(torch.float64) for part in parts]
    if scales:
        keys, values = keys * scales[0], values * scales[1]
    if query.shape[3] == keys.shape[3] + values.shape[3]:
        keys, values = torch.cat([keys, values], dim=-1), keys
    batch, heads, queries, dim = query.shape
    keys, values = (part.repeat_interleave(heads // keys.shape[1], dim=1) for part in (keys, values))
    rows = []
    for row in range(batch):
        end = keys.shape[2] if ends is None else min(int(ends[row]), keys.shape[2])
        scores = query[row].to(torch.float64) @ keys[row, :, :end].transpose(1, 2) * dim**-0.5
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if mask is not None:
            seen = mask[row if mask.shape[0] > 1 else 0, :, :, :end]
            scores = scores.masked_fill(~seen, -torch.inf) if seen.dtype == torch.bool else scores + seen
        if sinks is not None:
            scores = torch.cat([scores, sinks[0].to(torch.float64).expand(heads, queries, 1)], dim=-1)
        rows.append(torch.softmax(scores, dim=-1)[..., :end] @ values[row, :, :end])
    return torch.stack(rows).transpose(1, 2)


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest difference allowed from attention in float64."""
    return {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
