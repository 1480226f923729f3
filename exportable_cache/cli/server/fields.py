"""Kinds of fields of requests, and the error messages for values that they do not take."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

_REFUSED = "refused"
_BODY = "the body"
#: Constraint of a value, by the type of pydantic's error.
_MUST: Mapping[str, str] = {
    "string_type": "text",
    "string_unicode": "text in UTF-8",
    "string_too_short": "text of at least {min_length} characters",
    "string_too_long": "text of at most {max_length} characters",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number of fewer digits",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "literal_error": "{expected}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
}

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_short.maxlevel, _short.maxdict, _short.maxlist = 3, 4, 4


def shown(value: Any) -> str:
    """Return a request's value as text for an error message, shortened."""
    return _short.repr(value)


def refuse(must: str, value: Any, fix: str, at: str = "") -> NoReturn:
    """Refuse the value of a validator.

    Args:
        must: Constraint of the value.
        value: The value.
        fix: Remedy.
        at: Path within the value, such as ".0.type".

    Raises:
        PydanticCustomError: Always.
    """
    # pydantic encodes it as UTF-8, which lone surrogates do not allow.
    at = at.encode("utf-8", "backslashreplace").decode()
    raise PydanticCustomError(_REFUSED, "{must}", {"must": must, "got": shown(value), "fix": fix, "at": at})


def message_of(error: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the message for one of pydantic's errors, and the name of its field.

    Args:
        error: An error from `ValidationError.errors()`, with a `loc` that begins with "body".

    Returns:
        The message, and the field as the API's `param`; None for the whole body.
    """
    context = error.get("ctx", {})
    # The first is "body".
    field = ".".join(str(part) for part in error["loc"][1:]) + context.get("at", "")
    field = field.removeprefix(".")[:200]
    name = field or _BODY
    if error["type"] == _REFUSED:
        return f"{name} must be {context['must']}, got {context['got']}; {context['fix']}", field or None
    if error["type"] == "missing":
        return f"{name} must be given, got nothing; send it", field or None
    must = _MUST.get(error["type"], "a value of another kind").format(**context)
    return f"{name} must be {must}, got {shown(error.get('input'))}; change it", field or None


class Fields(BaseModel):
    """An object that refuses unknown fields by name."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _are_known(cls, given: Any) -> Any:
        # Checked here, because pydantic would list every one of a million fields.
        if isinstance(given, dict) and cls.model_config["extra"] == "forbid":
            known = [field.alias or name for name, field in cls.model_fields.items()]
            for name in given:
                if name not in known:
                    near = get_close_matches(str(name)[:80], known, 1)
                    fix = f"there is no such field; did you mean {near[0]}?" if near else "there is no such field"
                    refuse("left out", given[name], fix, at=f".{str(name)[:80]}")
        return given


def only(*harmless: Any, fix: str) -> PlainValidator:
    """Return a validator for a field that only accepts values without an effect.

    Args:
        harmless: Accepted values besides null.
        fix: Remedy for other values.
    """
    return PlainValidator(lambda value: _harmless(value, harmless, fix))


def _harmless(value: Any, harmless: Collection[Any], fix: str) -> None:
    if value is not None and not any(value == one for one in harmless):
        refuse(" or ".join(map(json.dumps, [*harmless, None])), value, fix)


def not_bool(value: Any) -> Any:
    """Refuse true and false for a number, because pydantic converts them to 1 and 0."""
    if isinstance(value, bool):
        refuse("a number", value, "send a number, or leave it out")
    return value


#: Numbers; pydantic would also accept true and false.
Whole = Annotated[int | None, BeforeValidator(not_bool)]
Number = Annotated[float | None, BeforeValidator(not_bool)]
#: Limit of new tokens.
Limit = Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(not_bool)]
