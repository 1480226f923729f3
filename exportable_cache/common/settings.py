"""Options that are written once: default, check and help stand at the field of a dataclass; the command line reads it.

Nothing here imports torch, so that the command line starts without it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypeVar

from ..errors import InputError

#: Default of an option that must be given.
REQUIRED = MISSING

_KEY = "setting"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Setting:
    """What a field says of itself beside its type and default.

    Attributes:
        help: One sentence for the command line.
        keyword: Name of the argument where users give it, in errors too; the field's own by default.
        flags: Spellings on the command line, such as ("--batch-size", "-b"); none by default, and then it has no option
            there.
        metavar: Stands for the value in the help.
        kind: Type of one value.
        repeats: Whether it may be given several times.
        least: Smallest int it takes; None where it is no int, or has a check of its own.
        choices: All values it takes; empty for any.
        offered: Those the command line takes, where a call takes others too, such as a torch.dtype; `choices` by
            default.
        shown_default: What the help says where the default is worked out later.
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
    shown_default: str | bool = True


def setting(default: Any, help: str, **about: Any) -> Any:
    """Make a dataclass field an option: `batch_size: int = setting(1, "Rows.", flags=("-b",), kind=int, least=1)`.

    Args:
        default: `REQUIRED` where one must be given.
        help: See `Setting`.
        **about: Further fields of `Setting`.
    """
    return field(default=default, metadata={_KEY: Setting(help, **about)})


def same_setting(owner: type, name: str) -> Any:
    """A field that is the option `name` of another dataclass."""
    found = next(one for one in fields(owner) if one.name == name)
    return field(default=found.default, metadata=found.metadata)


def setting_of(one: Field) -> Setting | None:
    """What a field says of itself, None where it is no option."""
    return one.metadata.get(_KEY)


def keyword_of(one: Field) -> str:
    """What users call a field."""
    found = setting_of(one)
    return one.name if found is None or found.keyword is None else found.keyword


def check_settings(spec: Any) -> None:
    """Refuse values that the fields of a dataclass do not take. An option whose default is None may be None.

    Raises:
        InputError: If one is no int of at least `least`, or none of `choices`.
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
    """Refuse what is no int, or a smaller one.

    Raises:
        InputError: Then.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{name} is {value!r}; it must be an int of at least {least}")


def check_choice(name: str, value: Any, choices: Collection[str], optional: bool = False) -> None:
    """Refuse what is none of `choices`.

    Raises:
        InputError: Then.
    """
    # A value of any type: what cannot be hashed is none of them either.
    if value not in tuple(choices):
        known = ("one of " if len(choices) > 1 else "") + ", ".join(choices) + (", or None" if optional else "")
        raise InputError(f"{name} is {value!r}; it must be {known}")


def check_flag(name: str, value: Any) -> None:
    """Refuse what is neither true nor false: the word "False" is true in Python.

    Raises:
        InputError: Then.
    """
    if not isinstance(value, bool):
        raise InputError(f"{name} is {value!r}; it must be true or false")
