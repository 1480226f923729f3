"""A cache layer: a policy, a storage and a layout around a fixed set of state tensors. One keeps a prompt's length."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from transformers.cache_utils import CacheLayerMixin

from ...common.tensors import dtype_name, ordinary_tensors
from ...errors import InputError, first_line
from ..attention.operators import note_filled
from ..checks import check_new_states, check_room, is_traced, row_numbers
from ..component import check_count, label_of, names
from ..layout import PORTABLE, Layout, StateTensor
from ..policies import SlotPolicy, is_one
from ..slots import tracked, write_slots, write_slots_
from ..step import PLAIN
from ..storage import Storage

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..component import Component
    from ..step import StepContext

    Layer = TypeVar("Layer", bound="CacheLayer")


@dataclass(frozen=True)
class RowSizes:
    """Sizes of the keys and values of one layer: `RowSizes(1, 4, 64)` is one row, 4 heads, keys and values of 64.

    Attributes:
        batch_size: Rows.
        num_heads: Key and value heads.
        head_dim: Size of a key head.
        value_head_dim: Size of a value head, `head_dim` by default (they differ in MLA models). 0 where latent keys are
            all there is of a token (GLM 5 Next).

    Raises:
        InputError: If a size is not a positive int.
    """

    batch_size: int
    num_heads: int
    head_dim: int
    value_head_dim: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "num_heads", "head_dim"):
            check_count(getattr(self, name), f"{name} of a cache layer", 1)
        if self.value_head_dim is None:
            object.__setattr__(self, "value_head_dim", self.head_dim)
        check_count(self.value_head_dim, "value_head_dim of a cache layer", 0)


def _config_key(part: str) -> str:
    """Return the key of a part in manifests, saved caches and pytree contexts, which call the layout "kernel"."""
    return "kernel" if part == "layout" else part


class CacheLayer(CacheLayerMixin):
    """One layer of a cache, as transformers uses it: a policy, a storage and a layout around a fixed set of tensors.

    The policy says which slot a token goes to and which position a slot holds, the storage how keys and values are
    kept, the layout how they lie in memory and which operators write and read them. Pytree children and keys, the FX
    spec, program buffers, `reset`, `reorder_cache`, `nbytes`, saving and restoring follow from the tensors that these
    parts declare.

    Every length is a tensor, `cumulative_length` [batch_size] int64, so no graph ever depends on how many tokens were
    seen, and the rows of a batch may differ.

    Args:
        policy: See `cache.policies`.
        storage: See `cache.storage`; None where the policy keeps no keys.
        sizes: Sizes of keys and values; None where there are none.
        layout: Order of the tensors' dimensions, and the operators that write and read them.
        device: Device to allocate on.

    Attributes:
        state: Declarations of the state tensors by attribute name, in the order of the pytree children.
        context: Context of the step that the layer was put around its tensors for, see `with_state`.
        is_sliding: True if a window hides older tokens.
        is_linear: True if the layer keeps states of fixed size and no keys.
        is_dummy: True if the layer keeps nothing.
        follows_decoder: True if the layer's length is the decoder's; False for cross-attention.
    """

    is_compileable = True
    # Transformers would allocate lazily, from the first keys it sees; our tensors exist from construction.
    supports_early_init = False
    #: True if tokens can be taken back at all.
    is_croppable = True
    #: Family of each part that the layer is composed of, by attribute name.
    composed_of: ClassVar[dict[str, type[Component]]] = {"policy": SlotPolicy, "storage": Storage, "layout": Layout}
    #: Attributes of the policy that the layer has too.
    of_policy: ClassVar[tuple[str, ...]] = ("is_sliding", "is_linear", "is_dummy", "follows_decoder")

    policy: SlotPolicy
    storage: Storage | None
    layout: Layout
    state: dict[str, StateTensor]
    context: StepContext
    is_sliding: bool
    is_linear: bool
    is_dummy: bool
    follows_decoder: bool
    keys: torch.Tensor
    values: torch.Tensor
    # The types differ because transformers annotates lengths as int, although its static layers keep a tensor.
    cumulative_length: torch.Tensor  # type: ignore[assignment]

    def __init__(
        self,
        policy: SlotPolicy,
        storage: Storage | None = None,
        sizes: RowSizes | None = None,
        *,
        layout: Layout = PORTABLE,
        device: torch.device | str = "cpu",
    ) -> None:
        self.compose(policy=policy, storage=storage, layout=layout)
        self.allocate(self.row_sizes(sizes), device)

    def compose(self, **parts: Any) -> None:
        """Set the parts of `composed_of`, by name, and declare their tensors."""
        for name in self.composed_of:
            setattr(self, name, parts.get(name))
        for name in self.of_policy:
            setattr(self, name, getattr(self.policy, name))
        if self.policy.keeps_keys is (self.storage is None):
            needs = "needs one" if self.policy.keeps_keys else "keeps no keys"
            raise InputError(f"the storage of a layer is {self.storage!r}, but its policy {self.policy!r} {needs}")
        self.state = self.declare()
        described = {_config_key(name): getattr(self, name) for name in self.composed_of}
        self._config = {key: part.to_config() for key, part in described.items() if part is not None}

    def declare(self) -> dict[str, StateTensor]:
        """Return the declarations of the state tensors of these parts."""
        declared = self.layout.declare(self)
        if self.policy.length_name is not None:
            declared[self.policy.length_name] = StateTensor("batch_size", dtype=torch.int64)
        return declared

    def row_sizes(self, sizes: RowSizes | None) -> dict[str, int]:
        """Return the size of each dimension that the tensors of keys and values are declared with."""
        if sizes is None or self.storage is None:
            return {}
        assert sizes.value_head_dim is not None
        return {
            "batch_size": sizes.batch_size,
            "num_heads": sizes.num_heads,
            **self.layout.sizes(self.policy),
            **self.storage.sizes(sizes.head_dim, sizes.value_head_dim),
        }

    def known_sizes(self) -> dict[str, int]:
        """Return the sizes of dimensions that follow from the parts; the others are the model's."""
        if self.storage is None:
            return {}
        return {**self.storage.known_sizes, **self.layout.sizes(self.policy)}

    def misfit(self, tensors: Mapping[str, tuple[Sequence[int], str]]) -> str | None:
        """Return why tensors cannot be this layer's, or None.

        Args:
            tensors: Shape and name of the dtype of each, by the tensor's name.
        """
        if set(tensors) != set(self.state):
            return f"tensors: has {names(tensors)}, a layer of {self.label} has {names(self.state)}"
        sizes = self.known_sizes()
        for name, (shape, dtype) in tensors.items():
            declared = self.state[name]
            if dtype != dtype_name(declared.dtype):
                return f"tensors.{name}.dtype: is {dtype}, a layer of {self.label} keeps {dtype_name(declared.dtype)}"
            if len(shape) != len(declared.dims):
                return f"tensors.{name}.shape: is {list(shape)}, its dimensions are {names(declared.dims)}"
            for dim, size in zip(declared.dims, shape, strict=True):
                # Where latent keys are all there is of a token, its value has no element.
                least = 0 if dim == "value_head_dim" else 1
                if size < least:
                    return f"tensors.{name}.shape: {dim} is {size}, it must be at least {least}"
                if sizes.setdefault(dim, size) != size:
                    return (
                        f"tensors.{name}.shape: {dim} is {size}, it is {sizes[dim]} by the policy or in another tensor"
                    )
        return None

    def length_limits(self) -> dict[str, int | None]:
        """Return the largest value of each state tensor that holds a number of tokens, None for any."""
        most = self.policy.max_length if self.policy.follows_decoder else self.policy.capacity
        name = self.policy.length_name
        return {} if name is None else {name: most}

    def allocate(self, sizes: Mapping[str, int], device: torch.device | str) -> None:
        """Allocate the declared tensors, zeroed: zero is the right start of every state.

        Args:
            sizes: Size of each dimension named in `state`.
            device: Where to allocate.
        """
        for name, declared in self.state.items():
            shape = [sizes[dim] for dim in declared.dims]
            try:
                with ordinary_tensors():
                    setattr(self, name, torch.zeros(shape, dtype=declared.dtype, device=device))
            except torch.OutOfMemoryError:
                # Of a GPU; the cache gives the sizes of all layers.
                raise
            except (RuntimeError, TypeError, OverflowError, AssertionError) as error:
                # What an allocator raises for too much memory, what torch raises for sizes past 64 bits, and for a
                # device that it was built without.
                needed = math.prod(shape) * declared.dtype.itemsize
                other = "" if str(device) == "cpu" else f", or another device ({first_line(error)})"
                raise InputError(
                    f"cannot allocate {name} of a cache layer, {shape} or {needed:,} bytes on {device}; "
                    f"pass a smaller max_cache_len or batch_size{other}"
                ) from error
        self.begin(PLAIN, max_len_ever=0)

    @classmethod
    def from_state(cls, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Self:
        """Rebuild a layer around existing tensors, without allocating and without looking at them.

        The tensors may be fakes, proxies or any pytree leaf: nothing is validated here. `layers.layer_from` finds the
        class.

        Args:
            config: What `config` of the original returned.
            tensors: State by name; a missing name becomes None.

        Raises:
            InputError: If the config is not of parts that are known here.
        """
        layer = cls.__new__(cls)
        layer.compose(**cls.parts_from(config))
        layer._hold(tensors, PLAIN)
        return layer

    @classmethod
    def parts_from(cls, config: Mapping[str, Any]) -> dict[str, Component]:
        """Return the parts that `config` describes, by name."""
        families = {_config_key(name): (name, family) for name, family in cls.composed_of.items()}
        if any(key not in families for key in config) or not {"policy", _config_key("layout")} <= set(config):
            raise InputError(f"a layer has {', '.join(config) or 'nothing'}, one has {', '.join(families)}")
        return {name: family.from_config(config[key]) for key, (name, family) in families.items() if key in config}

    def with_state(self, tensors: Mapping[str, Any], context: StepContext = PLAIN) -> Self:
        """Return the layer with other tensors, for one step; this layer is unchanged.

        Args:
            tensors: State by name; a missing name becomes None.
            context: Context of the step. Its start, if any, is the length of layers that follow the decoder.
        """
        return self._as(type(self), tensors, context)

    def _as(self, cls: type[Layer], tensors: Mapping[str, Any], context: StepContext) -> Layer:
        """Return a layer of another class and of the same parts, around other tensors."""
        # The parts are not composed again, because a step is traced.
        layer = cls.__new__(cls)
        for name in (*self.composed_of, *self.of_policy):
            setattr(layer, name, getattr(self, name))
        layer.state, layer._config = self.state, self._config
        layer._hold(tensors, context)
        return layer

    def with_layout(self, layout: Layout, tensors: Mapping[str, Any]) -> Self:
        """Return a layer of the same policy and storage in another layout, around tensors of that layout."""
        layer = type(self).__new__(type(self))
        layer.compose(**{name: getattr(self, name) for name in self.composed_of} | {"layout": layout})
        layer._hold(tensors, PLAIN)
        return layer

    def _hold(self, tensors: Mapping[str, Any], context: StepContext) -> None:
        for name in self.state:
            setattr(self, name, tensors.get(name))
        if context.start is not None and self.follows_decoder and self.policy.length_name is not None:
            self.cumulative_length = context.start
        self.begin(context, max_len_ever=None)

    def begin(self, context: StepContext, max_len_ever: int | None) -> None:
        """Reset the attributes that last one step.

        Args:
            context: Context of the step.
            max_len_ever: Most tokens that a row ever held; None if the history of the tensors is unknown.
        """
        self.context = context
        # True for cross-attention too, because models ask an initialized layer for its keys (Mllama).
        self.is_initialized = not self.is_dummy
        # Known on the host, and changed by `crop` only.
        self._max_len_ever = 0 if self.is_dummy else max_len_ever

    def config(self) -> dict[str, Any]:
        """Return the JSON that `from_state` needs in addition to the tensors.

        It is the same before and after any number of steps. Do not change it.
        """
        # Made once, because strict export flattens layers inside TorchDynamo, which cannot read a dataclass's fields.
        return self._config

    def named_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the state tensors with their names, in declaration order."""
        for name in self.state:
            yield name, getattr(self, name)

    @property
    def label(self) -> str:
        """Short description of the layer, see `label_of`."""
        return label_of(self.config())

    @property
    def nbytes(self) -> int:
        """Bytes of all state tensors."""
        return sum(tensor.nbytes for _, tensor in self.named_state())

    def __copy__(self) -> Self:
        return self._with_attributes(vars(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Stored in `memo` first, because an attribute may refer to the layer.
        layer = memo[id(self)] = self._with_attributes({})
        layer.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return layer

    def _with_attributes(self, attributes: Mapping[str, Any]) -> Self:
        layer = type(self).__new__(type(self))
        layer.__dict__.update(attributes)
        return layer

    def __repr__(self) -> str:
        parts = (getattr(self, name) for name in self.composed_of)
        return f"{type(self).__name__}({', '.join(repr(part) for part in parts if part not in (None, PORTABLE))})"

    # -- what the policy says -----------------------------------------------------------------------------------------

    @property
    def forgetting(self) -> str:
        """Reason why `max_rollback` is limited, for messages."""
        return self.policy.forgetting

    @property
    def capacity(self) -> int | None:
        """Number of slots; None without keys."""
        return self.policy.capacity

    @property
    def max_length(self) -> int | None:
        """Maximum number of tokens in a row, or None if unlimited."""
        return self.policy.max_length

    def max_rollback(self, length: int, max_len_ever: int) -> int:
        """See `SlotPolicy.max_rollback`."""
        return self.policy.max_rollback(length, max_len_ever)

    # -- keys and values ----------------------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens of each row at its length, and return what attention reads; see `Layout.update`.

        Args:
            key_states: [batch_size, num_heads, query_length, head_dim].
            value_states: [batch_size, num_heads, query_length, value_head_dim].
            *args: Ignored, as by transformers' layers.
            **kwargs: Ignored, as by transformers' layers.

        Returns:
            Keys [batch_size, num_heads, kv_length, head_dim] and values [..., value_head_dim], in the new ones' dtype.

        Raises:
            CacheFullError: If the tokens do not fit; nothing was written.
            InputError: If shape, dtype or device differ from the layer's, or the layer keeps no keys.
        """
        self.check_update(key_states, value_states)
        return self.layout.update(self, key_states, value_states)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append an indexer's keys, in a layer that keeps nothing else because it reads another layer's keys.

        They are the keys of one head, with values of size 0 (Mistral Large 4).

        Args:
            indexer_key_states: [batch_size, query_length, index_head_dim].

        Returns:
            All slots that are read, [batch_size, slots, index_head_dim].
        """
        keys = indexer_key_states[:, None]
        return self.update(keys, keys[..., :0])[0][:, 0]

    def check_update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Check new keys and values, except in traced paths."""
        if self.storage is None:
            raise InputError(
                "this layer keeps no keys and values (it shares another layer's, or has a state instead), but "
                "the model wrote some; allocate the cache with ExportableCache.from_model"
            )
        if not is_traced(self.cumulative_length):
            check_new_states(self.storage, (self.keys, self.values), (key_states, value_states))
            # Only on the CPU, because reading a length waits for other devices, and the cache has checked it already.
            if self.context.start is None and self.device.type == "cpu":
                check_room(self.cumulative_length, key_states.shape[2], self.max_length)

    def write(self, slots: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor) -> list[torch.Tensor]:
        """Write new keys and values into slots.

        Args:
            slots: int64 [batch_size, query_length].
            key_states: [batch_size, num_heads, query_length, head_dim].
            value_states: [batch_size, num_heads, query_length, value_head_dim].

        Returns:
            The written parts, for `read`.
        """
        storage = self.storage
        assert storage is not None
        parts = []
        for name, rows in zip(storage.parts, storage.encode(key_states, value_states), strict=True):
            if self.context.in_place:
                # Not assigned, because an attribute rebound to its own alias becomes an output of compiled graphs.
                part = tracked(getattr(self, name), rows)
                write_slots_(part, slots, rows)
            else:
                part = write_slots(getattr(self, name), slots, rows)
                setattr(self, name, part)
            parts.append(part)
        return parts

    def replace(self, name: str, tensor: torch.Tensor) -> None:
        """Replace the contents of a state tensor by others of the same shape."""
        if self.context.in_place:
            getattr(self, name).copy_(tensor.detach() if tensor.requires_grad else tensor)
        else:
            setattr(self, name, tensor)

    def read(
        self, slots: int, stored: list[torch.Tensor] | None = None, query_length: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of the first `slots` slots, [batch_size, num_heads, slots, dim].

        Args:
            slots: Number of slots.
            stored: Parts that `write` returned; the state tensors by default.
            query_length: See `decoded`.
        """
        storage = self.storage
        assert storage is not None
        if stored is None:
            stored = [getattr(self, name) for name in storage.parts]
        # Sliced only if needed, because ExecuTorch copies even a slice of everything. A dynamic number is not compared.
        if self.reads_so_far or slots < self.policy.slot_count:
            stored = [part[:, :, :slots] for part in stored]
        return self.decoded(stored, query_length)

    def decoded(self, stored: list[torch.Tensor], query_length: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values in stored parts, and note how they are stored if the step needs it.

        Args:
            stored: Parts in the order of `Storage.parts`, each [batch_size, num_heads, slots, dim].
            query_length: New tokens among them, if tokens fill the slots in order; None if every slot is read.
        """
        storage, context = self.storage, self.context
        assert storage is not None
        keys, values = storage.decode(stored)
        if context.filled is not None and context.start is not None and self.policy.follows_decoder:
            start = context.start
            # Not named by the length, because TorchDynamo compares a dynamic one with its value then.
            ends = None if query_length is None else context.once("end", lambda: start + query_length)
            note_filled(context.filled, storage, (keys, values), stored, ends)
        return keys, values

    def slot_positions(self, query_length: int) -> torch.Tensor | None:
        """Return the position of each key that `update` returns for new tokens, see `SlotPolicy.mask_positions`."""
        if self.storage is None:
            raise InputError(f"a layer of policy {self.policy.kind!r} has no keys to mask; ask a layer that keeps keys")
        return self.layout.mask_positions(self, query_length)

    @property
    def slots_read(self) -> int:
        """Number of slots that this step reads."""
        kv_slots = self.context.kv_slots
        if kv_slots is not None and self.reads_so_far:
            return kv_slots
        return self.policy.slots_read(self.context.kv_read_len)

    @property
    def reads_so_far(self) -> bool:
        """True if `StepContext.kv_slots` limits the slots that are read; False for a ring that may have wrapped."""
        context = self.context
        return context.kv_slots is not None and self.policy.reads_up_to(context.kv_read_len)

    # -- everything generic -------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Device of the state."""
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
        """Do nothing, because the tensors exist from construction."""

    # The types differ because transformers annotates lengths as int, although its static layers keep a tensor.
    def get_seq_length(self) -> torch.Tensor:  # type: ignore[override]
        """Return the length of the first row, int64 0-D, which is every row's length if rows agree."""
        return self.cumulative_length[0]

    def get_max_length(self) -> int:
        """Return `max_length`, or -1 if there is no limit, as transformers does."""
        return -1 if self.max_length is None else self.max_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int | torch.Tensor]:  # type: ignore[override]
        """Return the length of the keys that `update` will return, and their offset from `arange(kv_length)`.

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
        """Empty the layer in place."""
        for _, tensor in self.named_state():
            tensor.zero_()
        self._max_len_ever = 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Copy the state of row `beam_idx[i]` to row `i`, in place.

        Args:
            beam_idx: int64 [batch_size].

        Raises:
            InputError: If `beam_idx` is something else.
        """
        if self.is_dummy:
            return
        beam_idx = row_numbers(beam_idx, self.cumulative_length.shape[0])
        for _, tensor in self.named_state():
            tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens of every row by reducing its length; no data is moved.

        Args:
            tokens_to_remove: Zero, or minus the number of tokens to remove (transformers' convention).

        Raises:
            InputError: If positive, if a row has fewer tokens, or if a slot still needed was overwritten.
        """
        if tokens_to_remove > 0:
            raise InputError(
                f"crop takes minus the number of tokens to remove, got {tokens_to_remove}; pass {-tokens_to_remove}"
            )
        if tokens_to_remove < 0 and not self.is_dummy:
            self._max_len_ever = self.check_rollback(-tokens_to_remove)
            self.cumulative_length.sub_(-tokens_to_remove)

    def check_rollback(self, tokens: int) -> int:
        """Check that tokens can be removed from every row.

        Returns:
            The layer's new high-water mark: the most tokens a row ever held.

        Raises:
            InputError: If a row holds fewer than `tokens`, or a slot that is needed again was overwritten.
        """
        lengths = self.cumulative_length.tolist()
        if tokens > min(lengths):
            raise InputError(
                f"cannot remove {tokens} tokens from rows that hold {lengths}; remove at most {min(lengths)}"
            )
        max_len_ever = self._max_len_ever
        if max_len_ever is None and self.max_length is None:
            raise InputError(
                f"{self!r} was rebuilt from bare tensors, so which slots were overwritten is unknown; "
                "crop the original cache, or rewind through a Session"
            )
        max_len_ever = max([max_len_ever or 0, *lengths])
        allowed = min(self.max_rollback(length, max_len_ever) for length in lengths)
        if tokens > allowed:
            raise InputError(
                f"{self!r} can take back at most {allowed} tokens here, not {tokens}: {self.forgetting}; "
                "reset the cache and feed the tokens to keep, or allocate rings with more rollback_slots"
            )
        return max_len_ever

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refuse to repeat rows, because the batch size of a static cache is fixed."""
        if not isinstance(repeats, int) or repeats != 1:
            raise InputError(
                f"a static cache cannot be repeated {repeats!r} times; allocate it with the larger batch_size"
            )

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Reorder the rows, see `reorder_cache`."""
        self.reorder_cache(indices)

    def offload(self) -> None:
        """Refuse to offload, because moving the tensors would change addresses that programs and graphs hold."""
        raise InputError(
            "a static cache is not offloaded: its tensors keep their addresses; use DynamicCache(offloading=True)"
        )

    prefetch = offload

    def __reduce__(self) -> tuple[Any, ...]:
        # By config, because exported programs carry example inputs, which load with classes known to torch only.
        return rebuilt, (type(self), self.config(), dict(self.named_state()), self._max_len_ever)


def rebuilt(
    cls: type[CacheLayer], config: Mapping[str, Any], tensors: Mapping[str, Any], max_len_ever: int | None
) -> CacheLayer:
    """Return a layer from its pickled parts."""
    layer = cls.from_state(config, tensors)
    layer.begin(PLAIN, max_len_ever)
    return layer


torch.serialization.add_safe_globals([rebuilt])


class PromptLayer(CacheLayer):
    """Layer of keys and values under a `PromptPolicy`, and the length of the prompt, int64 [batch_size].

    A prompt is the first step of a row, and the steps of several tokens that follow it. A step of one token ends it, so
    that graphs need no further input. A row at position 0 starts a new prompt. So sessions feed no part of a prompt as
    one token (`program.methods.chunk_sizes`), keep rows equally long (`program.lengths`), and remove no tokens
    (`PromptPolicy.max_rollback`).
    """

    is_croppable = False

    prompt_length: torch.Tensor

    def declare(self) -> dict[str, StateTensor]:
        """See `CacheLayer.declare`."""
        return {**super().declare(), "prompt_length": StateTensor("batch_size", dtype=torch.int64)}

    def length_limits(self) -> dict[str, int | None]:
        """See `CacheLayer.length_limits`."""
        return {**super().length_limits(), "prompt_length": self.policy.max_length}

    def prompt_after(self, query_length: int) -> torch.Tensor:
        """Return the length of the prompt after `query_length` more tokens, int64 [batch_size]."""
        start = self.cumulative_length
        goes_on = start == 0 if is_one(query_length) else (start == 0) | (start <= self.prompt_length)
        return torch.where(goes_on, start + query_length, self.prompt_length)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `CacheLayer.update`."""
        self.check_update(key_states, value_states)
        # As a difference, see `CrossLayer.update`.
        change = self.prompt_after(key_states.shape[2]) - self.prompt_length
        if self.context.in_place:
            self.prompt_length.add_(change)
        else:
            self.prompt_length = self.prompt_length + change
        return super().update(key_states, value_states, *args, **kwargs)
