"""Linear attention, state space and convolution layers: states of fixed size instead of keys and values per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ...errors import InputError
from .carried import carry
from .layer import CacheLayer, StateTensor


@dataclass(frozen=True)
class StateShape:
    """One state of a layer, without its batch dimension: `StateShape((96, 4), torch.float32)` is [batch_size, 96, 4].

    Attributes:
        shape: Sizes.
        dtype: Element type; None for the one of the cache.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None

    def in_dtype(self, dtype: torch.dtype) -> StateShape:
        """With `dtype` where it names none."""
        return StateShape(self.shape, self.dtype or dtype)

    def to_config(self) -> dict[str, Any]:
        """As JSON."""
        return {"shape": list(self.shape), "dtype": str(self.dtype).removeprefix("torch.")}


class LinearStates(CacheLayer):
    """Convolution and recurrent states, in transformers' protocol for linear layers (cache_utils.py, 5.23).

    A state of zeros gives what no state gives, so `has_previous_state` is always true and the first step of a sequence is
    the general one: no graph depends on whether anything was seen. Where a program takes positions as an input, a row at
    position 0 finds zeros whatever its buffers hold.

    Transformers numbers the states of a layer (`state_idx`); each number has a convolution state [batch_size, channels,
    kernel_size], the newest `kernel_size` inputs of a causal convolution, or a recurrent state [batch_size, ...], or both.

    Args:
        batch_size: Rows.
        conv_states: Shape of each convolution state, None where a number has none.
        recurrent_states: Shape of each recurrent state, None where a number has none.
        dtype: Of the states whose shape names none.
        device: Where to allocate.

    Raises:
        InputError: If a size is not a positive int, or there is no state at all.
    """

    config_names = ("conv_states", "recurrent_states")
    forgetting = "a layer's state sums up all that was seen"

    #: State tensors of the class besides those of its linear states.
    other_state: ClassVar[dict[str, StateTensor]]

    conv_states: list[dict[str, Any] | None]
    recurrent_states: list[dict[str, Any] | None]

    @property
    def state(self) -> dict[str, StateTensor]:
        return self.declare({"conv_states": self.conv_states, "recurrent_states": self.recurrent_states})

    @classmethod
    def declare(cls, config: Mapping[str, Any]) -> dict[str, StateTensor]:
        declared = dict(cls.other_state)
        for kind, axes in (("conv_state", ("channels", "kernel_size")), ("recurrent_state", ())):
            for index, described in enumerate(config[f"{kind}s"]):
                if described is not None:
                    rank = len(described["shape"])
                    names = axes if len(axes) == rank else [f"dim_{axis}" for axis in range(1, rank + 1)]
                    dims = [f"{kind}_{index}_{name}" for name in names]
                    dtype = getattr(torch, described["dtype"])
                    declared[f"{kind}_{index}"] = StateTensor("batch_size", *dims, dtype=dtype)
        return declared

    def _set_shapes(
        self,
        conv_states: Sequence[StateShape | None],
        recurrent_states: Sequence[StateShape | None],
        dtype: torch.dtype,
    ) -> None:
        for shape in (*conv_states, *recurrent_states):
            if shape is not None and not all(isinstance(size, int) and size > 0 for size in shape.shape):
                raise InputError(
                    f"a state of a linear layer has shape {list(shape.shape)}; its sizes must be ints of at least 1"
                )
        if not any((*conv_states, *recurrent_states)):
            raise InputError("a linear layer needs at least one convolution or recurrent state, got none")
        self.conv_states = [shape and shape.in_dtype(dtype).to_config() for shape in conv_states]
        self.recurrent_states = [shape and shape.in_dtype(dtype).to_config() for shape in recurrent_states]

    def allocate(self, sizes: Mapping[str, int], dtype: torch.dtype, device: torch.device | str) -> None:
        all_sizes = dict(sizes)
        for kind, described in (("conv_state", self.conv_states), ("recurrent_state", self.recurrent_states)):
            for index, state in enumerate(described):
                if state is not None:
                    all_sizes.update(zip(self.state[f"{kind}_{index}"].dims[1:], state["shape"], strict=True))
        super().allocate(all_sizes, dtype, device)

    def _finish(self, high_water: int | None) -> None:
        super()._finish(high_water)
        self._entered: set[str] = set()

    @property
    def is_croppable(self) -> bool:
        return False

    def max_rollback(self, length: int, high_water: int) -> int:
        # A state sums up all that was seen; what it was before the newest token is gone.
        return 0

    # -- transformers' protocol -------------------------------------------------------------------------------------

    @property
    def has_previous_state(self) -> dict[int, bool]:
        """True for every state, see the class."""
        return dict.fromkeys(range(max(len(self.conv_states), len(self.recurrent_states))), True)

    def get_conv_state(self, state_idx: int = 0) -> torch.Tensor | None:
        """[batch_size, channels, kernel_size], for the model to read, and to write in place in a step of one token."""
        return self._enter(f"conv_state_{state_idx}") if self._has("conv", state_idx) else None

    def get_recurrent_state(self, state_idx: int = 0) -> torch.Tensor | None:
        """[batch_size, ...], for the model to read, and to write in place in a step of one token."""
        return self._enter(f"recurrent_state_{state_idx}") if self._has("recurrent", state_idx) else None

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Take in the inputs of a convolution.

        Args:
            conv_states: [batch_size, channels, query_length].
            state_idx: Number of the state.

        Returns:
            [batch_size, channels, kernel_size + query_length]: what came before, and the new ones.
        """
        name = f"conv_state_{state_idx}"
        before = self._enter(name)
        carry(self.get_recurrent_state(state_idx))
        joined = torch.cat([before.to(conv_states.dtype), conv_states], dim=-1)
        # Not [..., -kernel_size:]: under a dynamic query length that slice asks whether the tensor is that long.
        self._store(name, joined.narrow(-1, conv_states.shape[-1], before.shape[-1]))
        return joined

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Replace a recurrent state by its successor [batch_size, ...]."""
        name = f"recurrent_state_{state_idx}"
        self._entered.add(name)
        carry(None)
        return self._store(name, recurrent_states)

    def _has(self, kind: str, state_idx: int) -> bool:
        described = getattr(self, f"{kind}_states")
        return state_idx < len(described) and described[state_idx] is not None

    def _enter(self, name: str) -> torch.Tensor:
        """A state as the step finds it: zeros in rows that start anew."""
        state = getattr(self, name)
        if self.start is None or name in self._entered:
            return state
        self._entered.add(name)
        is_new = (self.start == 0).reshape(-1, *(1 for _ in state.shape[1:]))
        # Chosen, not multiplied: a row may have left infinities behind.
        return self._store(name, torch.where(is_new, torch.zeros_like(state), state))

    def _store(self, name: str, value: torch.Tensor) -> torch.Tensor:
        state = getattr(self, name)
        if self.in_place:
            return state.copy_(value)
        value = value.to(state.dtype)
        setattr(self, name, value)
        return value


