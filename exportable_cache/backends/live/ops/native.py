"""Load this package's C++ operators, which are compiled on the user's machine for its processor."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ....common.native.machine_code import MachineCode


class NativeOperators:
    """A library of native operators.

    Args:
        code: The library's source and how it is compiled.
        variable: Environment variable that disables the operators if it is `torch`.
        shapes: Fake implementation of each operator, by name, see `torch.library.register_fake`.
    """

    def __init__(self, code: MachineCode, variable: str, shapes: Mapping[str, Callable[..., Any]]) -> None:
        self.code, self.variable = code, variable
        self._shapes = shapes
        self._has_shapes = False

    def is_wanted(self) -> bool:
        """Return True if the operators are enabled, and loaded or can be compiled."""
        # Only x86-64, because the results were not tested on other processors.
        is_known = platform.machine() in ("x86_64", "AMD64")
        return is_known and os.environ.get(self.variable, "") != "torch" and self.code.can_be_loaded()

    def identity(self) -> str:
        """Return the digest of the library, for the key of graphs that may call it; "" if it is not used."""
        return self.code.digest if self.is_wanted() else ""

    def begin(self) -> None:
        """Start compiling the library in a subprocess, see `MachineCode.begin`."""
        if self.is_wanted():
            self.code.begin()

    def load(self, compiles: bool = True) -> bool:
        """Load the operators into this process and return True if that worked, see `MachineCode.load`."""
        if not self.is_wanted() or not self.code.load(compiles):
            return False
        if not self._has_shapes:
            self._has_shapes = True
            for name, shape in self._shapes.items():
                torch.library.register_fake(f"exportable_cache::{name}", shape)
        return True

    def are_called_in(self, graph: bytes) -> bool:
        """Return True if a serialized graph calls an operator of this library."""
        return any(name.encode() in graph for name in self._shapes)
