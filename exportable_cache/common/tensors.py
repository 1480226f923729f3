"""Properties that distinguish tensors, and tensors that are safe to write in any grad mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def kind_of_tensor(tensor: torch.Tensor) -> list[str]:
    """Class, dtype, device, shape and strides.

    Of a quantised weight also what it is made of, and what its class keeps beside: the size of groups, say.
    """
    described = [str(tensor.dtype), str(tensor.device), str(tuple(tensor.shape)), str(tensor.stride())]
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [type(tensor).__name__, *described]
    names, kept = flatten()
    parts = [(name, getattr(tensor, name)) for name in names]
    forms = [(name, str(part.dtype), part.shape, part.stride()) for name, part in parts if part is not None]
    return [type(tensor).__name__, repr(forms), repr(kept), *described]


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """A block that makes tensors which steps outside of `torch.inference_mode` can write, even if it is on here.

    Gradients stay off: to leave inference mode turns them on.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield
