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

#: What graphs and steps may call that is neither torch's nor generated.
OWN_OPERATORS = (linear.OPERATORS, attention.OPERATORS)

#: Computes what it can, and gives None of the rest.
Operator = Callable[..., "torch.Tensor | None"]


@contextmanager
def eager_operators(few_rows: bool = False, few_queries: bool = False, onednn: bool = False) -> Iterator[None]:
    """A block whose operators, in this thread, are not torch's own where others compute them faster; without gradients.

    Functions are replaced, and not watched by a `TorchFunctionMode`: torch tells such a mode of each operator and of
    each look at a tensor's shape or dtype, which takes a step of 36 layers 8 to 15 ms. What another thread compiles
    meanwhile is torch's own, but guarded by the replacement: TorchDynamo compiles it again behind the block.

    Args:
        few_rows: Whether linear layers of few rows are the kernel's, see `few_rows.py`, which is loaded.
        few_queries: The same of attention, see `few_queries.py`.
        onednn: Whether other linear layers are oneDNN's, of those that it can compute.
    """
    linears = [linear_of_few_rows] * few_rows + [linear_of_float32] * onednn
    with ExitStack() as stack:
        if linears:
            stack.enter_context(LINEAR_CALL.during(_by(linears)))
        if few_queries:
            stack.enter_context(ATTENTION_CALL.during(_by([attention_if_few])))
        yield


def _by(operators: list[Operator]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What makes a function of torch one that asks these first."""
    thread = threading.get_ident()

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # Another thread may compile meanwhile, or want gradients.
            if not torch.compiler.is_compiling() and threading.get_ident() == thread:
                for operator in operators:
                    result = operator(*args, **kwargs)
                    if result is not None:
                        return result
            return original(*args, **kwargs)

        return call

    return replace
