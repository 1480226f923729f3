"""Slots for LoRA adapters in a model: low-rank products next to linear layers, over tensors that are written later.

A program has one graph for all adapters. Each row of a step names its slot by an input, so that choosing another
adapter changes numbers and no graph. Slot 0 is zero: the model without an adapter.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from ..common.tensors import TensorSpec, dtype_name, name_forward, ordinary_tensors
from ..errors import InputError, first_line
from .lora_arrays import check_pair

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Slot of each row's adapter, an input of a step.
ADAPTERS = TensorSpec("adapters", "int64", ("batch",))
#: Method that writes an adapter into a slot.
WRITE_ADAPTER = "write_adapter"
#: Prefix of the names of steps that take `ADAPTERS`.
ADAPTED = "adapted_"
#: Names of the tensors of a layer that hold the adapters.
LORA_TENSORS = ("lora_a", "lora_b")


class _Step(threading.local):
    """The slots of a step that is running or traced in this thread, int64 [batch]; None for the model itself.

    `tensors` are the slots' tensors by the id of their layer, if they are inputs of the step; else None.
    """

    def __init__(self) -> None:
        self.slots: torch.Tensor | None = None
        self.tensors: Mapping[int, Sequence[torch.Tensor]] | None = None


_step = _Step()


@contextmanager
def adapting(slots: torch.Tensor | None) -> Iterator[None]:
    """Add the adapters in these slots, int64 [batch], to the linear layers inside the block."""
    before, _step.slots = _step.slots, slots
    try:
        yield
    finally:
        _step.slots = before


@contextmanager
def reading_slots(model: nn.Module, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Read the slots of a model's layers from two tensors for each layer inside the block, see `slot_tensors`."""
    layers = lora_layers(model).values()
    before = _step.tensors
    _step.tensors = {id(one): tensors[2 * index : 2 * index + 2] for index, one in enumerate(layers)}
    try:
        yield
    finally:
        _step.tensors = before


@dataclass(frozen=True)
class LoraTarget:
    """A linear layer with slots for adapters: its name in the model and its sizes."""

    name: str
    inputs: int
    outputs: int


@dataclass(frozen=True)
class LoraSlots:
    """The slots of a program.

    Attributes:
        slots: Number of adapters that the program holds at once.
        rank: Largest rank of an adapter.
        dtype: Name of the dtype of their tensors.
        targets: The linear layers, in the order in which `write_adapter` takes their tensors.
    """

    slots: int
    rank: int
    dtype: str
    targets: tuple[LoraTarget, ...]

    @property
    def digest(self) -> str:
        """Sha256 of the layers' names and shapes."""
        return hashlib.sha256(json.dumps([asdict(one) for one in self.targets]).encode()).hexdigest()

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, with the empty one."""
        elements = sum(one.inputs + one.outputs for one in self.targets)
        itemsize: int = getattr(torch, self.dtype).itemsize
        return (self.slots + 1) * self.rank * elements * itemsize

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Inputs of `write_adapter`: the slot, then two tensors for each layer."""
        found = [TensorSpec("slot", "int64", (1,))]
        for index, one in enumerate(self.targets):
            found.append(TensorSpec(f"a_{index}", self.dtype, (1, one.inputs, self.rank)))
            found.append(TensorSpec(f"b_{index}", self.dtype, (1, self.rank, one.outputs)))
        return tuple(found)


class LoraLinear(nn.Linear):
    """Class that a linear layer gets with its slots: it adds each row's adapter inside `adapting`.

    A layer changes its class and stays the same object, so its parameters, their names and its hooks stay as well.

    Attributes:
        original: Class of the layer without slots.
        lora_a: [slots + 1, in_features, rank].
        lora_b: [slots + 1, rank, out_features], multiplied by the adapter's scale.
    """

    original: ClassVar[type[nn.Linear]] = nn.Linear
    lora_a: torch.Tensor
    lora_b: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, with the product of each row's adapter inside `adapting`."""
        output = super().forward(input)
        slots = _step.slots
        if slots is None:
            return output
        # Some layers are called with the tokens of all rows in one dimension.
        rows = input if input.dim() == 3 else input.reshape(slots.shape[0], -1, self.in_features)
        tensors = (self.lora_a, self.lora_b) if _step.tensors is None else _step.tensors[id(self)]
        a, b = (one.index_select(0, slots) for one in tensors)
        added = torch.bmm(torch.bmm(rows.to(a.dtype), a), b).to(output.dtype)
        return output + (added if input.dim() == 3 else added.reshape(output.shape))


