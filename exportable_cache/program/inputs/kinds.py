"""Kinds of inputs besides text. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...errors import InputError

#: Kinds of inputs besides text.
KINDS = IMAGE, VIDEO, AUDIO = ("image", "video", "audio")
#: Largest height or width of a program's images in pixels.
MOST_SIDE = 2**14
#: Most samples of one audio of a program.
MOST_SAMPLES = 2**26


def kinds_in(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the kind of each part of chat messages that is not text."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [str(part.get("type")) for part in parts if part.get("type") != "text"]


def text_after(token: int, placeholders: Collection[int], vocab_size: int) -> int:
    """Return the next token id that is not a placeholder of images or audio; the first one follows the last one."""
    ids = ((token + step) % vocab_size for step in range(1, vocab_size))
    return next(other for other in ids if other not in placeholders)


def image_sides(image_size: int | Sequence[int]) -> tuple[int, int]:
    """Return height and width in pixels.

    Args:
        image_size: Height and width, or one number for both.

    Raises:
        InputError: If it is not one or two integers from 1 to `MOST_SIDE`.
    """
    given = (image_size, image_size) if isinstance(image_size, int) else image_size
    sides = tuple(given) if isinstance(given, Sequence) else ()
    if len(sides) != 2 or any(type(side) is not int or not 1 <= side <= MOST_SIDE for side in sides):
        raise InputError(
            f"image_size must be height and width in pixels, each from 1 to {MOST_SIDE}, got {image_size!r}; pass "
            "others such as (448, 448) (--image-size 448x448), or smaller images"
        )
    return sides[0], sides[1]


def check_kinds(modalities: Sequence[str] | Mapping[str, Any]) -> None:
    """Check the names of inputs besides text.

    Raises:
        InputError: If one is unknown.
    """
    for kind in [modalities] if isinstance(modalities, str) else modalities:
        if isinstance(modalities, str) or kind not in KINDS:
            raise InputError(f"modalities must be a list of {', '.join(KINDS)}, got {kind!r}")
