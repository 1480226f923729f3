"""What a tensor at the edge of a program is: its name, dtype and sizes, some of which have names of their own."""

from __future__ import annotations

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
