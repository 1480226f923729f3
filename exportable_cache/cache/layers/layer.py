"""A cache layer as the models of transformers use it: written, read, counted, taken back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from ...errors import InputError
from ..checks import check_new_states, check_rollback, check_room, is_traced, row_numbers
from ..step import PLAIN
from ..storage.slots import tracked, write_slots, write_slots_
from .composed import ComposedLayer


class CacheLayer(ComposedLayer, CacheLayerMixin):
    """One layer of a cache, as transformers uses it: a policy, a storage and a kernel around a fixed set of tensors.

    The policy says which slot a token goes to and which position a slot holds, the storage how keys and values are
    kept, the kernel how both are emitted. How it comes by its tensors: see `ComposedLayer`.

    Every length is a tensor, `cumulative_length` [batch_size] int64, so no graph ever depends on how many tokens were
    seen, and the rows of a batch may differ.
    """

    is_compileable = True
    # Transformers would allocate lazily, from the first keys it sees; our tensors exist from construction.
    supports_early_init = False
    #: True if tokens can be taken back at all.
    is_croppable = True

    keys: torch.Tensor
    values: torch.Tensor
    # The types differ because transformers annotates lengths as int, although its static layers keep a tensor.
    cumulative_length: torch.Tensor  # type: ignore[assignment]

    # -- what the policy says -----------------------------------------------------------------------------------------

    @property
    def is_sliding(self) -> bool:
        """Whether a window hides older tokens, as transformers' `is_sliding`."""
        return self.policy.is_sliding

    @property
    def is_linear(self) -> bool:
        """Whether it keeps states of fixed size and no keys and values per token, as transformers'
        `Cache.is_linear`.
        """
        return self.policy.is_linear

    @property
    def is_dummy(self) -> bool:
        """Whether it keeps nothing, as transformers' `Cache.is_dummy`."""
        return self.policy.is_dummy

    @property
    def follows_decoder(self) -> bool:
        """Whether the layer's length is the decoder's: a step may say what it is. Not of cross-attention."""
        return self.policy.follows_decoder

    @property
    def forgetting(self) -> str:
        """Why `max_rollback` is less than all, for messages."""
        return self.policy.forgetting

    @property
    def capacity(self) -> int | None:
        """Slots; None where there are no keys."""
        return self.policy.capacity

    @property
    def max_length(self) -> int | None:
        """Tokens a row can hold in all, or None where any number may be seen."""
        return self.policy.max_length

    def max_rollback(self, length: int, max_len_ever: int) -> int:
        """See `SlotPolicy.max_rollback`."""
        return self.policy.max_rollback(length, max_len_ever)

    # -- keys and values ----------------------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens of each row at its own length, and return what attention reads; see the kernel's
        `update`.

        Args:
            key_states: [batch_size, num_heads, query_length, head_dim].
            value_states: [batch_size, num_heads, query_length, value_head_dim].

        Returns:
            Keys [batch_size, num_heads, kv_length, head_dim] and values [..., value_head_dim], in the dtype of the new
            ones.

        Raises:
            CacheFullError: If they do not fit; nothing was written.
            InputError: If shape, dtype or device differ from the layer's, or it keeps no keys.
        """
        if self.residence is not None:
            return self.residence.turn(self).update(key_states, value_states, *args, **kwargs)
        self.check_update(key_states, value_states)
        return self.kernel.update(self, key_states, value_states)

    def check_update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Refuse keys and values that the layer cannot take, outside of traced paths."""
        if self.storage is None:
            raise InputError(
                "this layer keeps no keys and values (it shares another layer's, or has a state in their place), but "
                "the model wrote some; allocate the cache with ExportableCache.from_model"
            )
        if not is_traced(self.cumulative_length):
            check_new_states(self, key_states, value_states)
            # Elsewhere reading a length waits for the device, and the cache has already looked once for all layers.
            if self.max_length is not None and self.device.type == "cpu":
                check_room(self.cumulative_length, key_states.shape[2], self.max_length)

    def write(self, slots: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor) -> list[torch.Tensor]:
        """Put new keys and values [batch_size, num_heads, query_length, dim] into `slots` int64 [batch_size,
        query_length].

        Returns:
            The written parts, for `read`.
        """
        storage = self.storage
        assert storage is not None
        parts = []
        for name, rows in zip(storage.parts, storage.encode(key_states, value_states), strict=True):
            if self.context.in_place:
                # Not assigned: rebinding the attribute to an alias of itself would make it an output of compiled
                # graphs.
                part = tracked(getattr(self, name), rows)
                write_slots_(part, slots, rows)
            else:
                part = write_slots(getattr(self, name), slots, rows)
                setattr(self, name, part)
            parts.append(part)
        return parts

    def replace(self, name: str, tensor: torch.Tensor) -> None:
        """Give a state tensor new contents of the same shape."""
        if self.context.in_place:
            getattr(self, name).copy_(tensor.detach() if tensor.requires_grad else tensor)
        else:
            setattr(self, name, tensor)

    def read(self, slots: int, stored: list[torch.Tensor] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first `slots` slots, [batch_size, num_heads, slots, dim], of the parts that
        `write` gave, or of what is stored.
        """
        storage = self.storage
        assert storage is not None
        if stored is None:
            stored = [getattr(self, name) for name in storage.parts]
        # ExecuTorch copies even a slice of everything; a dynamic number must not be compared.
        if self.reads_so_far or slots < self.policy.slot_count:
            stored = [part[:, :, :slots] for part in stored]
        return storage.decode(stored)

    def slot_positions(self, query_length: int) -> torch.Tensor | None:
        """Absolute position of each key that `update` returns for `query_length` new tokens, see
        `SlotPolicy.mask_positions`.
        """
        if self.storage is None:
            raise InputError(
                f"a layer of policy {self.policy.kind!r} has no keys; masks are sized by a layer that has some"
            )
        return self.kernel.mask_positions(self, query_length)

    @property
    def slots_read(self) -> int:
        """Slots that this step looks at."""
        kv_slots = self.context.kv_slots
        if kv_slots is not None and self.reads_so_far:
            return kv_slots
        return self.policy.slots_read(self.context.kv_read_len)

    @property
    def reads_so_far(self) -> bool:
        """Whether the step says how many slots are read, see `StepContext.kv_slots`; not of a ring that may have
        wrapped.
        """
        context = self.context
        return context.kv_slots is not None and self.policy.reads_up_to(context.kv_read_len)

    # -- everything generic -------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the state lives."""
        return self.cumulative_length.device

    def advance(self, query_length: int) -> None:
        """Count `query_length` new tokens in every row."""
        if not self.context.counts:
            return
        if self.context.in_place:
            self.cumulative_length.add_(query_length)
        else:
            self.cumulative_length = self.cumulative_length + query_length

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the tensors exist from construction."""

    # The types differ because transformers annotates lengths as int, although its static layers keep a tensor.
    def get_seq_length(self) -> torch.Tensor:  # type: ignore[override]
        """Tokens seen, int64 0-D: a view of the first row, which stands for all where rows agree."""
        return self.cumulative_length[0]

    def get_max_length(self) -> int:
        """Transformers' form of `max_length`: -1 where there is no limit."""
        return -1 if self.max_length is None else self.max_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int | torch.Tensor]:  # type: ignore[override]
        """Length of the keys that `update` will return, and their offset from `arange(kv_length)`.

        Adding the offset to `arange(kv_length)`, as transformers' masks do, gives each key's absolute position.

        Returns:
            `(kv_length, 0)`, or `(kv_length, offset)` with offset int64 [batch_size, kv_length] or [batch_size,
            query_length, kv_length].
        """
        positions = self.slot_positions(query_length)
        if positions is None:
            return self.slots_read, 0
        kv_length = positions.shape[-1]
        return kv_length, positions - torch.arange(kv_length, device=positions.device)

    def reset(self) -> None:
        """Empty the layer, in place, so that addresses stay."""
        for _, tensor in self.named_state():
            tensor.zero_()
        self._max_len_ever = 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Give row `i` the state of row `beam_idx[i]`, in place.

        Args:
            beam_idx: int64 [batch_size].

        Raises:
            InputError: If it is anything else.
        """
        if self.is_dummy:
            return
        beam_idx = row_numbers(beam_idx, self.cumulative_length.shape[0])
        for _, tensor in self.named_state():
            tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens of every row, by length; nothing is moved.

        Args:
            tokens_to_remove: Zero, or minus the number of tokens to take back (transformers' convention).

        Raises:
            InputError: If positive, if a row has fewer tokens, or if a slot still needed was overwritten.
        """
        if tokens_to_remove > 0:
            raise InputError(
                f"crop takes minus the number of tokens to remove, got {tokens_to_remove}; pass {-tokens_to_remove}"
            )
        if tokens_to_remove < 0 and not self.is_dummy:
            self._max_len_ever = check_rollback(self, -tokens_to_remove)
            self.cumulative_length.sub_(-tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused: the batch size of a static cache is fixed."""
        if not isinstance(repeats, int) or repeats != 1:
            raise InputError(
                f"a static cache cannot be repeated {repeats!r} times; allocate it with the larger batch_size"
            )

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """`reorder_cache`: as many rows as there are, int64 [batch_size]."""
        self.reorder_cache(indices)

    def offload(self) -> None:
        """Refused: moving the tensors would change the addresses that programs and graphs hold."""
        raise InputError(
            "a static cache is not offloaded: its tensors keep their addresses; use DynamicCache(offloading=True)"
        )

    prefetch = offload

    def __reduce__(self) -> tuple[Any, ...]:
        # By description: exported programs carry their example inputs, which are read back by classes that torch knows
        # alone.
        return rebuilt, (type(self), self.config(), dict(self.named_state()), self._max_len_ever)


def rebuilt(
    cls: type[CacheLayer], config: Mapping[str, Any], tensors: Mapping[str, Any], max_len_ever: int | None
) -> CacheLayer:
    """A layer out of a pickle."""
    layer = cls.from_state(config, tensors)
    layer.begin(PLAIN, max_len_ever)
    return layer


torch.serialization.add_safe_globals([rebuilt])
