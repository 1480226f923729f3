"""How a model is to be split over processes, for a plan. Importing this module imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..common.settings import check_settings, setting
from ..errors import InputError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


@dataclass(frozen=True)
class Split:
    """Ranks, stages, and what each may take.

    Attributes:
        tensor_parallel: Ranks that share every layer, None for one.
        pipeline: Stages that have layers of their own, None for one.
        memory: Bytes that a process may take for weights and cache; a text such as "16G" becomes a number (GiB).

    Raises:
        InputError: If a value is out of range.
    """

    tensor_parallel: int | None = setting(
        None,
        "Also plan for N ranks that share the model, by transformers' own plan of it.",
        flags=("--tensor-parallel",),
        metavar="N",
        kind=int,
        shown_default=False,
    )
    pipeline: int | None = setting(
        None,
        "Also plan for N stages of layers.",
        flags=("--pipeline",),
        metavar="N",
        kind=int,
        least=2,
        shown_default=False,
    )
    memory: int | str | None = setting(
        None,
        "Say how many tokens fit, if a process may take SIZE for weights and cache, such as 16G.",
        flags=("--memory",),
        metavar="SIZE",
        shown_default=False,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.memory is not None:
            object.__setattr__(self, "memory", _bytes(self.memory))


def _bytes(given: int | str) -> int:
    found = _BYTES.fullmatch(str(given).strip())
    if isinstance(given, bool) or found is None or float(found[1]) == 0:
        raise InputError(f"memory is {given!r}; it must be bytes above 0, or a size such as 800M or 16G")
    return int(float(found[1]) * _UNITS[found[2].upper()])
