"""Description of a program in the static form, for its host; importing it imports no transformers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class StaticLayer:
    """A layer's cache, which the host keeps.

    Attributes:
        mask: Name of its mask, `full_attention` or `sliding_attention`.
        slots: Number of slots, each of one token.
        window: Number of tokens that a query sees, itself included; None for all.
        heads: Number of key heads.
        key_size: Size of a key.
        value_size: Size of a value.
    """

    mask: str
    slots: int
    window: int | None
    heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True)
class StaticPlan:
    """Describes a program to the host's loop; part of the manifest.

    Attributes:
        layers: Layers in order.
        tables: Names of the rotary tables, `rope_0_cos`, `rope_0_sin`, in the order of the inputs.
        positions: True if the methods take the positions, as learned embeddings do.
        transposed: True if keys are [1, heads, key size, slots], else [1, heads, slots, key size].
    """

    layers: list[StaticLayer]
    tables: list[str]
    positions: bool
    transposed: bool

    @property
    def masks(self) -> list[str]:
        """Names of the masks, in the order of the inputs."""
        return sorted({layer.mask for layer in self.layers})

    @property
    def inputs(self) -> list[str]:
        """Names of a method's inputs, in order."""
        caches = [f"layers_{index}_{kind}" for index in range(len(self.layers)) for kind in ("keys", "values")]
        return ["input_ids", *(["positions"] if self.positions else []), *self.masks, *self.tables, *caches]

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)
