"""What the errors of tracers and compilers say of a model, in the words of the mechanism."""

from __future__ import annotations

import re

from ..errors import first_line

#: What errors of tracers and compilers say that a model's code does: pattern -> mechanism.
_MECHANISMS = {
    r"[Dd]ata.?[Dd]ependent": "a size or a choice depends on what tensors hold",
    r"Constraints violated|Specializations unexpectedly required": "the code takes other ways for other lengths",
}


def told_by(error: BaseException) -> str:
    """What somebody's tracer or compiler says of a model: the mechanism that it lacks where that is known, then its own
    words.
    """
    words = f"{type(error).__name__}: {first_line(error)}"
    mechanism = next((mechanism for pattern, mechanism in _MECHANISMS.items() if re.search(pattern, words)), None)
    return words if mechanism is None else f"{mechanism}, {words}"
