"""Native operators for attention, cache writes and cache quantization; only the kernels of `kernels/` implement them.

`exportable_cache::attention` is one call for causal attention over a cache: rows of different length, rings that have
wrapped, windows and chunks, soft-capping, sinks, a bias; keys and values in float32, float16, bfloat16, 8 and 4 bits.
`exportable_cache::attention_rounded` may round the operands of a prompt's products to bfloat16.
`exportable_cache::write` writes new rows to the slots where attention reads them. Both take lengths as a tensor, so
that no value of a step is read into the program. `exportable_cache::quantize` quantizes new rows to 8 or 4 bits.

Slots are of two kinds, as in `SinkPolicy`: the first `kept` slots hold the tokens of their positions and are never
overwritten; the others are a ring of the newest tokens after those. All slots of a full layer are kept, and no slot of
a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ....cache.storage import Int4Storage, Int8Storage
from ....common.compat.executorch import runtime
from ....common.native.kernels import load_native_kernels
from ....errors import MissingDependencyError

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_ATTENTION = (
    "(Tensor query, Tensor[] stored, Tensor[] fresh, Tensor length, float scaling, int kept, int window, int chunk, "
    "float softcap, Tensor? sinks, Tensor? bias"
)
_WRITE = "(Tensor rows, Tensor(a!) cache, Tensor length, int kept, Tensor? after"
_QUANTIZE = "(Tensor rows, int bits"
_ROUNDED: dict[int, type[Int8Storage] | type[Int4Storage]] = {8: Int8Storage, 4: Int4Storage}
_library = torch.library.Library("exportable_cache", "FRAGMENT")
# ExecuTorch calls the out variants.
for _name in ("attention", "attention_rounded"):
    _library.define(f"{_name}{_ATTENTION}) -> Tensor")
    _library.define(f"{_name}.out{_ATTENTION}, *, Tensor(a!) out) -> Tensor(a!)")
_library.define(f"write{_WRITE}) -> Tensor")
_library.define(f"write.out{_WRITE}, *, Tensor(b!) out) -> Tensor(b!)")
_library.define(f"quantize{_QUANTIZE}) -> (Tensor, Tensor)")
_library.define(f"quantize.out{_QUANTIZE}, *, Tensor(a!) numbers, Tensor(b!) scales) -> (Tensor(a!), Tensor(b!))")


def check_native_kernels() -> None:
    """Refuse to export a program that could not be verified here.

    Raises:
        MissingDependencyError: If the compiled kernels are not loaded.
    """
    runtime()
    if load_native_kernels() is None:
        raise MissingDependencyError(
            "kernels='native' and linears='native' need the compiled kernels of this package, which are not loaded; "
            "build them with `exportable-cache native build`, or pass kernels='executorch' and linears='delegate'"
        )


def attention(
    query: torch.Tensor,
    stored: Sequence[torch.Tensor],
    fresh: Sequence[torch.Tensor],
    length: torch.Tensor,
    scaling: float,
    kept: int,
    window: int,
    chunk: int,
    softcap: float,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Compute causal attention over a cache in plain operators, as the kernel does.

    Args:
        query: [batch, heads, query_length, head_dim].
        stored: Tensors of the layer's storage: keys and values [batch * num_heads, slots, 1, dim]; for int8, and for
            uint8 with two values per byte as `Int4Storage` packs them, also the scales of both, float32 [..., 1]. Or
            keys only, which are also the values.
        fresh: The same tensors for the new tokens, [batch * num_heads, new_length, 1, dim]; the queries are the last of
            them. If all slots are kept, `stored` already holds them.
        length: Tokens of each row before the new ones, int64 [batch].
        scaling: Factor on the scores.
        kept: Number of slots that are never overwritten.
        window: Number of newest tokens that a query sees of those in other slots, itself included; 0 for all.
        chunk: Length of chunks, of which a query sees its own only; 0 for all tokens.
        softcap: Scores become `softcap * tanh(scores / softcap)`; 0 for none.
        sinks: Additional score in the softmax that has no value, float32, broadcastable to [batch, heads, query_length,
            1].
        bias: Added to the scores after that, by key position, float32, broadcastable to [batch, heads, query_length,
            positions].

    Returns:
        [batch, query_length, heads, value_head_dim].
    """
    batch, heads, query_length = query.shape[:3]
    tokens, is_ring = fresh[0].shape[1], kept < stored[0].shape[1]
    outputs = []
    for row in range(batch):
        start = int(length[row])
        at = start + torch.arange(tokens)
        held = start if is_ring else start + tokens
        keys, values, positions = _in_slots([_of_row(part, row, batch) for part in stored], held, kept)
        if is_ring:
            new_keys, new_values = _numbers([_of_row(part, row, batch) for part in fresh])
            keys, values = torch.cat([keys, new_keys], dim=1), torch.cat([values, new_values], dim=1)
            positions = torch.cat([positions, at])
        groups = heads // keys.shape[0]
        scores = query[row].float() @ keys.repeat_interleave(groups, dim=0).transpose(1, 2) * scaling
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            of_row = bias[row if bias.shape[0] > 1 else 0]
            scores = scores + of_row[..., positions]
        query_at = at[tokens - query_length :, None]
        seen = positions > query_at - window if window else positions >= 0
        if chunk:
            seen = seen & (positions // chunk == query_at // chunk)
        seen = (seen | (positions < kept)) & (positions <= query_at)
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            of_row = sinks[row if sinks.shape[0] > 1 else 0].expand(heads, query_length, 1)
            scores = torch.cat([scores, of_row], dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(positions)]
        outputs.append((weights @ values.repeat_interleave(groups, dim=0)).transpose(0, 1))
    return torch.stack(outputs).to(query.dtype).contiguous()


def round_attention(program: ExportedProgram) -> ExportedProgram:
    """Replace each `attention` by `attention_rounded`, in place."""
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.exportable_cache.attention.default):
        node.target = torch.ops.exportable_cache.attention_rounded.default
    program.graph_module.recompile()
    return program


