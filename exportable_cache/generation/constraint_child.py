"""Subprocess of `constraint.py` that runs llguidance; it imports nothing of this package.

A process handles one constraint at a time, and keeps its tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher, LLTokenizer

_READERS: dict[str, Callable[[str], str]] = {
    "json_schema": LLMatcher.grammar_from_json_schema,
    "regex": LLMatcher.grammar_from_regex,
    "lark": LLMatcher.grammar_from_lark,
}
#: What was sent and made so far: the tokenizer, and the matcher of the form.
_HELD: dict[str, Any] = {}


def handle(request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    """Do what `request["do"]` names: `tokenizer`, `compile` or `take`.

    Returns:
        Whether the form is complete, and otherwise which tokens may come next, a bit each.

    Raises:
        ValueError: If the form cannot be read, or takes too much to follow.
    """
    if request["do"] == "tokenizer":
        _HELD["tokens"] = LLTokenizer(data.decode(), n_vocab=request["vocab"], eos_token=request["ends"] or None)
        return {}, b""
    if request["do"] == "compile":
        # Silent: what is wrong is in the error.
        matcher = LLMatcher(_HELD["tokens"], _READERS[request["kind"]](data.decode()), log_level=0)
        _HELD["matcher"] = matcher
    else:
        matcher = _HELD["matcher"]
        matcher.consume_token(request["token"])
    # In one go, because a second call would take longer than the mask.
    ended = matcher.is_stopped()
    mask = b"" if ended else matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(" ".join(matcher.get_error().split()))
    return {"ended": ended}, mask
