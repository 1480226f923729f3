"""The interface of a cache layer: its state is declared once, and everything generic derives from the declaration."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from transformers.cache_utils import CacheLayerMixin

from ...errors import InputError
from ...pytree import register_node

_INTERFACE = ("update", "slot_positions", "max_length", "max_rollback")


class StateTensor:
    """Declaration of one state tensor: its dimensions by name, batch first, and its dtype.

    `StateTensor("batch_size", "num_heads", "capacity", "head_dim")` with sizes 1, 4, 128, 64 is a tensor
    [1, 4, 128, 64] of the layer's dtype.

    Args:
        dims: Names of the dimensions.
        dtype: Element type; None stands for the dtype the layer is constructed with.
    """

    def __init__(self, *dims: str, dtype: torch.dtype | None = None) -> None:
        self.dims = dims
        self.dtype = dtype


class CacheLayer(CacheLayerMixin):
    """One layer's storage policy: a fixed set of tensors plus arithmetic on positions.

    A subclass declares `state` (the tensors) and `config_names` (the JSON attributes needed to rebuild the layer around
    other tensors), and implements `update` (write, then return what to attend over) and `slot_positions` (which absolute
    position each returned key holds). Pytree children and keys, the FX spec, program buffers, `reset`, `reorder_cache`,
    `nbytes`, saving and restoring all follow from the declaration.

    Every length is a tensor, `cumulative_length` [batch_size] int64, so no graph ever depends on how many tokens were
    seen, and the rows of a batch may differ.

    Attributes:
        in_place: Whether `update` mutates the state tensors (buffers of a resident program, eager and compiled use) or
            rebinds the attributes to new ones (explicit programs, whose state is a graph input and output).
        counts: Whether `update` advances `cumulative_length`. Not in a resident program, whose length is an input.
        read_length: A position that no row will reach in this step, so that slots from there on need not be read; None
            where that is unknown. A static int, one per compiled or exported method: what makes a step cost what the
            filled part costs, not what is allocated.
        start: Length of each row before the step, int64 [batch_size], where a program takes it as an input; None in plain
            use, where `cumulative_length` is the only count.
    """

    is_compileable = True
    is_sliding = False
    #: Whether it keeps states of fixed size and no keys and values per token, as transformers' `Cache.is_linear`.
    is_linear = False
    #: Whether it keeps nothing, as transformers' `Cache.is_dummy`.
    is_dummy = False
    is_croppable = True
    #: Why `max_rollback` is less than all, for messages.
    forgetting: ClassVar[str] = "the sliding window has overwritten older ones"
    #: Whether the layer's length is the decoder's: a step may say what it is. Not of cross-attention.
    follows_decoder: ClassVar[bool] = True
    # Transformers would allocate lazily, from the first keys it sees; our tensors exist from construction.
    supports_early_init = False

    #: State tensors by attribute name, in the order of the pytree children.
    state: ClassVar[dict[str, StateTensor]] = {}
    #: Attributes `from_state` needs besides the tensors: JSON values that no step changes.
    config_names: ClassVar[tuple[str, ...]] = ()
    #: Every concrete layer class by name, for rebuilding from a file.
    classes: ClassVar[dict[str, type[CacheLayer]]] = {}

    cumulative_length: torch.Tensor
    capacity: int
    in_place: bool
    counts: bool
    read_length: int | None
    start: torch.Tensor | None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # ABCMeta has not filled __abstractmethods__ in yet.
        if not any(getattr(getattr(cls, name), "__isabstractmethod__", False) for name in _INTERFACE):
            CacheLayer.classes[cls.__name__] = cls
            register_node(
                cls,
                lambda layer: (list(layer.named_state()), layer.config()),
                lambda children, config: cls.from_state(config, dict(zip(cls.declare(config), children, strict=True))),
                name=f"exportable_cache.{cls.__name__}",
            )

    @classmethod
    def declare(cls, config: Mapping[str, Any]) -> dict[str, StateTensor]:
        """The state tensors of a layer with this `config`: the class's own `state`, unless their number depends on the model."""
        return cls.state

    @abstractmethod
    def slot_positions(self, query_length: int) -> torch.Tensor | None:
        """Absolute position of each key that `update` returns for `query_length` new tokens.

        Returns:
            int64 [batch_size, kv_length], or None where slot `s` holds position `s` in every row. An empty slot is
            given a position past every query, so that any causal mask function excludes it. A layer that hides other keys
            from each query returns [batch_size, query_length, kv_length].
        """

    @property
    @abstractmethod
    def max_length(self) -> int | None:
        """Tokens a row can hold in all, or None where any number may be seen."""

    @abstractmethod
    def max_rollback(self, length: int, high_water: int) -> int:
        """How many of the newest tokens can be taken back without having lost one that is still needed.

        Args:
            length: Tokens the row holds now.
            high_water: The most tokens it ever held since it was empty: what came after `length` was overwritten.
        """

    # -- everything generic ---------------------------------------------------------------------------------------

    def allocate(self, sizes: Mapping[str, int], dtype: torch.dtype, device: torch.device | str) -> None:
        """Allocate the declared tensors, zeroed: zero is the right start of every state.

        Args:
            sizes: Size of each dimension named in `state`.
            dtype: Of the tensors that declare none.
            device: Where to allocate.
        """
        for name, declared in self.state.items():
            shape = [sizes[dim] for dim in declared.dims]
            try:
                setattr(self, name, torch.zeros(shape, dtype=declared.dtype or dtype, device=device))
            except (RuntimeError, TypeError, OverflowError) as error:
                # What an allocator raises for too much memory, and what torch raises for sizes past 64 bits.
                needed = math.prod(shape) * (declared.dtype or dtype).itemsize
                raise InputError(
                    f"cannot allocate {name} of a cache layer, {shape} or {needed:,} bytes on {device}; "
                    "pass a smaller max_cache_len or batch_size"
                ) from error
        self._finish(high_water=0)

    @classmethod
    def from_state(cls, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> CacheLayer:
        """Rebuild a layer around existing tensors, without allocating and without looking at them.

        The tensors may be fakes, proxies or any pytree leaf: nothing is validated here.

        Args:
            config: What `config` of the original returned.
            tensors: State by name; a missing name becomes None.
        """
        layer = cls.__new__(cls)
        for name in cls.config_names:
            setattr(layer, name, config[name])
        for name in cls.declare(config):
            setattr(layer, name, tensors.get(name))
        layer._finish(high_water=None)
        return layer

    def _finish(self, high_water: int | None) -> None:
        self.in_place = True
        self.counts = True
        self.read_length = None
        self.start = None
        self.is_initialized = True
        # Host bookkeeping of `crop`, moved by it alone; None where the history of the tensors is unknown.
        self._high_water = high_water

    def config(self) -> dict[str, Any]:
        """What `from_state` needs besides the tensors: JSON, the same before and after any number of steps."""
        return {name: getattr(self, name) for name in self.config_names}

    def named_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The state tensors with their names, in declaration order."""
        for name in self.state:
            yield name, getattr(self, name)

    @property
    def slots_read(self) -> int:
        """Slots that a step looks at: `capacity`, or as many as `read_length` leaves of them."""
        return self.capacity if self.read_length is None else min(self.read_length, self.capacity)

    @property
    def nbytes(self) -> int:
        """Bytes of all state tensors."""
        return sum(tensor.nbytes for _, tensor in self.named_state())

    @property
    def device(self) -> torch.device:
        """Where the state lives."""
        return self.cumulative_length.device

    def advance(self, query_length: int) -> None:
        """Count `query_length` new tokens in every row."""
        if not self.counts:
            return
        if self.in_place:
            self.cumulative_length.add_(query_length)
        else:
            self.cumulative_length = self.cumulative_length + query_length

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the tensors exist from construction."""

    def get_seq_length(self) -> torch.Tensor:
        """Tokens seen, int64 0-D: a view of the first row, which stands for all where rows agree."""
        return self.cumulative_length[0]

    def get_max_length(self) -> int:
        """Transformers' form of `max_length`: -1 where there is no limit."""
        return -1 if self.max_length is None else self.max_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int | torch.Tensor]:
        """Length of the keys that `update` will return, and their offset from `arange(kv_length)`.

        Adding the offset to `arange(kv_length)`, as transformers' masks do, gives each key's absolute position.

        Returns:
            `(kv_length, 0)`, or `(kv_length, offset)` with offset int64 [batch_size, kv_length] or [batch_size, query_length,
            kv_length].
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
        self._high_water = 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Give row `i` the state of row `beam_idx[i]`, in place.

        Args:
            beam_idx: int64 [batch_size].
        """
        for _, tensor in self.named_state():
            tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens of every row, by length; nothing is moved.

        Args:
            tokens_to_remove: Zero, or minus the number of tokens to take back (transformers' convention).

        Raises:
            InputError: If positive, if a row has fewer tokens, or if a slot still needed was overwritten.
        """
        from .checks import check_rollback

        if tokens_to_remove > 0:
            raise InputError(
                f"crop takes minus the number of tokens to remove, got {tokens_to_remove}; pass {-tokens_to_remove}"
            )
        if tokens_to_remove < 0:
            self._high_water = check_rollback(self, -tokens_to_remove)
            self.cumulative_length.sub_(-tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused: the batch size of a static cache is fixed."""
        if repeats != 1:
            raise InputError(
                f"a static cache cannot be repeated {repeats} times; allocate it with the larger batch_size"
            )

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Like `reorder_cache`, for as many rows as there are; refused otherwise."""
        if indices.shape[0] != self.cumulative_length.shape[0]:
            raise InputError(
                f"a static cache of batch size {self.cumulative_length.shape[0]} cannot keep {indices.shape[0]} rows; "
                "use reorder_cache with one index per row"
            )
        self.reorder_cache(indices)

    def offload(self) -> None:
        """Refused: moving the tensors would change the addresses that programs and graphs hold."""
        raise InputError(
            "a static cache is not offloaded: its tensors keep their addresses; use DynamicCache(offloading=True)"
        )

    prefetch = offload

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.config().items())
        return f"{type(self).__name__}({arguments})"
