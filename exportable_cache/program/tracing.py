"""Descriptions of errors that tracers and compilers raise for a model."""

from __future__ import annotations

import re

from ..errors import first_line

#: Pattern in an error of a tracer or compiler -> what the model's code does.
_MECHANISMS = {
    r"[Dd]ata.?[Dd]ependent": "a size or a branch depends on the values of tensors",
    r"Constraints violated|Specializations unexpectedly required": "the code branches on the length",
}


def describe_trace_error(error: BaseException) -> str:
    """Return the first line of an error of a tracer or compiler, preceded by its cause if that is known."""
    words = f"{type(error).__name__}: {first_line(error)}"
    mechanism = next((mechanism for pattern, mechanism in _MECHANISMS.items() if re.search(pattern, words)), None)
    return words if mechanism is None else f"{mechanism}, {words}"
