"""Compute capabilities that a plan is built for."""

from __future__ import annotations

from typing import Any

from ...errors import InputError

#: What TensorRT-RTX 1.5 builds for, on any machine. (Hopper's 90 is not among them.)
CAPABILITIES = (75, 80, 86, 89, 120, 121)

#: What its plans load on when none is asked for, says its documentation: these, and later ones.
PORTABLE = (80, 86, 89, 120)


def parse_capabilities(given: Any) -> tuple[int, ...]:
    """`"80,86"`, `80`, `[80, 86]` or None for the portable default, as sorted numbers.

    Raises:
        InputError: If one is none of `CAPABILITIES`, or the list is empty.
    """
    if given is None:
        return ()
    parts = given.split(",") if isinstance(given, str) else list(given) if isinstance(given, (list, tuple)) else [given]
    known = {str(capability): capability for capability in CAPABILITIES}
    # 8.6 and sm86 are the same thing to people.
    names = [str(part).strip().lower().removeprefix("sm").removeprefix("_").replace(".", "") for part in parts]
    unknown = [part for part, name in zip(parts, names, strict=True) if name not in known]
    if unknown or not parts:
        raise InputError(
            f"sm is {given!r}; it must be one or more of {', '.join(known)}, such as '80,89', "
            "or left out for a plan that loads on every GPU from 80 on but 90 and 100"
        )
    return tuple(sorted({known[name] for name in names}))


def describe_capabilities(capabilities: tuple[int, ...] | list[int]) -> str:
    """`SM 80, 86`, or what the portable default is."""
    if not capabilities:
        return f"SM {', '.join(map(str, PORTABLE))} and later"
    return f"SM {', '.join(map(str, capabilities))}"
