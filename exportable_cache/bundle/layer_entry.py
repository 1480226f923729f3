"""What a manifest says of a cache layer: the parts it is composed of, and its tensors."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from ..cache.kernel import Kernel
from ..cache.layers import layer_from
from ..errors import InputError
from .entries import Count, Dtype, Entry, names_of


class Tensor(Entry):
    """One state tensor of a layer; `dims` names the dimensions of `shape`."""

    shape: list[Count]
    dims: list[str]
    dtype: Dtype
    bytes: Count

    @model_validator(mode="after")
    def _one_name_per_dimension(self) -> Tensor:
        if len(self.shape) != len(self.dims):
            raise ValueError(f"shape {self.shape} and dims {self.dims} differ in length")
        return self


class Layer(Entry):
    """One cache layer: `layer_type` is the model's name for it, the parts of `CacheLayer.config` say what ours is
    composed of.

    `states` and `indexer` are there where a layer keeps more than keys and values, `storage` where it keeps those.
    """

    layer_type: str
    policy: dict[str, Any]
    storage: dict[str, Any] | None = None
    kernel: dict[str, Any]
    states: dict[str, Any] | None = None
    indexer: dict[str, Any] | None = None
    tensors: dict[str, Tensor]
    bytes: Count

    @model_validator(mode="after")
    def _fits_its_parts(self) -> Layer:
        problem = self.problem()
        if problem is not None:
            raise ValueError(problem)
        return self

    @property
    def config(self) -> dict[str, Any]:
        """What `layer_from` takes."""
        parts = {name: getattr(self, name) for name in ("policy", "storage", "kernel", "states", "indexer")}
        return {name: part for name, part in parts.items() if part is not None}

    def problem(self) -> str | None:
        """What keeps the layer from being rebuilt of this, or None.

        A kernel that no one has imported yet is not judged: a target may bring it, so ask again when the target is
        there.
        """
        if not Kernel.has_kind(self.kernel.get("kind")):
            return None
        try:
            layer = layer_from(self.config, {})
        except InputError as error:
            return str(error)
        for name, tensor in self.tensors.items():
            declared = layer.state.get(name)
            if declared is not None and tuple(tensor.dims) != declared.dims:
                return (
                    f"tensors.{name}.dims: are {names_of(tensor.dims)}, those of a layer of {layer.label} are "
                    f"{names_of(declared.dims)}"
                )
        return layer.misfit({name: (tensor.shape, tensor.dtype) for name, tensor in self.tensors.items()})
