"""The dtype each target computes best in, and those it cannot be right in: known by name, without
importing a target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch


@dataclass(frozen=True)
class TargetDtypes:
    """What a target makes of the dtype of weights.

    `TargetDtypes(torch.float32)` exports every checkpoint in float32, `TargetDtypes()` each as it is stored.

    Attributes:
        best: Chosen where no dtype was asked for; None for the one the weights are stored in.
        refused: Dtypes that cannot be had, and why.
        keeps_exact: Whether weights of linear layers and tables are stored in the type that has them without loss,
            whatever is computed in.
    """

    best: torch.dtype | None = None
    refused: Mapping[torch.dtype, str] = field(default_factory=dict)
    keeps_exact: bool = False

    def preferred(self, stored: torch.dtype) -> torch.dtype:
        """The dtype for weights that are stored in `stored`."""
        return stored if self.best is None else self.best


# torch has kernels of its own for every floating dtype, and GPUs have units for 16-bit ones: half the bytes, and
# nothing rounded twice.
_AS_STORED = TargetDtypes()
# XNNPACK computes float32 on every processor. Its float16 is emulated where the processor has no such units, and what
# it leaves to the runtime there is slower still.
_XNNPACK = TargetDtypes(
    torch.float32,
    {
        torch.bfloat16: (
            "XNNPACK has no bfloat16 kernels, and with those of the runtime itself, which would take their place, "
            "attention gives wrong numbers and nan"
        )
    },
)
_NATIVE_LINEARS = replace(_XNNPACK, keeps_exact=True)


def target_dtypes(target: str, options: Mapping[str, Any]) -> TargetDtypes:
    """Of a target with the options given; unknown targets take weights as they are stored.

    Args:
        options: Of the target: ExecuTorch's delegate `tensorrt` computes what target `tensorrt` does. Programs for its
            other delegates are verified through XNNPACK.
    """
    if target == "executorch" and options.get("delegate") != "tensorrt":
        return _NATIVE_LINEARS if (options.get("linears") or options.get("kernels")) == "native" else _XNNPACK
    return _AS_STORED
