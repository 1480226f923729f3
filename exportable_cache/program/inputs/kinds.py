"""Kinds of inputs besides text. Importing this module imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...errors import InputError

#: Kinds of inputs besides text.
KINDS = IMAGE, VIDEO, AUDIO = ("image", "video", "audio")


def kinds_in(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the kind of each part of chat messages that is not text."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [str(part.get("type")) for part in parts if part.get("type") != "text"]


def text_after(token: int, placeholders: Collection[int]) -> int:
    """Return the next larger token id that is not a placeholder of images or audio."""
    return next(other for other in itertools.count(token + 1) if other not in placeholders)


def check_kinds(modalities: Sequence[str] | Mapping[str, Any]) -> None:
    """Check the names of inputs besides text.

    Raises:
        InputError: If one is unknown.
    """
    for kind in [modalities] if isinstance(modalities, str) else modalities:
        if isinstance(modalities, str) or kind not in KINDS:
            raise InputError(f"modalities must be a list of {', '.join(KINDS)}, got {kind!r}")
