"""Components of a layer: small immutable objects with JSON fields, identified by the name of their kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import InputError

if TYPE_CHECKING:
    from typing_extensions import Self


class Component:
    """A frozen dataclass whose fields are JSON values, in a family of kinds.

    A family is a subclass with `kinds = {}`; a member names itself: `class RingPolicy(SlotPolicy, kind="ring")`. A
    member's `to_config` is what manifests, saved caches and pytree contexts hold, and the family's `from_config` reads
    it back.
    """

    #: Name of the family in messages.
    family: ClassVar[str]
    #: Members of the family by kind.
    kinds: ClassVar[dict[str, type[Self]]]
    kind: ClassVar[str]
    #: Names of a member's fields, in order.
    field_names: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls, kind: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if kind is not None:
            cls.kind = kind
            cls.kinds[kind] = cls  # type: ignore[assignment]
            # Members annotate their fields and nothing else. Not by `dataclasses.fields`: strict export puts layers
            # together inside TorchDynamo, which cannot ask a class for them.
            own = cls.__dict__.get("__annotations__", ())
            cls.field_names = tuple(dict.fromkeys((*getattr(cls, "field_names", ()), *own)))

    def to_config(self) -> dict[str, Any]:
        """Return the kind and the fields as JSON values."""
        return {"kind": self.kind, **{name: getattr(self, name) for name in self.field_names}}

    @classmethod
    def has_kind(cls, kind: Any) -> bool:
        """Return True if the family has a member of this kind; `kind` may be of any type."""
        return isinstance(kind, str) and kind in cls.kinds

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the member that `to_config` described.

        Raises:
            InputError: If the kind is unknown, a field is missing or too much, or its value is refused by the member.
        """
        given = dict(config)
        kind = given.pop("kind", None)
        member = cls.kinds[kind] if cls.has_kind(kind) else None
        if member is None:
            raise InputError(f"{cls.family} is of kind {kind!r}, known are {names(cls.kinds)}")
        expected = member.field_names
        if set(given) != set(expected):
            raise InputError(f"{cls.family} has {names(given)}, one of kind {kind!r} has {names(expected)}")
        return member(**given)


def names(of: Iterable[str]) -> str:
    """Return a list for messages: `capacity, window`, or `none`."""
    return ", ".join(of) or "none"


def check_count(value: Any, what: str, least: int) -> None:
    """Check that a value is an int of at least `least`.

    Args:
        value: The value.
        what: Its name for the message, such as "window of a ring".
        least: Smallest allowed value.

    Raises:
        InputError: If it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{what} is {value!r}; it must be an int of at least {least}")


def label_of(config: Mapping[str, Any]) -> str:
    """Return a short description of a layer's `config`: `ring`, `full int8`, `full + states`, `ring (tensorrt)`.

    Kinds are not looked up, because the layout may come from a target that is not installed.
    """
    # Manifests call the layout "kernel".
    policy, storage, layout = (config.get(part, {}).get("kind") for part in ("policy", "storage", "kernel"))
    words = [policy]
    if storage not in (None, "float"):
        words.append(storage)
    if "states" in config and storage is not None:
        words.append("+ states")
    if "indexer" in config:
        words.append("+ indexer")
    if layout != "portable":
        words.append(f"({layout})")
    return " ".join(map(str, words))
