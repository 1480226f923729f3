"""Tensors of a layer that a graph takes from the model and the cache by itself, and not as inputs.

TorchDynamo takes 0.1 s for the inputs of one layer, and each of them is guarded, which costs a load and every step. Of
layers that are traced once for all it need not know them: they are looked up where they are, and compared with what the
graph was compiled for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...common.compat.torch import module_tensors
from ...common.tensors import kind_of_tensor
from .graphs import OutdatedGraph

if TYPE_CHECKING:
    from torch import nn

    from ...models.cache_factory import ExportableCache


class OwnTensor(NamedTuple):
    """One of them, in any process.

    Attributes:
        module: Its name in the model, None where the cache has the tensor.
        layer: Its number in the cache.
        name: Of the tensor there.
        kind: See `kind_of_tensor`.
    """

    module: str | None
    layer: int
    name: str
    kind: tuple[str, ...]


_owners: ContextVar[tuple[nn.Module, ExportableCache]] = ContextVar("_owners")


@contextmanager
def owners_of_tensors(model: nn.Module, cache: ExportableCache) -> Iterator[None]:
    """A block in which graphs are loaded that run over these."""
    token = _owners.set((model, cache))
    try:
        yield
    finally:
        _owners.reset(token)


class OwnTensors:
    """Those of one graph, over the model and the cache of the block around.

    Raises:
        OutdatedGraph: If one is not there, or of another kind.
    """

    def __init__(self, places: Sequence[OwnTensor]) -> None:
        self.places = tuple(places)
        self._found: list[tuple[dict[str, Any], str, tuple[Any, ...]]] = []
        if not self.places:
            return
        model, cache = _owners.get()
        modules = dict(model.named_modules(remove_duplicate=False))
        for place in self.places:
            if place.module is None:
                holder = vars(cache.layers[place.layer])
            else:
                module = modules.get(place.module)
                holders = () if module is None else module_tensors(module)
                holder = next((one for one in holders if place.name in one), {})
            tensor = holder.get(place.name)
            if not isinstance(tensor, torch.Tensor) or tuple(kind_of_tensor(tensor)) != place.kind:
                raise OutdatedGraph
            self._found.append((holder, place.name, _form(tensor)))

    def tensors(self) -> list[torch.Tensor]:
        """As they are now.

        Raises:
            OutdatedGraph: If one is of another kind by now.
        """
        found = []
        for holder, name, form in self._found:
            tensor = holder.get(name)
            if tensor is None or _form(tensor) != form:
                raise OutdatedGraph
            found.append(tensor)
        return found

    def are(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether they are these objects, in the same form: not transposed, not cut."""
        return all(
            holder.get(name) is tensor and (tensor.shape, tensor.stride()) == form[2:]
            for (holder, name, form), tensor in zip(self._found, tensors, strict=True)
        )


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return type(tensor), tensor.dtype, tensor.shape, tensor.stride()