class LinearLayer(LinearStates):
    """States of fixed size and nothing else: any number of tokens, the same bytes. See `LinearStates` for the arguments."""

    is_linear = True
    other_state = {"cumulative_length": StateTensor("batch_size", dtype=torch.int64)}

    def __init__(
        self,
        batch_size: int,
        conv_states: Sequence[StateShape | None],
        recurrent_states: Sequence[StateShape | None],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self._set_shapes(conv_states, recurrent_states, dtype)
        self.allocate({"batch_size": batch_size}, dtype, device)

    def _finish(self, high_water: int | None) -> None:
        super()._finish(high_water)
        self._counted_one = False

    @property
    def max_length(self) -> None:
        return None

    def slot_positions(self, query_length: int) -> None:
        raise InputError("a linear layer has no keys; masks are sized by a layer that has some")

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Refused: there is nowhere to put keys and values.

        Raises:
            InputError: Always.
        """
        raise InputError(
            "this layer keeps a state and no keys and values, but the model wrote some; "
            "allocate the cache with ExportableCache.from_model"
        )

    # A step of one token only reads the state and writes it in place, so reading counts one; a step of several then says how many.

    def get_conv_state(self, state_idx: int = 0) -> torch.Tensor | None:
        state = super().get_conv_state(state_idx)
        if state_idx == 0:
            self.advance(1)
            self._counted_one = True
        return state

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        joined = super().update_conv_state(conv_states, state_idx, **kwargs)
        if state_idx == 0:
            self.advance(conv_states.shape[-1] - int(self._counted_one))
            self._counted_one = False
        return joined
