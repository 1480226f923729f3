"""What every target's options share: one frozen dataclass per target, made from the names a user gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, TypeVar

from ..common.settings import check_settings
from ..errors import InputError

Options = TypeVar("Options", bound="TargetOptions")


@dataclass(frozen=True)
class TargetOptions:
    """Options of a target, checked. A target derives its own: each field is an option with a default.

    Raises:
        InputError: If a value is out of range, or two do not go together.
    """

    #: Name of the target.
    target: ClassVar[str]
    #: Options that were given by name, be it as the default.
    _named: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def parse(cls: type[Options], given: Mapping[str, Any]) -> Options:
        """The options of a call, of a command line, or of a manifest.

        Raises:
            InputError: If one is not known, or its value is wrong.
        """
        known, whose = cls.known(given)
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise InputError(f"{whose} has no option {unknown[0]!r}; it knows {', '.join(known)}")
        options = cls(**given)
        object.__setattr__(options, "_named", frozenset(given))
        return options

    @classmethod
    def known(cls, given: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
        """Names of the options there are beside those given, and whose they are, for messages."""
        return tuple(one.name for one in fields(cls)), f"target {cls.target!r}"

    def __post_init__(self) -> None:
        check_settings(self)

    def to_dict(self) -> dict[str, Any]:
        """What was given, as a manifest records it."""
        return {
            one.name: getattr(self, one.name)
            for one in fields(self)
            if one.name in self._named or one.default is MISSING or getattr(self, one.name) != one.default
        }
