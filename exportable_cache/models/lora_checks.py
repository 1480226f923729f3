"""Checks of adapters that need no torch, for runners with and without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import InputError


def check_pair(
    what: str,
    name: str,
    shapes: tuple[Sequence[int], Sequence[int]],
    known: Mapping[str, tuple[int, int]],
    most: int,
) -> None:
    """Check that both matrices of an adapter fit a layer of a program.

    Args:
        what: Name of the adapter, for messages.
        name: Name of the layer.
        shapes: [rank, inputs] and [outputs, rank].
        known: Inputs and outputs of the layers that have slots for adapters.
        most: Largest rank that the slots have.

    Raises:
        InputError: If the layer has no slot, the adapter was trained for another model, or its rank is larger.
    """
    if name not in known:
        raise InputError(
            f"{what} changes {name!r:.100}, which has no slot for adapters; export with lora_targets "
            "(--lora-targets) that include it, or pass an adapter of this model"
        )
    (rank, inputs), outputs = shapes[0], shapes[1][0]
    if (inputs, outputs) != known[name]:
        raise InputError(
            f"{what} must have {known[name][0]} inputs and {known[name][1]} outputs in {name}, got {inputs} and "
            f"{outputs}; it was trained for another model, so pass one of this model"
        )
    if rank > most:
        raise InputError(
            f"{what} must have a rank of at most {most}, got {rank} in {name}; export with lora_rank={rank} "
            "(--lora-rank)"
        )
