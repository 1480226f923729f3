"""What a tensor at the edge of a program is: its name, dtype and sizes, some of which have names of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a method takes or gives: `TensorSpec("input_ids", "int64", ("batch", "length"))`.

    Attributes:
        name: Of the argument.
        dtype: Name of a torch dtype.
        shape: Numbers, and names of sizes: "batch" is the program's batch size, "length" runs over the method's range,
            others over the range that `ProgramMethod.ranges` gives them.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def sizes(self, named: Mapping[str, int]) -> list[int]:
        """The shape, with a number for each name."""
        return [named[size] if isinstance(size, str) else size for size in self.shape]