def lora_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """Return the layers of a model that have slots, by name."""
    return {name: one for name, one in model.named_modules() if isinstance(one, LoraLinear)}


def slot_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Return the slots' tensors of a model, `lora_a` and `lora_b` of each layer in turn."""
    return [getattr(layer, name) for layer in lora_layers(model).values() for name in LORA_TENSORS]


def slots_of(model: nn.Module) -> LoraSlots | None:
    """Return the slots of a model, or None if it has none."""
    layers = lora_layers(model)
    if not layers:
        return None
    first = next(iter(layers.values())).lora_a
    targets = tuple(LoraTarget(name, one.in_features, one.out_features) for name, one in layers.items())
    return LoraSlots(first.shape[0] - 1, first.shape[2], dtype_name(first.dtype), targets)


def remove_slots(model: nn.Module) -> None:
    """Remove the slots of a model's layers."""
    for layer in lora_layers(model).values():
        for name in LORA_TENSORS:
            delattr(layer, name)
        layer.__class__ = layer.original  # type: ignore[assignment]  # the class that it had


def _add_slots(layer: nn.Linear, slots: int, rank: int, dtype: torch.dtype) -> None:
    """Give one layer empty slots."""
    kind = type(layer)
    # A class of its own for each kind, such as that of a layer with a quantized weight.
    made = LoraLinear if kind is nn.Linear else type("LoraLinear", (LoraLinear, kind), {"original": kind})
    device = next(layer.parameters()).device
    shapes = (slots + 1, layer.in_features, rank), (slots + 1, rank, layer.out_features)
    with ordinary_tensors():
        try:
            tensors = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        except RuntimeError as error:
            raise InputError(
                f"lora_slots={slots} with lora_rank={rank} need more memory than there is ({first_line(error)[:200]}); "
                "lower one of them"
            ) from error
    for name, tensor in zip(LORA_TENSORS, tensors, strict=True):
        layer.register_buffer(name, tensor, persistent=False)
    layer.__class__ = made


def add_slots(model: PreTrainedModel, slots: int, rank: int, targets: Sequence[str] = ()) -> LoraSlots:
    """Give linear layers of a model's decoder slots for adapters, in place of others that it has.

    Equal ones are kept, so that sessions over one model share its adapters.

    Args:
        model: The model. Its weights and its state dict stay the same.
        slots: Number of adapters that it holds at once.
        rank: Largest rank of an adapter.
        targets: Names of layers, such as `q_proj` or `layers.0.mlp.up_proj`; empty for all linear layers of the decoder
            except its head.

    Raises:
        InputError: If a target is not such a layer.
    """
    linears = _decoder_linears(model)
    chosen = {name: one for name, one in linears.items() if not targets or any(_ends_with(name, t) for t in targets)}
    for target in targets:
        if not any(_ends_with(name, target) for name in linears):
            known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linears)) or "none"
            raise InputError(
                f"lora_targets must be linear layers of the decoder, got {target!r}; use some of {known}. Embeddings, "
                "heads and experts cannot have adapters: merge such an adapter at export (lora=, --lora)"
            )
    if not chosen:
        raise InputError(
            f"lora_slots needs linear layers, and the decoder of {type(model).__name__} has none; leave it out"
        )
    before = slots_of(model)
    if before is not None:
        wanted = (slots, rank, dtype_name(model.dtype), {*chosen})
        if (before.slots, before.rank, before.dtype, {one.name for one in before.targets}) == wanted:
            return before
        remove_slots(model)
    for layer in chosen.values():
        _add_slots(layer, slots, rank, model.dtype)
    found = slots_of(model)
    assert found is not None
    return found


