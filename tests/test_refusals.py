"""What a refusal says of an error that somebody's tracer raised."""

from __future__ import annotations

import pytest

from exportable_cache.errors import describe_trace_error


class GuardOnDataDependentSymNode(Exception):
    pass


class ConstraintViolationError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            GuardOnDataDependentSymNode("Could not guard\non u0 < 1"),
            "a size or a branch depends on the values of tensors, GuardOnDataDependentSymNode: Could not guard",
        ),
        (
            ConstraintViolationError("Constraints violated (length)!"),
            "the code branches on the length, ConstraintViolationError: Constraints violated (length)!",
        ),
        (KeyError("other"), "KeyError: 'other'"),
        (RuntimeError(""), "RuntimeError: RuntimeError"),
    ],
)
def test_the_mechanism_comes_first(error: Exception, told: str) -> None:
    assert describe_trace_error(error) == told
