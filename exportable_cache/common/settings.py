"""Options that are stated once, at a dataclass field: default, check, help and command-line spelling.

Nothing here imports torch, so that the command line starts without it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypeVar

from ..errors import InputError

#: Default of a required option.
REQUIRED = MISSING

_KEY = "setting"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Setting:
    """Metadata of an option, in addition to the field's type and default.

    Attributes:
        help: One sentence for the command line.
        keyword: Name of the argument in Python and in errors; the field's name by default.
        flags: Spellings on the command line, such as ("--batch-size", "-b"). The first is that of the keyword; others
            are short, or those of other tools. Without flags there is no command-line option.
        metavar: Placeholder for the value in the help.
        kind: Type of one value.
        repeats: True if the option may be given several times.
        least: Smallest int allowed; None if the value is not an int or has another check.
        choices: All values allowed; empty for any.
        offered: Values that the command line offers; `choices` by default. A call may accept more, such as a
            torch.dtype.
        spellings: Values of other tools, and what each means.
        shown_default: Default as the help shows it, if it is computed later.
    """

    help: str
    keyword: str | None = None
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    kind: type = str
    repeats: bool = False
    least: int | None = None
    choices: tuple[str, ...] = ()
    offered: tuple[str, ...] = ()
    spellings: Mapping[str, str] = field(default_factory=dict)
    shown_default: str | bool = True


def setting(default: Any, help: str, **about: Any) -> Any:
    """Return a dataclass field that is an option.

    Args:
        default: `REQUIRED` if the option has none.
        help: See `Setting`.
        **about: Other fields of `Setting`.

    Example:
        >>> batch_size: int = setting(1, "Number of rows.", flags=("-b",), kind=int, least=1)
    """
    return field(default=default, metadata={_KEY: Setting(help, **about)})


def same_setting(owner: type, name: str) -> Any:
    """Return a field that repeats the option `name` of another dataclass."""
    found = next(one for one in fields(owner) if one.name == name)
    return field(default=found.default, metadata=found.metadata)


def setting_of(one: Field) -> Setting | None:
    """Return a field's metadata, or None if the field is not an option."""
    return one.metadata.get(_KEY)


def keyword_of(one: Field) -> str:
    """Return the name of a field's argument in Python."""
    found = setting_of(one)
    return one.name if found is None or found.keyword is None else found.keyword


def check_settings(spec: Any) -> None:
    """Check the values of a dataclass against its fields. An option whose default is None may be None.

    Raises:
        InputError: If a value is below `least`, not in `choices`, or not a bool where one is expected.
    """
    for one in fields(spec):
        found, value = setting_of(one), getattr(spec, one.name)
        if found is None or (value is None and one.default is None):
            continue
        if found.least is not None:
            check_count(keyword_of(one), value, found.least)
        if found.choices:
            check_choice(keyword_of(one), value, found.choices, optional=one.default is None)
        if found.kind is bool:
            check_flag(keyword_of(one), value)


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Check that `value` is an int of at least `least`.

    Raises:
        InputError: If it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{name} must be an int of at least {least}, got {value!r}")


def check_choice(name: str, value: Any, choices: Collection[str], optional: bool = False) -> None:
    """Check that `value` is one of `choices`.

    Raises:
        InputError: If it is not.
    """
    # A tuple, because the value may not be hashable.
    if value not in tuple(choices):
        known = ("one of " if len(choices) > 1 else "") + ", ".join(choices) + (", or None" if optional else "")
        raise InputError(f"{name} must be {known}, got {value!r}")


def check_flag(name: str, value: Any) -> None:
    """Check that `value` is a bool, because strings such as "False" are true in Python.

    Raises:
        InputError: If it is not.
    """
    if not isinstance(value, bool):
        raise InputError(f"{name} must be True or False, got {value!r}")