def check_changes(model: PreTrainedModel, names: Iterable[str], what: str) -> None:
    """Check that an adapter changes linear layers that a model's decoder has.

    Args:
        model: The model.
        names: Names of the layers that it changes.
        what: Name of the adapter, for messages.

    Raises:
        InputError: If the model lacks one.
    """
    linears = _decoder_linears(model)
    missing = next((name for name in names if name not in linears), None)
    if missing is not None:
        raise InputError(
            f"{what} changes {missing!r:.100}, which is not a linear layer of this model's decoder; pass an adapter "
            "that was trained for this model"
        )


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _decoder_linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the linear layers of a model's decoder by name, without its head."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    return {
        names[id(module)]: module
        for module in decoder.modules()
        if isinstance(module, nn.Linear) and module is not head
    }


class WriteAdapter(nn.Module):
    """Module of the method `write_adapter`.

    Args:
        model: Model with slots.
        slots: Its slots.
    """

    def __init__(self, model: PreTrainedModel, slots: LoraSlots) -> None:
        super().__init__()
        # The whole model, because methods that are packaged together share tensors by name.
        self.model = model
        name_forward(self, [one.name for one in slots.inputs])

    def call(self, slot: torch.Tensor, **tensors: torch.Tensor) -> tuple[torch.Tensor]:
        """Write an adapter's tensors into a slot, int64 [1], and return the number of the next slot."""
        return (write_slot(slot_tensors(self.model), slot, *tensors.values()),)


def write_slot(into: Sequence[torch.Tensor], slot: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
    """Write an adapter into one slot of tensors as `slot_tensors` returns them; see `WriteAdapter.call`."""
    for target, source in zip(into, tensors, strict=True):
        target.index_copy_(0, slot, source.to(target.dtype))
    return slot + 1


def check_fits(slots: LoraSlots, tensors: Mapping[str, tuple[torch.Tensor, torch.Tensor]], what: str) -> None:
    """Check that an adapter fits the slots of a program.

    Args:
        slots: The program's slots.
        tensors: For each layer [rank, inputs] and [outputs, rank].
        what: Name of the adapter, for messages.

    Raises:
        InputError: If it changes a layer without a slot, was trained for another model, has a larger rank, or values
            that are not finite in the program's dtype.
    """
    known = {one.name: (one.inputs, one.outputs) for one in slots.targets}
    dtype: torch.dtype = getattr(torch, slots.dtype)
    for name, (a, b) in tensors.items():
        check_pair(what, name, (a.shape, b.shape), known, slots.rank)
        if not all(bool(torch.isfinite(one.to(dtype)).all()) for one in (a, b)) or _overflows(a, b, dtype):
            raise InputError(
                f"{what} must have values, and products of its matrices, that {slots.dtype} holds, got larger ones in "
                f"{name} (its scale included); train it again, or use a model in float32"
            )


def _overflows(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return True if a value of the product of an adapter's matrices is beyond a dtype's range."""
    limit = torch.finfo(dtype).max
    # A bound of the values first, because the product is large.
    if float((a.abs().amax(1).double() * b.abs().amax(0).double()).sum()) < limit:
        return False
    return any(float((rows.double() @ a.double()).abs().amax()) > limit for rows in b.split(256))


def packed(slots: LoraSlots, tensors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Return the tensors of `write_adapter` for an adapter, padded with zeros to the program's rank.

    Args:
        slots: The program's slots.
        tensors: For each layer [rank, inputs] and [outputs, rank], which includes the scale. Without layers they empty
            a slot.
    """
    dtype: torch.dtype = getattr(torch, slots.dtype)
    found: list[torch.Tensor] = []
    for one in slots.targets:
        a = torch.zeros(1, one.inputs, slots.rank, dtype=dtype)
        b = torch.zeros(1, slots.rank, one.outputs, dtype=dtype)
        if one.name in tensors:
            given_a, given_b = tensors[one.name]
            a[0, :, : given_a.shape[0]] = given_a.t().to(dtype)
            b[0, : given_b.shape[1]] = given_b.t().to(dtype)
        found += [a, b]
    return found
