"""Numbers of a JSON schema: those that llguidance follows to the last digit, and those that it does not.

It reads every number as a float of 64 bits, not always the nearest one, and counts whole numbers in 64 bits. So
2**53 + 1 would come out as 2**53, and a limit of 2**63 as 2**63 - 1, without a word.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any, NoReturn

from ..errors import InputError, first_line

#: Up to here every whole number is a float of 64 bits.
MOST_WHOLE = 2**53
#: Decimal digits that every float of 64 bits keeps, and the powers of ten that are such floats.
MOST_DIGITS, MOST_POWER = 15, 22
#: Keywords whose value is a limit -> its sign.
_LIMITS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
#: Keywords whose value maps names to schemas.
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
#: Keywords that restrict nothing.
_REMARKS = frozenset(("default", "example", "examples", "title", "description", "$comment", "deprecated"))


def exact_schema(text: str) -> str:
    """Return a JSON schema that allows nothing which the given one does not, with numbers that are followed exactly.

    A lower limit below -2**53 or an upper one above 2**53, such as those of whole numbers of 64 bits, becomes that
    number: an answer then lies within both. Any other number that would not be followed exactly is refused.

    Args:
        text: A JSON object.

    Raises:
        InputError: If it is not, or has such a number.
    """
    try:
        schema = json.loads(text, parse_float=Decimal, parse_constant=_refuse_constant)
        if not isinstance(schema, dict):
            raise InputError(
                f"the JSON schema must be an object, got {type(schema).__name__}: {text[:80]}; wrap it in one"
            )
        return json.dumps(_schema(schema))
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"the JSON schema cannot be read: {first_line(error)[:300]}; correct it") from error


def _schema(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_schema(one) for one in schema]
    if not isinstance(schema, dict):
        return _values(schema, "the JSON schema")
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _REMARKS:
            continue
        if key in _NAMED and isinstance(value, dict):
            found[key] = {name: _schema(one) for name, one in value.items()}
        elif key in ("const", "enum"):
            found[key] = _values(value, key)
        elif key in _LIMITS and _is_number(value):
            found[key] = _limit(key, value, schema.get("type") == "number")
        elif _is_number(value):
            found[key] = _number(value, key)
        else:
            found[key] = _schema(value)
    return found


def _limit(key: str, value: int | Decimal, is_real: bool) -> int | float:
    # A limit of numbers that need not be whole is compared as a float, which may be larger.
    if abs(Decimal(value)) > MOST_WHOLE and not (is_real and isinstance(value, Decimal)):
        if (value > 0) == (_LIMITS[key] > 0):
            return _LIMITS[key] * MOST_WHOLE
        raise InputError(f"{key} must be a number of at most 2**53 either way, got {_shown(value)}; use text")
    return _number(value, key)


def _values(value: Any, key: str) -> Any:
    if isinstance(value, list):
        return [_values(one, key) for one in value]
    if isinstance(value, dict):
        return {name: _values(one, key) for name, one in value.items()}
    return _number(value, key) if _is_number(value) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, Decimal)) and not isinstance(value, bool)


def _number(value: int | Decimal, key: str) -> int | float:
    if isinstance(value, int):
        if abs(value) > MOST_WHOLE:
            raise InputError(f"{key} must be a whole number of at most 2**53 either way, got {_shown(value)}; use text")
        return value
    digits = len(value.normalize().as_tuple().digits)
    if value and (digits > MOST_DIGITS or abs(value.adjusted()) > MOST_POWER):
        raise InputError(
            f"{key} must be a number of at most {MOST_DIGITS} digits between 1e-{MOST_POWER} and 1e{MOST_POWER}, got "
            f"{_shown(value)}; round it"
        )
    return float(value)


def _shown(value: int | Decimal) -> str:
    # Python refuses to write whole numbers of more than 4,300 digits.
    text = str(value) if isinstance(value, Decimal) or abs(value) < 10**60 else f"{value.bit_length()} bits"
    return text if len(text) <= 60 else text[:60] + "..."


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
