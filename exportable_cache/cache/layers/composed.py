"""What a cache layer is composed of, and the tensors that this makes: declared, allocated, rebuilt, described."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ...common.dtypes import dtype_name
from ...common.tensors import ordinary_tensors
from ...errors import InputError, first_line
from ..component import check_count, names
from ..kernel import PORTABLE, Kernel, StateTensor
from ..policies import SlotPolicy
from ..step import PLAIN
from ..storage import FloatStorage, Storage

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..component import Component
    from ..context_ranks import ContextRanks
    from ..offload import Residence
    from ..step import StepContext


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


class ComposedLayer:
    """Parts, and the fixed set of tensors that they declare.

    Pytree children and keys, the FX spec, program buffers, `reset`, `reorder_cache`, `nbytes`, saving and restoring all
    follow from what the parts declare.

    Args:
        policy: See `cache.policies`.
        storage: See `cache.storage`; None where the policy keeps no keys.
        sizes: Of keys and values; None where there are none.
        kernel: What emits writes and reads.
        device: Where to allocate.

    Attributes:
        state: Declarations of the state tensors by attribute name, in the order of the pytree children.
        context: Of the step that the layer was put around its tensors for, see `with_state`; plain use otherwise.
    """

    #: What the layer is composed of, by attribute name: the family that each part's config is read by.
    composed_of: ClassVar[dict[str, type[Component]]] = {"policy": SlotPolicy, "storage": Storage, "kernel": Kernel}

    policy: SlotPolicy
    storage: Storage | None
    kernel: Kernel
    state: dict[str, StateTensor]
    context: StepContext
    cumulative_length: torch.Tensor
    #: Where its tensors live elsewhere than on the device; its number there; and itself on the device, in its turn.
    residence: Residence | None = None
    place: int = 0
    twin: Self | None
    #: Who has the other slots, where these are a part; `place` is its number among such then.
    over: ContextRanks | None = None

    def __init__(
        self,
        policy: SlotPolicy,
        storage: Storage | None = None,
        sizes: RowSizes | None = None,
        *,
        kernel: Kernel = PORTABLE,
        device: torch.device | str = "cpu",
    ) -> None:
        self.compose(policy=policy, storage=storage, kernel=kernel)
        self.allocate(self.row_sizes(sizes), device)

    def compose(self, **parts: Any) -> None:
        """Take the parts of `composed_of`, by name, and declare the tensors that they need."""
        for name in self.composed_of:
            setattr(self, name, parts.get(name))
        if self.policy.keeps_keys is (self.storage is None):
            needs = "needs one" if self.policy.keeps_keys else "keeps no keys"
            raise InputError(f"the storage of a layer is {self.storage!r}, but its policy {self.policy!r} {needs}")
        self.state = self.declare()
        described = {name: getattr(self, name) for name in self.composed_of}
        self._config = {name: part.to_config() for name, part in described.items() if part is not None}

    def declare(self) -> dict[str, StateTensor]:
        """The state tensors of these parts."""
        declared = self.kernel.declare(self)
        if self.policy.length_name is not None:
            declared[self.policy.length_name] = StateTensor("batch_size", dtype=torch.int64)
        return declared

    def row_sizes(self, sizes: RowSizes | None) -> dict[str, int]:
        """Size of each dimension that the tensors of keys and values are declared with."""
        if sizes is None or self.storage is None:
            return {}
        assert sizes.value_head_dim is not None
        return {
            "batch_size": sizes.batch_size,
            "num_heads": sizes.num_heads,
            **self.kernel.sizes(self.policy),
            **self.storage.sizes(sizes.head_dim, sizes.value_head_dim),
        }

    def known_sizes(self) -> dict[str, int]:
        """Return the sizes of dimensions that follow from the parts; the others are the model's."""
        if self.storage is None:
            return {}
        return {**self.storage.known_sizes, **self.kernel.sizes(self.policy)}

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
        """The parts that `config` describes, by name."""
        unknown = [name for name in config if name not in cls.composed_of]
        if unknown or "policy" not in config or "kernel" not in config:
            raise InputError(f"a layer has {', '.join(config) or 'nothing'}, one has {', '.join(cls.composed_of)}")
        return {name: family.from_config(config[name]) for name, family in cls.composed_of.items() if name in config}

    def with_state(self, tensors: Mapping[str, Any], context: StepContext = PLAIN) -> Self:
        """The same layer around other tensors, for one step; this one is left alone.

        Args:
            tensors: State by name; a missing name becomes None.
            context: Of the step. Where it has a start, that is the length of layers that follow the decoder.
        """
        layer = type(self).__new__(type(self))
        for name in self.composed_of:
            setattr(layer, name, getattr(self, name))
        layer.state, layer._config = self.state, self._config
        layer.residence, layer.place, layer.over = self.residence, self.place, self.over
        layer._hold(tensors, context)
        return layer

    def with_kernel(self, kernel: Kernel, tensors: Mapping[str, Any]) -> Self:
        """The layer as a target keeps it: of the same policy and storage, around tensors of the kernel's layout."""
        layer = type(self).__new__(type(self))
        layer.compose(**{name: getattr(self, name) for name in self.composed_of} | {"kernel": kernel})
        layer._hold(tensors, PLAIN)
        return layer

    def _hold(self, tensors: Mapping[str, Any], context: StepContext) -> None:
        for name in self.state:
            setattr(self, name, tensors.get(name))
        if context.start is not None and self.policy.follows_decoder and self.policy.length_name is not None:
            self.cumulative_length = context.start
        self.begin(context, max_len_ever=None)

    def begin(self, context: StepContext, max_len_ever: int | None) -> None:
        """Start anew with what lasts a step.

        Args:
            context: Of the step.
            max_len_ever: The most tokens that a row ever held; None where the history of the tensors is unknown.
        """
        self.context = context
        self.twin = None
        # Models ask those of cross-attention for keys (Mllama), where they are.
        self.is_initialized = not self.policy.is_dummy
        # Host bookkeeping of `crop`, moved by it alone.
        self._max_len_ever = 0 if self.policy.is_dummy else max_len_ever

    def config(self) -> dict[str, Any]:
        """What `from_state` needs besides the tensors: JSON, the same before and after any number of steps; not to be
        changed.
        """
        # Made when the layer is: strict export flattens layers inside TorchDynamo, which cannot ask a dataclass for its
        # fields.
        return self._config

    def named_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The state tensors with their names, in declaration order."""
        for name in self.state:
            yield name, getattr(self, name)

    @property
    def label(self) -> str:
        """See `label_of`."""
        return label_of(self.config())

    @property
    def nbytes(self) -> int:
        """Bytes of all state tensors."""
        return sum(tensor.nbytes for _, tensor in self.named_state())

    def __copy__(self) -> Self:
        return self._with_attributes(vars(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # As it is, with what a description leaves out; known before its residence is copied, which knows its layers.
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


def label_of(config: Mapping[str, Any]) -> str:
    """A layer's `config` in a few words, for tables and messages: `ring`, `full int8`, `full + states`, `ring
    (tensorrt)`.

    Kinds are not looked up: a target that is not installed may have brought the kernel.
    """
    policy, storage, kernel = (config.get(part, {}).get("kind") for part in ("policy", "storage", "kernel"))
    words = [policy]
    if storage not in (None, FloatStorage.kind):
        words.append(storage)
    if "states" in config and storage is not None:
        words.append("+ states")
    if "indexer" in config:
        words.append("+ indexer")
    if kernel != PORTABLE.kind:
        words.append(f"({kernel})")
    return " ".join(words)
