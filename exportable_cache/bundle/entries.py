"""The small parts of a manifest: files, and what was done to weights and cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

#: A number of bytes, or a size: what 64 bits hold.
Count = Annotated[int, Field(ge=0, lt=2**63)]


def _is_dtype(name: str) -> str:
    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise ValueError(f"must be the name of a dtype of torch, got {name!r}")
    return name


#: The name of a dtype, such as `float32`.
Dtype = Annotated[str, AfterValidator(_is_dtype)]


class Entry(BaseModel):
    """A part of the manifest: no other fields than these, and never changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class File(Entry):
    """One file of the bundle, by its path inside the folder; `details` are its target's."""

    sha256: str
    bytes: Count
    holds: str
    details: dict[str, Any] = Field(default_factory=dict)


class Quantized(Entry):
    """How weights were quantised, and what that did to the logits: the program against the float model, on random
    tokens.

    `compared_in` is the dtype of the float model. `accuracy_before` and `accuracy_after` are shares of `questions` of
    the demo model's task, for that model only.
    """

    linear: str | None
    group_size: int | None
    embeddings: str | None
    # None in bundles of releases that had `absmax` only.
    scales: str | None = None
    # Bytes of the integers with their scales, and of all weights that stay in float32; None in bundles of earlier
    # releases.
    quantized_bytes: int | None = None
    other_bytes: int | None = None
    positions: int | None = None
    max_difference: float | None = None
    argmax_agreement: float | None = None
    compared_in: str | None = None
    questions: int | None = None
    accuracy_before: float | None = None
    accuracy_after: float | None = None


class RoundedCache(Entry):
    """A cache that keeps fewer bits than the model writes: what it would take otherwise, and how far the logits moved.

    The differences are between the program and the float model over an exact cache, so where weights are quantised as
    well they are of both; None where nothing was compared.
    """

    dtype: str
    float_bytes: Count
    positions: int | None = None
    max_difference: float | None = None
    argmax_agreement: float | None = None


class RankedProgram(Entry):
    """A program in parts, one for each of `size` processes (tensor parallelism), in a folder of its own, `rank-0`.

    Layers and bytes of the cache are one rank's, `weights_bytes` those of the rank that has most; the manifest's own
    are of the whole model. `parts_of_heads` says of each layer into how many parts its heads are cut.
    """

    size: int = Field(ge=2)
    parts_of_heads: list[int]
    weights_bytes: Count


def rank_folder(rank: int) -> str:
    """Name of a rank's folder in a bundle."""
    return f"rank-{rank}"


def names_of(names: Iterable[str]) -> str:
    """Names for a message."""
    return ", ".join(names) or "none"
