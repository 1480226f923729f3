"""Layouts: how a layer's rows are laid out, written and read; the interface, and the portable layout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from .component import Component
from .policies import is_one
from .slots import aligned, read_slots

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .policies import SlotPolicy
    from .step import StepContext
    from .storage import Storage


class StateTensor:
    """A declaration of one state tensor: its dimensions by name and its dtype.

    `StateTensor("batch_size", "num_heads", "capacity", "head_dim", dtype=torch.float32)` with sizes 1, 4, 128, 64 is a
    float32 tensor [1, 4, 128, 64].

    Args:
        dims: Names of the dimensions.
        dtype: Element type.
    """

    def __init__(self, *dims: str, dtype: torch.dtype) -> None:
        self.dims = dims
        self.dtype = dtype


class WrittenLayer(Protocol):
    """The part of a `CacheLayer` that layouts use, see there."""

    keys: torch.Tensor
    values: torch.Tensor
    context: StepContext

    @property
    def policy(self) -> SlotPolicy:
        """Policy of the slots."""
        ...

    @property
    def layout(self) -> Layout:
        """Layout of the tensors."""
        ...

    @property
    def storage(self) -> Storage | None:
        """Storage of keys and values; None without keys."""
        ...

    @property
    def cumulative_length(self) -> torch.Tensor:
        """Tokens seen per row, int64 [batch_size]."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of the state."""
        ...

    @property
    def capacity(self) -> int | None:
        """Number of slots; None without keys."""
        ...

    @property
    def slots_read(self) -> int:
        """Number of slots that this step reads."""
        ...

    def named_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the state tensors with their names."""
        ...

    def advance(self, query_length: int) -> None:
        """See `CacheLayer.advance`."""
        ...

    def read(
        self, slots: int, stored: list[torch.Tensor] | None = None, query_length: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `CacheLayer.read`."""
        ...

    def decoded(self, stored: list[torch.Tensor], query_length: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """See `CacheLayer.decoded`."""
        ...

    def replace(self, name: str, tensor: torch.Tensor) -> None:
        """See `CacheLayer.replace`."""
        ...

    def write(self, slots: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor) -> list[torch.Tensor]:
        """See `CacheLayer.write`."""
        ...


class Layout(Component, ABC):
    """Interface of how a target lays out the tensors of a policy and a storage, writes them, and reads them.

    Members are frozen dataclasses of JSON fields. A target defines its own and puts them into layers before a program
    is traced.
    """

    family = "layout"
    kinds: ClassVar[dict[str, type[Layout]]] = {}

    #: Dimensions of a stored tensor before its last.
    row_dims: ClassVar[tuple[str, ...]] = ("batch_size", "num_heads", "capacity")

    def declare(self, layer: WrittenLayer) -> dict[str, StateTensor]:
        """Return the declarations of the tensors of a layer's keys and values, if it keeps any."""
        parts = layer.storage.parts if layer.storage is not None else {}
        return {name: StateTensor(*self.row_dims, part.dim, dtype=part.dtype) for name, part in parts.items()}

    def sizes(self, policy: SlotPolicy) -> Mapping[str, int]:
        """Return the size of each of `row_dims` that follows from the policy."""
        return {"capacity": policy.slot_count}

    def mask_positions(self, layer: WrittenLayer, query_length: int) -> torch.Tensor | None:
        """Return the positions of the keys that `update` returns, see `SlotPolicy.mask_positions`."""
        return layer.policy.mask_positions(layer.cumulative_length, query_length, layer.context.kv_read_len)

    @abstractmethod
    def update(
        self, layer: WrittenLayer, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens, advance the length, and return what attention reads.

        Args:
            layer: Layer to write, in the step of `layer.context`.
            key_states: [batch_size, num_heads, query_length, head_dim].
            value_states: [batch_size, num_heads, query_length, value_head_dim].

        Returns:
            Keys and values for the target's attention.
        """


@dataclass(frozen=True)
class PortableLayout(Layout, kind="portable"):
    """Layout with plain operators on [batch_size, num_heads, capacity, dim], for any policy, storage and runtime."""

    def update(
        self, layer: WrittenLayer, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Layout.update`.

        If no slot is reused in the step, the new tokens are appended, and attention reads the slots that the step may
        reach. Otherwise one token overwrites the oldest, and attention reads all slots; several tokens attend to the
        previous slots and to themselves, and then the slots are updated by one gather per tensor.

        Returns:
            Keys and values [batch_size, num_heads, kv_length, dim], kv_length being `policy.slots_read` in the first
            case, capacity in the second, and capacity + query_length in the third, see `aligned`.
        """
        policy, query_length = layer.policy, key_states.shape[2]
        length = layer.cumulative_length
        if not policy.wraps(layer.context.kv_read_len):
            slots = policy.slots_of(length[:, None] + torch.arange(query_length, device=length.device))
            stored = self._write(layer, slots, key_states, value_states)
            layer.advance(query_length)
            return layer.read(layer.slots_read, stored, query_length)
        if is_one(query_length):
            stored = self._write(layer, policy.next_slot(length)[:, None], key_states, value_states)
            layer.advance(1)
            return layer.read(policy.slot_count, stored, 1)
        return self._gather(layer, key_states, value_states)

    def _write(
        self, layer: WrittenLayer, slots: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> list[torch.Tensor]:
        """See `CacheLayer.write`: the written parts, each [batch_size, num_heads, capacity, dim]."""
        return layer.write(slots, key_states, value_states)

    def _gather(
        self, layer: WrittenLayer, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Overwrite the slots whose positions are new, and return the previous slots followed by the new tokens."""
        policy, storage, query_length = layer.policy, layer.storage, key_states.shape[2]
        assert storage is not None
        length = layer.cumulative_length[:, None]
        positions = policy.positions(length + query_length)
        slot = torch.arange(policy.slot_count, device=length.device)
        source = torch.where(positions >= length, policy.slot_count + positions - length, slot)
        seen = []
        for name, rows in zip(storage.parts, storage.encode(key_states, value_states), strict=True):
            joined = torch.cat([getattr(layer, name), rows], dim=2)
            layer.replace(name, read_slots(joined, source))
            seen.append(aligned(joined, 2))
        layer.advance(query_length)
        return layer.decoded(seen, None)


#: Layout of new layers; a target may replace it.
PORTABLE = PortableLayout()
