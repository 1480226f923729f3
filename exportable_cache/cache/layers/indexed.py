"""Layer of sparse attention: full attention, and an indexer's keys (GLM MoE DSA, DeepSeek V3.2, MiniMax M3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...errors import InputError
from ..component import Component, check_count
from ..layout import PORTABLE, StateTensor
from ..slots import tracked
from .layer import CacheLayer

if TYPE_CHECKING:
    from ..policies import FullPolicy
    from ..step import StepContext
    from ..storage import Storage
    from .layer import RowSizes


@dataclass(frozen=True)
class IndexerKeys(Component):
    """A further key per token: [batch_size, capacity, head_dim].

    Attributes:
        head_dim: Size of an indexer key.
        dtype: Its dtype by name.

    Raises:
        InputError: If `head_dim` is not a positive int.
    """

    family = "indexer"

    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        check_count(self.head_dim, "index_head_dim of an indexed layer", 1)
        dtype = getattr(torch, self.dtype, None) if isinstance(self.dtype, str) else None
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise InputError(f"dtype of an indexed layer must be a floating dtype such as float32, got {self.dtype!r}")

    def to_config(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {"head_dim": self.head_dim, "dtype": self.dtype}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> IndexerKeys:
        """Return the keys that `to_config` described.

        Raises:
            InputError: If the config is something else.
        """
        try:
            return cls(**config)
        except TypeError as error:
            raise InputError(f"indexer must describe its keys, got another config ({error})") from error


class IndexedLayer(CacheLayer):
    """Layer of full attention with one more key per token, the indexer's: [batch_size, capacity, index_head_dim].

    Args:
        policy: `FullPolicy` of all keys and values.
        indexer: Sizes of the indexer's keys.
        storage: Storage of the keys and values; the indexer's keys are stored unchanged.
        sizes: Sizes of the keys and values.
        device: Device to allocate on.
    """

    composed_of = {**CacheLayer.composed_of, "indexer": IndexerKeys}

    indexer: IndexerKeys
    indexer_keys: torch.Tensor

    def __init__(
        self,
        policy: FullPolicy,
        indexer: IndexerKeys,
        storage: Storage,
        sizes: RowSizes,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        self.compose(policy=policy, storage=storage, layout=PORTABLE, indexer=indexer)
        self.allocate({**self.row_sizes(sizes), "index_head_dim": indexer.head_dim}, device)

    def declare(self) -> dict[str, StateTensor]:
        """See `CacheLayer.declare`."""
        dtype = getattr(torch, self.indexer.dtype)
        return {
            **super().declare(),
            "indexer_keys": StateTensor("batch_size", "capacity", "index_head_dim", dtype=dtype),
        }

    def known_sizes(self) -> dict[str, int]:
        """See `CacheLayer.known_sizes`."""
        return {**super().known_sizes(), "index_head_dim": self.indexer.head_dim}

    def begin(self, context: StepContext, max_len_ever: int | None) -> None:
        """See `CacheLayer.begin`."""
        super().begin(context, max_len_ever)
        # The second of a step's two updates, which may come in either order.
        self._awaiting: str | None = None
        self._uncounted = 0

    def get_seq_length(self) -> torch.Tensor:  # type: ignore[override]
        """Return the number of tokens, int64 0-D, with those of this step's `update` (GLM 5 Next asks for it)."""
        return self.cumulative_length[0] + self._uncounted

    @property
    def indexer_position_ids(self) -> None:
        """Positions of earlier tokens (Qwen4 Exp); None, because slots are positions."""
        return None

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: torch.Tensor) -> None:
        """Ignore the positions."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `CacheLayer.update`."""
        result = super().update(key_states, value_states, *args, **kwargs)
        self._awaiting = None if self._awaiting == "update" else "indexer"
        self._uncounted = 0 if self.context.counts else key_states.shape[2]
        return result

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append the indexer keys of the same tokens, before or after `update`.

        Args:
            indexer_key_states: [batch_size, query_length, index_head_dim].

        Returns:
            All slots that are read, [batch_size, slots, index_head_dim]; the mask hides those past the newest token.
        """
        query_length = indexer_key_states.shape[1]
        start = self.cumulative_length if self.context.start is None else self.context.start
        if self.context.start is None and self._awaiting == "indexer":
            # In plain use `update` has counted these tokens already.
            start = start - query_length
        self._awaiting = None if self._awaiting == "indexer" else "update"
        slots = start[:, None] + torch.arange(query_length, device=self.device)
        new = indexer_key_states.to(self.indexer_keys.dtype)
        if self.context.in_place:
            keys = tracked(self.indexer_keys, new)
            _write_rows_(keys, slots, new)
        else:
            keys = self.indexer_keys = _write_rows(self.indexer_keys, slots, new)
        return keys[:, : self.slots_read]

    def update_index(self, idx_k: torch.Tensor) -> torch.Tensor:
        """Append the indexer keys, [batch_size, 1, query_length, index_head_dim] (MiniMax M3); see `update_indexer`."""
        return self.update_indexer(idx_k[:, 0])[:, None]


def _write_rows_(buffer: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows [batch_size, query_length, dim] into [batch_size, capacity, dim] in place, see `write_slots_`."""
    if buffer.shape[0] == 1:
        buffer.index_copy_(1, slots[0], rows)
    else:
        torch.ops.aten.index_put_.default(buffer, _row_index(buffer, slots), rows)


def _write_rows(buffer: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if buffer.shape[0] == 1:
        return buffer.index_copy(1, slots[0], rows)
    return torch.ops.aten.index_put.default(buffer, _row_index(buffer, slots), rows)


def _row_index(buffer: torch.Tensor, slots: torch.Tensor) -> list[torch.Tensor]:
    return [torch.arange(buffer.shape[0], device=buffer.device)[:, None], slots]
