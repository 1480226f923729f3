"""Operators of torch that this package compiles for the processor at hand, for graphs and steps that are on it."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ....common.native.machine_code import MachineCode

#: Of `MachineCode`: what functions of recording.h give.
RECORDING_RESULTS = {
    "exportable_cache_recording": ctypes.c_void_p,
    "exportable_cache_is_whole": ctypes.c_bool,
    "exportable_cache_run": ctypes.c_bool,
}


class OwnOperators:
    """One library of them.

    Args:
        code: It.
        variable: Of the environment: `torch` there turns them off.
        shapes: Of each operator's result, by the name of the operator, see `torch.library.register_fake`.
    """

    def __init__(self, code: MachineCode, variable: str, shapes: Mapping[str, Callable[..., Any]]) -> None:
        self.code, self.variable = code, variable
        self._shapes = shapes
        self._has_shapes = False

    def is_wanted(self) -> bool:
        """Whether there are such operators for this process, or a compiler for them."""
        # Their numbers were compared on such processors alone.
        is_known = platform.machine() in ("x86_64", "AMD64")
        return is_known and os.environ.get(self.variable, "") != "torch" and self.code.can_be_loaded()

    def identity(self) -> str:
        """What tells graphs that may call them from others."""
        return self.code.digest if self.is_wanted() else ""

    def begin(self) -> None:
        """Have them compiled beside this process, where they are wanted, see `MachineCode.begin`."""
        if self.is_wanted():
            self.code.begin()

    def load(self, compiles: bool = True) -> bool:
        """Have them in this process, see `MachineCode.load`."""
        if not self.is_wanted() or not self.code.load(compiles):
            return False
        if not self._has_shapes:
            self._has_shapes = True
            for name, shape in self._shapes.items():
                torch.library.register_fake(f"exportable_cache::{name}", shape)
        return True

    def has(self, operator: Any) -> bool:
        """Whether an operator of torch is one of these."""
        namespace, _, name = operator.name().partition("::")
        return namespace == "exportable_cache" and name in self._shapes

    def are_called_in(self, graph: bytes) -> bool:
        """Whether a graph that was written needs them to be read."""
        return any(name.encode() in graph for name in self._shapes)
