"""Shifts: a range of positions is dropped, and the rows after it move to lower positions.

Keys are stored after the rotary embedding, so a moved key is rotated from the angle of its old position to that of its
new one. Slots and angles follow from tensors, so one graph serves every shift.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .slots import read_slots

if TYPE_CHECKING:
    from .layers import CacheLayer

#: Angles of moved rows by `Rotation.index`: cosines and sines float32 [batch_size, capacity, pairs].
Angles = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Rotation:
    """The rotary embedding of one stored tensor: pairs of elements of a row, rotated by position times frequency.

    Attributes:
        index: Index of its frequencies among those of the model.
        pairs: Number of pairs.
        start: Index of the first rotated element of a row.
        interleaved: True if neighbours are pairs, False if element i belongs to element i + pairs.
        tensor: Name of the stored tensor: `keys`, or `values` where these hold the rotated part (latents of MLA).
    """

    index: int
    pairs: int
    start: int = 0
    interleaved: bool = False
    tensor: str = "keys"


def turns(
    frequencies: torch.Tensor, old: torch.Tensor, new: torch.Tensor, later: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of the rotation from old positions to new ones, float32 [..., pairs].

    Computed from both angles as models round them, position times frequency in float32. Their difference alone would
    lack that rounding, which is 1e-4 at position 4,096.

    Args:
        frequencies: float32 [pairs], or [..., pairs].
        old: Position that each row was rotated for, int64 [...].
        new: Position that it moves to, int64 [...].
        later: Frequencies of the new positions; None if they are the same.
    """
    before = old.to(torch.float32)[..., None] * frequencies
    after = new.to(torch.float32)[..., None] * (frequencies if later is None else later)
    cosine = after.cos() * before.cos() + after.sin() * before.sin()
    sine = after.sin() * before.cos() - after.cos() * before.sin()
    return cosine, sine


def rotated(rows: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Return rows [..., dim] with the pairs of `rotation` rotated further.

    Args:
        rows: Rows of any floating dtype. Those of 16 bits are rotated in float32.
        cosine: Broadcastable to [..., pairs].
        sine: Like `cosine`.
        rotation: The pairs.
    """
    wide = rows if rows.dtype in (torch.float32, torch.float64) else rows.to(torch.float32)
    start, pairs = rotation.start, rotation.pairs
    part = wide[..., start : start + 2 * pairs]
    first, second = (part[..., 0::2], part[..., 1::2]) if rotation.interleaved else part.chunk(2, dim=-1)
    both = [first * cosine - second * sine, second * cosine + first * sine]
    turned = torch.stack(both, dim=-1).flatten(-2) if rotation.interleaved else torch.cat(both, dim=-1)
    rest = wide[..., :start], wide[..., start + 2 * pairs :]
    whole = [piece for piece in (rest[0], turned, rest[1]) if piece.shape[-1]]
    return (whole[0] if len(whole) == 1 else torch.cat(whole, dim=-1)).to(rows.dtype)


def shift_layer(
    layer: CacheLayer,
    rotation: Rotation | None,
    dropped: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    angles: Angles,
) -> None:
    """Drop positions of a layer, in place; a layer without keys is left unchanged.

    Args:
        layer: The layer, in any layout whose slots are one dimension.
        rotation: Its rotary embedding; None if no stored tensor depends on the position.
        dropped: Length before, first dropped position and number of dropped positions, each int64 [batch_size].
        angles: See `Angles`.
    """
    storage = layer.storage
    if storage is None or not layer.follows_decoder:
        return
    policy, (length, first, count) = layer.policy, (number[:, None] for number in dropped)
    new = policy.positions(length - count)
    # No negative numbers, because ExecuTorch's integer remainder has the dividend's sign. Such slots are not read.
    old = torch.where(new < first, new, new + count).clamp(min=0)
    slots = policy.next_slot(old).clamp(min=0, max=policy.slot_count - 1)
    moved = {name: _rows(layer, name, slots) for name in layer.state if name in storage.parts}
    if rotation is not None:
        cosine, sine = (_beside(layer, values) for values in angles(rotation.index, old, new.clamp(min=0)))
        # The stored parts of keys or of values alone: each is passed for both.
        names = [name for name in storage.parts if name.startswith(rotation.tensor.removesuffix("s"))]
        joined = rotation.tensor not in moved
        names = ["keys"] if joined else names
        rows = storage.decode([moved[name] for name in names for _ in range(2)])[0]
        rows = rotated(rows, cosine, sine, rotation)
        moved |= dict(zip(names, storage.encode(rows, rows)[::2], strict=True))
    everywhere = torch.arange(policy.slot_count, device=layer.device)
    for name, rows in moved.items():
        # Not copied as a whole, because ExecuTorch writes an index in place, and a copy at the end of the method.
        getattr(layer, name).index_copy_(_slot_dim(layer, name), everywhere, rows)


def _slot_dim(layer: CacheLayer, name: str) -> int:
    dims = layer.state[name].dims
    return next(index for index, dim in enumerate(dims) if dim in ("capacity", "slots"))


def _rows(layer: CacheLayer, name: str, slots: torch.Tensor) -> torch.Tensor:
    """Return the rows at `slots` int64 [batch_size, n], in the dimensions of the tensor."""
    stored, dim = getattr(layer, name), _slot_dim(layer, name)
    return stored.index_select(dim, slots[0]) if slots.shape[0] == 1 else read_slots(stored, slots)


def _beside(layer: CacheLayer, values: torch.Tensor) -> torch.Tensor:
    """Return angles [batch_size, capacity, pairs] in the dimensions of a layer's rows."""
    # [batch_size, heads, capacity, dim], or [heads, capacity, 1, dim] in layouts of one row.
    return values[:, None] if _slot_dim(layer, "keys") == 2 else values[0][:, None]
