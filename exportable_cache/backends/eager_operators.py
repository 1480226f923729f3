"""Steps that have no graph yet: their linear layers and their attention by what computes them fastest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..common.compat.torch import LINEAR
from . import few_queries, few_rows
from .few_queries import attention_if_few
from .few_rows import linear_of_few_rows
from .onednn_linears import linear_of_float32

#: What graphs and steps may call that is neither torch's nor generated.
OWN_OPERATORS = (few_rows.OPERATORS, few_queries.OPERATORS)


class EagerOperators(TorchFunctionMode):
    """A block whose operators are not torch's own, where others compute them faster; without gradients.

    Args:
        few_rows: Whether linear layers of few rows are the kernel's, see `few_rows.py`, which is loaded.
        few_queries: The same of attention, see `few_queries.py`.
        onednn: Whether other linear layers are oneDNN's, of those that it can compute.
    """

    def __init__(self, few_rows: bool = False, few_queries: bool = False, onednn: bool = False) -> None:
        super().__init__()
        self._linears = [linear_of_few_rows] * few_rows + [linear_of_float32] * onednn
        self._few_queries = few_queries

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result: torch.Tensor | None = None
        if function is LINEAR and not kwargs:
            result = next((found for linear in self._linears if (found := linear(*args)) is not None), None)
        elif function is functional.scaled_dot_product_attention and self._few_queries:
            result = attention_if_few(*args, **kwargs)
        return function(*args, **kwargs) if result is None else result
