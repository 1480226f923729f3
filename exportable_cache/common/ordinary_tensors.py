"""Tensors that can be written anywhere, whatever the caller's grad mode is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """A block that makes tensors which steps outside of `torch.inference_mode` can write, even if it is on here.

    Gradients stay off: to leave inference mode turns them on.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield
