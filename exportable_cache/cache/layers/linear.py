"""Layers with states of linear attention, state space and convolutions, and the initial state of a scan."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...errors import InputError
from ..checks import check_rows, is_traced
from ..component import Component
from ..layout import PORTABLE, StateTensor
from ..policies import RecurrentPolicy
from ..slots import tracked
from .layer import CacheLayer

if TYPE_CHECKING:
    from ..policies import SlotPolicy
    from ..step import StepContext
    from ..storage import Storage
    from .layer import RowSizes


class _Carried(threading.local):
    def __init__(self) -> None:
        # Set on the instance, because guards of a thread's first graph would fail once a step has set them.
        self.state: torch.Tensor | None = None
        #: Scans of this step that took their part of the state.
        self.heads = 0


_carried = _Carried()


def carry(state: torch.Tensor | None) -> None:
    """Set the state [batch, ...] for the next scan of this thread's step, or None at the end of the step."""
    _carried.state = state
    _carried.heads = 0


def take_carried() -> torch.Tensor | None:
    """Return the initial state of the next scan of this thread's step, or None outside of a step over our layers.

    Returns:
        [batch, channels, states]. Zamba scans a state [batch, heads, channels, states] head by head; each call returns
        the next head's, and None after the last.
    """
    state = _carried.state
    if state is None:
        return None
    if state.dim() == 3:
        carry(None)
        return state
    head = _carried.heads
    _carried.heads = head + 1
    if head + 1 == state.shape[1]:
        _carried.state = None
    return state[:, head]


@dataclass(frozen=True)
class StateShape:
    """A state of a layer, without its batch dimension: `StateShape((96, 4), torch.float32)` is [batch_size, 96, 4].

    Attributes:
        shape: Sizes.
        dtype: Element type; None for the cache's.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None

    def in_dtype(self, dtype: torch.dtype) -> StateShape:
        """Return the shape with `dtype` if it has none."""
        return StateShape(self.shape, self.dtype or dtype)

    def to_config(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {"shape": list(self.shape), "dtype": str(self.dtype).removeprefix("torch.")}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> StateShape:
        """Return the shape that `to_config` described."""
        return cls(tuple(config["shape"]), getattr(torch, config["dtype"]))


@dataclass(frozen=True)
class LinearStates(Component):
    """Shapes of the states of one layer.

    Transformers numbers the states of a layer (`state_idx`); each number has a convolution state [batch_size, channels,
    kernel_size], the newest `kernel_size` inputs of a causal convolution, or a recurrent state [batch_size, ...], or
    both.

    Attributes:
        conv: Shape of each convolution state, with its dtype; None where a number has none.
        recurrent: Shape of each recurrent state, with its dtype; None where a number has none.

    Raises:
        InputError: If a size is not a positive int, or there is no state at all.
    """

    family = "states"

    conv: tuple[StateShape | None, ...]
    recurrent: tuple[StateShape | None, ...]

    def __post_init__(self) -> None:
        for shape in (*self.conv, *self.recurrent):
            if shape is not None and not isinstance(shape.dtype, torch.dtype):
                raise InputError(f"dtype of a linear layer's state must be a dtype of torch, got {shape.dtype!r}")
            if shape is not None and not all(type(size) is int and size > 0 for size in shape.shape):
                raise InputError(
                    f"a state of a linear layer has shape {list(shape.shape)}; its sizes must be ints of at least 1"
                )
        if not any((*self.conv, *self.recurrent)):
            raise InputError("a linear layer needs at least one convolution or recurrent state, got none")

    @classmethod
    def of(
        cls, conv: Sequence[StateShape | None], recurrent: Sequence[StateShape | None], dtype: torch.dtype
    ) -> LinearStates:
        """Return the states of these shapes, in `dtype` where a shape names none."""
        conv, recurrent = (tuple(shape and shape.in_dtype(dtype) for shape in shapes) for shapes in (conv, recurrent))
        return cls(conv, recurrent)

    def declare(self) -> dict[str, StateTensor]:
        """Return the declarations of the state tensors: `conv_state_0`, `recurrent_state_0` and so on."""
        declared = {}
        for name, dims, shape in self._named():
            assert shape.dtype is not None
            declared[name] = StateTensor("batch_size", *dims, dtype=shape.dtype)
        return declared

    def sizes(self) -> dict[str, int]:
        """Size of each dimension of the state tensors, past the batch."""
        return {dim: size for _, dims, shape in self._named() for dim, size in zip(dims, shape.shape, strict=True)}

    def _named(self) -> Iterator[tuple[str, list[str], StateShape]]:
        for kind, axes, shapes in (
            ("conv_state", ("channels", "kernel_size"), self.conv),
            ("recurrent_state", (), self.recurrent),
        ):
            for index, shape in enumerate(shapes):
                if shape is not None:
                    rank = len(shape.shape)
                    names = axes if len(axes) == rank else [f"dim_{axis}" for axis in range(1, rank + 1)]
                    yield f"{kind}_{index}", [f"{kind}_{index}_{name}" for name in names], shape

    def to_config(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {name: [shape and shape.to_config() for shape in getattr(self, name)] for name in ("conv", "recurrent")}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> LinearStates:
        """Return the object that `to_config` described.

        Raises:
            InputError: If the config is something else.
        """
        try:
            shapes = (
                tuple(shape and StateShape.from_config(shape) for shape in config[name])
                for name in ("conv", "recurrent")
            )
            return cls(*shapes)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"states must be shapes, got another config ({type(error).__name__}: {error})") from error


class _StatesByIndex:
    """The states of a layer by index, read by the layer's own method."""

    def __init__(self, read: Callable[[int], torch.Tensor | None]) -> None:
        self._read = read

    def __getitem__(self, state_idx: int) -> torch.Tensor | None:
        return self._read(state_idx)


