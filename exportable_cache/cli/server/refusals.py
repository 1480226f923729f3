"""Sentences about fields of requests that are refused: `<field> must be <constraint>, got <value>; <fix>`."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

_REFUSED = "refused"
_BODY = "the body"
#: What a value has to be, by the type of pydantic's error.
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
    """Return a value of a request as a refusal repeats it, however long and deep it is."""
    return _short.repr(value)


def refuse(must: str, value: Any, fix: str, at: str = "") -> NoReturn:
    """Refuse the value that a validator was given.

    Args:
        must: What it has to be.
        value: What it is.
        fix: What to do instead.
        at: Where in the value the fault is, such as ".0.type".

    Raises:
        PydanticCustomError: Always.
    """
    # pydantic writes it as UTF-8, which half a character has no form in.
    at = at.encode("utf-8", "backslashreplace").decode()
    raise PydanticCustomError(_REFUSED, "{must}", {"must": must, "got": shown(value), "fix": fix, "at": at})


def sentence_of(error: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return what is said of one of pydantic's errors, and the name of its field.

    Args:
        error: As `ValidationError.errors()` gives it, its `loc` beginning with "body".

    Returns:
        The sentence, and the field as the `param` of the API; None for the whole body.
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
    """An object whose fields are all known: a misspelt one is refused by its name, not left out."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _are_known(cls, given: Any) -> Any:
        # Here and not by pydantic, which would list every one of a million.
        if isinstance(given, dict) and cls.model_config["extra"] == "forbid":
            known = [field.alias or name for name, field in cls.model_fields.items()]
            for name in given:
                if name not in known:
                    near = get_close_matches(str(name)[:80], known, 1)
                    fix = f"there is no such field; did you mean {near[0]}?" if near else "there is no such field"
                    refuse("left out", given[name], fix, at=f".{str(name)[:80]}")
        return given


def only(*harmless: Any, fix: str) -> PlainValidator:
    """Return a validator of a field that takes only what changes nothing.

    Args:
        harmless: Values beside null.
        fix: What to do instead of sending another.
    """
    return PlainValidator(lambda value: _harmless(value, harmless, fix))


def _harmless(value: Any, harmless: Collection[Any], fix: str) -> None:
    if value is not None and not any(value == one for one in harmless):
        refuse(" or ".join(map(json.dumps, [*harmless, None])), value, fix)


def not_bool(value: Any) -> Any:
    """Refuse true and false where a number is wanted, because pydantic takes them for 1 and 0."""
    if isinstance(value, bool):
        refuse("a number", value, "send a number, or leave it out")
    return value


#: Numbers that pydantic would also read from true and false.
Whole = Annotated[int | None, BeforeValidator(not_bool)]
Number = Annotated[float | None, BeforeValidator(not_bool)]
