"""Options of a command, made from the fields of the dataclasses that it fills."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from inspect import Parameter, signature
from typing import Annotated, Any, Literal

import typer

from ..common.settings import REQUIRED, Setting, keyword_of, setting_of


def at_least(least: int) -> Callable[[Any], Any]:
    """A callback that refuses smaller numbers, in lists of them too, before anything slow is imported."""

    def check(given: Any) -> Any:
        for value in given if isinstance(given, (list, tuple)) else [given]:
            if value is not None and not value >= least:
                raise typer.BadParameter(f"{value} is too small; it must be at least {least}")
        return given

    return check


_FIELDS_OWN: Any = object()


@dataclass(frozen=True)
class Changes:
    """What a command makes different from the field.

    Attributes:
        default: In place of the field's; `REQUIRED` where the command line insists.
        about: Further arguments of `typer.Option`, such as a completion.
    """

    default: Any = _FIELDS_OWN
    about: Mapping[str, Any] = field(default_factory=dict)


def options_of(owners: Iterable[type], changes: Mapping[str, Changes] | None = None) -> Iterator[Parameter]:
    """One parameter per field that has a spelling on the command line, named as the keyword that users pass in Python.

    Args:
        owners: Dataclasses whose fields are `settings.setting`; where two have the same one, the first counts.
        changes: By keyword.
    """
    seen = set()
    for owner in owners:
        for one in fields(owner):
            found, name = setting_of(one), keyword_of(one)
            if found is not None and found.flags and name not in seen:
                seen.add(name)
                yield _option(one, found, (changes or {}).get(name))


def _option(one: Field, found: Setting, changes: Changes | None) -> Parameter:
    changes = changes or Changes()
    default = one.default if changes.default is _FIELDS_OWN else changes.default
    about: dict[str, Any] = {"help": found.help, "metavar": found.metavar, "show_default": found.shown_default}
    if found.least is not None:
        about["callback"] = at_least(found.least)
    about.update(changes.about)
    choices = found.choices or found.offered
    kind: Any = Literal[choices] if choices and found.metavar is None else found.kind
    kind = list[kind] if found.repeats else kind
    if default is None or default == ():
        kind, default = kind | None, None
    return _keyword(keyword_of(one), Annotated[kind, typer.Option(*found.flags, **about)], default)


def declared(name: str, annotation: Any, default: Any = REQUIRED) -> Parameter:
    """A parameter that is no field: `declared("json", JsonOption, False)`."""
    return _keyword(name, annotation, default)


def _keyword(name: str, annotation: Any, default: Any) -> Parameter:
    return Parameter(
        name, Parameter.KEYWORD_ONLY, annotation=annotation, default=Parameter.empty if default is REQUIRED else default
    )


def takes(*parameters: Parameter) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command `command(ctx, **given)` these options: typer reads them from its signature."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        context = Parameter("ctx", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
        command.__signature__ = signature(command).replace(parameters=[context, *parameters])  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in (context, *parameters)}
        return command

    return decorate