class LinearLayer(CacheLayer):
    """Convolution and recurrent states, in transformers' protocol for linear layers (cache_utils.py, 5.23).

    With `RecurrentPolicy` the layer keeps only states, of the same size for any number of tokens. With others it
    also keeps keys and values (Falcon-H1, Zamba, Inkling).

    A state of zeros is equal to no state, so `has_previous_state` is always true, and no graph depends on earlier
    tokens. If a program takes positions as an input, the states of a row at position 0 are read as zeros.

    Args:
        policy: Policy of the keys and values, or `RecurrentPolicy()`.
        states: Shapes of the states.
        batch_size: Number of rows.
        storage: Storage of the keys and values, if any.
        sizes: Sizes of the keys and values, if any.
        device: Device to allocate on.
    """

    composed_of = {**CacheLayer.composed_of, "states": LinearStates}
    is_croppable = False
    #: Models of transformers 5.20 ask this of a layer, later ones call `is_recording_past` of the cache.
    record_past = False

    states: LinearStates

    def __init__(
        self,
        policy: SlotPolicy,
        states: LinearStates,
        batch_size: int,
        storage: Storage | None = None,
        sizes: RowSizes | None = None,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        self.compose(policy=policy, storage=storage, layout=PORTABLE, states=states)
        self.allocate({"batch_size": batch_size, **self.row_sizes(sizes), **states.sizes()}, device)

    def declare(self) -> dict[str, StateTensor]:
        """See `CacheLayer.declare`."""
        return {**super().declare(), **self.states.declare()}

    def known_sizes(self) -> dict[str, int]:
        """See `CacheLayer.known_sizes`."""
        return {**super().known_sizes(), **self.states.sizes()}

    @property
    def forgetting(self) -> str:
        """See `CacheLayer.forgetting`."""
        return RecurrentPolicy.forgetting

    def begin(self, context: StepContext, max_len_ever: int | None) -> None:
        """See `CacheLayer.begin`."""
        super().begin(context, max_len_ever)
        self._entered: set[str] = set()
        self._counted_one = False

    def max_rollback(self, length: int, max_len_ever: int) -> int:
        """See `CacheLayer.max_rollback`."""
        return RecurrentPolicy().max_rollback(length, max_len_ever)

    # -- transformers' protocol -------------------------------------------------------------------------------------

    @property
    def has_previous_state(self) -> dict[int, bool]:
        """True for every state, see `LinearLayer`."""
        return dict.fromkeys(range(max(len(self.states.conv), len(self.states.recurrent))), True)

    # Models of transformers 5.20 read these two, where later ones call `get_conv_state` and `get_recurrent_state`.

    @property
    def conv_states(self) -> _StatesByIndex:
        """The convolution states by index, see `get_conv_state`."""
        return _StatesByIndex(self.get_conv_state)

    @property
    def recurrent_states(self) -> _StatesByIndex:
        """The recurrent states by index, see `get_recurrent_state`."""
        return _StatesByIndex(self.get_recurrent_state)

    def begin_reads(self) -> None:
        """Forget that an earlier step counted a token without an update, before a step of transformers 5.20."""
        self._counted_one = False

    def get_conv_state(self, state_idx: int = 0) -> torch.Tensor | None:
        """Return the state [batch_size, channels, kernel_size], which a step of one token may write in place."""
        state = _given_out(self._enter(f"conv_state_{state_idx}")) if self._has("conv", state_idx) else None
        # Counted here, because a step of one token only reads the state and writes it in place; a step of several
        # corrects the count in `update_conv_state`.
        if self.is_linear and state_idx == 0:
            self.advance(1)
            self._counted_one = True
        return state

    def get_recurrent_state(self, state_idx: int = 0) -> torch.Tensor | None:
        """Return the state [batch_size, ...] to read, and to write in place in a step of one token."""
        return _given_out(self._enter(f"recurrent_state_{state_idx}")) if self._has("recurrent", state_idx) else None

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Append the inputs of a convolution to its state.

        Args:
            conv_states: [batch_size, channels, query_length].
            state_idx: Index of the state.
            **kwargs: Ignored.

        Returns:
            [batch_size, channels, kernel_size + query_length]: the previous inputs and the new ones.

        Raises:
            InputError: In eager mode, if rows or channels are not those of the state.
        """
        name = f"conv_state_{state_idx}"
        held = getattr(self, name)
        if not is_traced(held):
            try:
                check_conv_inputs(name, held, conv_states)
            except InputError:
                # Undo the count of `get_conv_state`, because the step did not happen.
                if self._counted_one:
                    self.advance(-1)
                    self._counted_one = False
                raise
        before = self._enter(name)
        carry(self._enter(f"recurrent_state_{state_idx}") if self._has("recurrent", state_idx) else None)
        joined = torch.cat([before.to(conv_states.dtype), conv_states], dim=-1)
        # Not [..., -kernel_size:], because under a dynamic query length that slice compares the length.
        self._store(name, joined.narrow(-1, conv_states.shape[-1], before.shape[-1]))
        if self.is_linear and state_idx == 0:
            self.advance(conv_states.shape[-1] - int(self._counted_one))
            self._counted_one = False
        return joined

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Replace a recurrent state by the next one, [batch_size, ...].

        Args:
            recurrent_states: The next state.
            state_idx: Index of the state.
            **kwargs: `tokens`, the number of new tokens, for a layer without convolutions.
        """
        name = f"recurrent_state_{state_idx}"
        check_rows(getattr(self, name).shape[0], recurrent_states.shape[0])
        self._entered.add(name)
        carry(None)
        if "tokens" in kwargs and self.is_linear and state_idx == 0:
            self.advance(kwargs["tokens"])
        state = getattr(self, name)
        needs_both = recurrent_states.requires_grad and not torch.compiler.is_compiling()
        if self.context.in_place and needs_both and state.nbytes == state.untyped_storage().nbytes():
            # New memory, because backward() needs the state that the model has read. It fails for a state that shares
            # its memory with other tensors.
            state.data = recurrent_states.detach().to(state.dtype, copy=True)
            return recurrent_states
        return self._store(name, recurrent_states)

    def _has(self, kind: str, state_idx: int) -> bool:
        shapes = self.states.conv if kind == "conv" else self.states.recurrent
        return state_idx < len(shapes) and shapes[state_idx] is not None

    def _enter(self, name: str) -> torch.Tensor:
        """Return a state at the start of the step, with zeros in rows at position 0."""
        state = getattr(self, name)
        if self.context.start is None or name in self._entered:
            return state
        self._entered.add(name)
        is_new = (self.context.start == 0).reshape(-1, *(1 for _ in state.shape[1:]))
        # Chosen, not multiplied, because a row may contain infinities.
        return self._store(name, torch.where(is_new, torch.zeros_like(state), state))

    def _store(self, name: str, value: torch.Tensor) -> torch.Tensor:
        state = getattr(self, name)
        if self.context.in_place:
            return tracked(state, value).copy_(value)
        value = value.to(state.dtype)
        setattr(self, name, value)
        return value


def check_conv_inputs(name: str, held: torch.Tensor, new: torch.Tensor) -> None:
    """Check that the inputs of a convolution have the rows and channels of its state.

    Args:
        name: Name of the state.
        held: The state [batch_size, channels, kernel_size].
        new: [batch_size, channels, query_length].

    Raises:
        InputError: If they differ.
    """
    check_rows(held.shape[0], new.shape[0])
    if new.shape[1:-1] != held.shape[1:-1]:
        raise InputError(
            f"new inputs of {name} must have the channels {list(held.shape[1:-1])} that the cache was allocated for, "
            f"got {list(new.shape[1:-1])}; allocate it for this model (ExportableCache.from_model)"
        )


def _given_out(state: torch.Tensor) -> torch.Tensor:
    """Return a state that a model may write in place.

    With gradients it is another tensor over the same memory, because the state itself would keep the graph.
    """
    return state.detach() if torch.is_grad_enabled() and not torch.compiler.is_compiling() else state