def write(
    rows: torch.Tensor, cache: torch.Tensor, length: torch.Tensor, kept: int, after: torch.Tensor | None
) -> torch.Tensor:
    """Write rows to their slots, in place.

    Args:
        rows: Rows of the new tokens, [batch * num_heads, query_length, 1, dim].
        cache: [batch * num_heads, slots, 1, dim].
        length: Tokens of each row before them, int64 [batch].
        kept: Number of slots that are never overwritten.
        after: Tensor to compute first, because only this dependency keeps the write after attention to the same slots.

    Returns:
        Zeros [1], because an ExecuTorch operator must return a tensor.
    """
    heads, ring = rows.shape[0] // length.shape[0], max(cache.shape[1] - kept, 1)
    starts, each = length.repeat_interleave(heads), torch.arange(rows.shape[0])
    for token in range(rows.shape[1]):
        position = starts + token
        slot = torch.where(position < kept, position, kept + (position - kept) % ring)
        cache[each, slot] = rows[:, token]
    return _nothing()


def quantize(rows: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows as `Int8Storage` and `Int4Storage` store them.

    Args:
        rows: float32 [batch * num_heads, length, 1, dim].
        bits: 8 or 4.

    Returns:
        int8 [batch * num_heads, length, 1, dim], or uint8 [..., dim / 2] with two values per byte; and float32 scales
        [batch * num_heads, length, 1, 1].
    """
    return _ROUNDED[bits](dtype="float32").quantize(rows)


def _of_row(part: torch.Tensor, row: int, batch: int) -> torch.Tensor:
    """Return [num_heads, length, dim] of one row of the batch."""
    return part.reshape(batch, -1, *part.shape[1:])[row].squeeze(2)


def _in_slots(stored: Sequence[torch.Tensor], held: int, kept: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return keys and values of the tokens in slots, and their positions [length]."""
    slots = stored[0].shape[1]
    positions = torch.cat(
        [torch.arange(min(held, kept)), torch.arange(max(kept, held - (slots - kept)), max(kept, held))]
    )
    ring = max(slots - kept, 1)
    slot = torch.where(positions < kept, positions, kept + (positions - kept) % ring)
    keys, values = _numbers([part[:, slot] for part in stored])
    return keys, values, positions


def _numbers(parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return float32 keys and values [num_heads, length, dim] of stored tensors."""
    rows = [
        Int4Storage(dtype="float32").unpack(part) if part.dtype == torch.uint8 else part.float() for part in parts[:2]
    ]
    if len(parts) > 2:
        return [part * scales for part, scales in zip(rows, parts[2:], strict=True)]
    return rows if len(parts) == 2 else rows * 2


def _nothing() -> torch.Tensor:
    return torch.zeros(1)


def _attention_into(*arguments: Any, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(attention(*arguments))


def _write_into(*arguments: Any, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(write(*arguments))


def _attention_output(query: torch.Tensor, stored: Sequence[torch.Tensor], *further: object) -> torch.Tensor:
    batch, heads, query_length = query.shape[:3]
    values = stored[1 if len(stored) > 1 else 0]
    packed = 2 if values.dtype == torch.uint8 else 1
    return query.new_empty(batch, query_length, heads, values.shape[3] * packed)


def _write_output(rows: torch.Tensor, *further: object) -> torch.Tensor:
    return rows.new_empty(1, dtype=torch.float32)


def _quantize_into(
    rows: torch.Tensor, bits: int, *, numbers: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    found = quantize(rows, bits)
    return numbers.copy_(found[0]), scales.copy_(found[1])


def _quantize_output(rows: torch.Tensor, bits: int, **further: object) -> tuple[torch.Tensor, torch.Tensor]:
    *others, dim = rows.shape
    is_packed = bits == 4
    numbers = rows.new_empty(*others, dim // 2 if is_packed else dim, dtype=torch.uint8 if is_packed else torch.int8)
    return numbers, rows.new_empty(*others, 1, dtype=torch.float32)


for _name, _plain, _into, _fake in (
    ("attention", attention, _attention_into, _attention_output),
    ("attention_rounded", attention, _attention_into, _attention_output),
    ("write", write, _write_into, _write_output),
    ("quantize", quantize, _quantize_into, _quantize_output),
):
    _library.impl(_name, _plain, "CompositeExplicitAutograd")
    _library.impl(f"{_name}.out", _into, "CompositeExplicitAutograd")
    torch.library.register_fake(f"exportable_cache::{_name}", _fake, lib=_library)
