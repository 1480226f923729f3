"""Native operators of compiled steps, and of steps that have no graph yet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ....common.compat.torch import ATTENTION_CALL, LINEAR_CALL
from . import attention, linear
from .attention import attention_if_few
from .linear import linear_of_few_rows, linear_of_float32

#: The libraries whose operators graphs and eager steps may call.
NATIVE_OPERATORS = (linear.OPERATORS, attention.OPERATORS)

#: A function that returns None for arguments that it does not support.
Operator = Callable[..., "torch.Tensor | None"]


@contextmanager
def eager_operators(few_rows: bool = False, few_queries: bool = False, onednn: bool = False) -> Iterator[None]:
    """Use faster operators in place of torch's, in this block and this thread. They support no gradients.

    Two functions of torch are replaced. A `TorchFunctionMode` would be called for every operator and every access to a
    shape or dtype, which adds 8 to 15 ms to a step of 36 layers. Another thread that compiles meanwhile gets torch's
    operators, but with a guard on the replaced function, so TorchDynamo compiles again after the block.

    Args:
        few_rows: Use the native operator for linear layers of few rows, which must be loaded.
        few_queries: Use the native operator for attention of few queries, which must be loaded.
        onednn: Use oneDNN for other linear layers in float32.
    """
    linears = [linear_of_few_rows] * few_rows + [linear_of_float32] * onednn
    with ExitStack() as stack:
        if linears:
            stack.enter_context(LINEAR_CALL.during(_by(linears)))
        if few_queries:
            stack.enter_context(ATTENTION_CALL.during(_by([attention_if_few])))
        yield


def _by(operators: list[Operator]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a wrapper that makes a function of torch try `operators` first."""
    thread = threading.get_ident()

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # Only in this thread, because others may compile or need gradients.
            if not torch.compiler.is_compiling() and threading.get_ident() == thread:
                for operator in operators:
                    result = operator(*args, **kwargs)
                    if result is not None:
                        return result
            return original(*args, **kwargs)

        return call

    return replace
