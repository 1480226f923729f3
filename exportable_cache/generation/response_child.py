"""Subprocess of `templates.py` that parses responses with transformers; it imports nothing of this package."""

from __future__ import annotations

import json
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

#: Parsers of responses, by the name that the caller chose; the oldest ones belong to clients that left.
_PARSERS: dict[str, ResponseParser] = {}
_MOST_PARSERS = 256


def handle(request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    """Do what `request["do"]` names: `begin`, `feed` or `finish`.

    Args:
        request: `name` of the parser; to begin, its `template` and `tools`.
        data: The prompt to begin, text to feed.

    Returns:
        The parser's events, as JSON.
    """
    name, text = request["name"], data.decode("utf-8", "surrogatepass")
    events: list[dict[str, Any]] = []
    if request["do"] == "begin":
        while len(_PARSERS) >= _MOST_PARSERS:
            del _PARSERS[next(iter(_PARSERS))]
        _PARSERS[name] = ResponseParser(request["template"], prefix=text, tools=request["tools"] or None)
    elif request["do"] == "feed":
        events = _PARSERS[name].feed(text)
    elif request["do"] == "finish":
        events = _PARSERS.pop(name).finalize()[1]
    return {}, json.dumps(events).encode()
