"""The host's loop of a program in the static form: it keeps the cache, and selects masks and rotary rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from pydantic import TypeAdapter, ValidationError

from ....errors import BundleError, CacheFullError
from ..runner import ExecutorchRunner
from .plan import StaticLayer, StaticPlan, check_plan

if TYPE_CHECKING:
    from ...base import ProgramDescription

#: Key of the plan in the details of the program's file, and the file of the rotary tables.
PLAN, TABLES = "static", "rope.safetensors"


class Graphs(Protocol):
    """Runs the graphs of a program."""

    def outputs(self, method: str, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return all outputs of a method."""
        ...


class StaticRunner:
    """Runs a program in the static form, one row.

    Args:
        graphs: What runs the graphs.
        plan: What they take and return.
        tables: Rotary tables by name, [positions, size].
        description: The program's methods, and the layers of its cache.

    Attributes:
        methods: The methods by name.
        state: Keys and values by layer, [1, heads, slots, size].

    Raises:
        BundleError: If they do not fit together.
    """

    def __init__(
        self,
        graphs: Graphs,
        plan: StaticPlan,
        tables: Mapping[str, torch.Tensor],
        description: ProgramDescription,
    ) -> None:
        check_plan(plan, description.layers, tables)
        self.methods, self.state = description.methods, {}
        self._graphs, self._plan, self._tables = graphs, plan, tables
        for name, table in tables.items():
            if table.dim() != 2:
                raise BundleError(
                    f"{name} must be a table [positions, size], got {list(table.shape)}; export the model again"
                )
        self._positions = min((table.shape[0] for table in tables.values()), default=None)
        for index, (layer, recorded) in enumerate(zip(plan.layers, description.layers, strict=True)):
            for kind, size in (("keys", layer.key_size), ("values", layer.value_size)):
                shape, tensor = [1, layer.heads, layer.slots, size], recorded["tensors"][kind]
                is_turned = kind == "keys" and plan.transposed
                memory = torch.zeros(
                    [*shape[:2], size, layer.slots] if is_turned else shape, dtype=getattr(torch, tensor["dtype"])
                )
                self.state[f"layers.{index}.{kind}"] = memory.mT if is_turned else memory

    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor:
        """Run a step and write its keys and values into the cache, see `Runner.run`.

        Raises:
            CacheFullError: If the rotary tables end before the step, in a program whose layers all have windows.
        """
        plan, (input_ids, input_pos) = self._plan, inputs
        first, length = int(input_pos), input_ids.shape[1]
        if self._positions is not None and first + length > self._positions:
            raise CacheFullError(
                f"the rotary tables end at position {self._positions}, and a step of {length} tokens begins at "
                f"{first}; reset() the session, or use a model with more positions"
            )
        positions = torch.arange(first, first + length)
        given = [input_ids.to(torch.int32)]
        given += [positions[None].to(torch.int32)] if plan.positions else []
        layers = {layer.mask: layer for layer in plan.layers}
        dtype = self.state["layers.0.keys"].dtype
        given += [mask(layers[name], first, length, dtype) for name in plan.masks]
        given += [self._tables[name][None, first : first + length] for name in plan.tables]
        for name, tensor in self.state.items():
            given.append(tensor.mT if plan.transposed and name.endswith("keys") else tensor)
        logits, *new = self._graphs.outputs(method, *given)
        for index, layer in enumerate(plan.layers):
            slots = positions % layer.slots
            for kind, tensor in zip(("keys", "values"), new[2 * index : 2 * index + 2], strict=True):
                tensor = tensor.mT if plan.transposed and kind == "keys" else tensor
                kept = min(length, layer.slots)
                self.state[f"layers.{index}.{kind}"][:, :, slots[-kept:]] = tensor[:, :, -kept:]
        return logits


def open_static(
    path: Path, tables: Path, description: ProgramDescription, graphs: Graphs | None = None
) -> StaticRunner:
    """Open a `.pte` in the static form.

    Args:
        path: The `.pte`.
        tables: File of the rotary tables.
        description: What the program contains.
        graphs: What runs its graphs; None for ExecuTorch's runtime.

    Raises:
        BundleError: If a file cannot be read, or they do not fit together.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        plan = TypeAdapter(StaticPlan).validate_python(description.details.get(path.name, {}).get(PLAN))
        found = load_file(tables)
    except (ValidationError, OSError, SafetensorError) as error:
        raise BundleError(f"{tables.name} or its plan cannot be read: {error}; export the model again") from error
    return StaticRunner(graphs or ExecutorchRunner(path, description), plan, found, description)


def mask(layer: StaticLayer, first: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what new tokens see of a layer's slots and of each other: 0 or the minimum.

    Args:
        layer: The layer.
        first: Position of the first new token; slots hold the positions before it.
        length: Number of new tokens.
        dtype: Dtype of the mask.

    Returns:
        [1, 1, length, slots + length].
    """
    queries = torch.arange(first, first + length)[:, None]
    slots = torch.arange(layer.slots)
    # The newest position before `first` that the slot is of; negative if there is none.
    held = first - 1 - (first - 1 - slots) % layer.slots
    keys = torch.cat([torch.where(held >= 0, held, first + length), torch.arange(first, first + length)])
    seen = keys <= queries
    if layer.window is not None:
        seen &= keys > queries - layer.window
    return torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)[None, None]
