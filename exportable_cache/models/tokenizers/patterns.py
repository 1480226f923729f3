"""Regular expressions of tokenizers: some take time without end on some texts, and come with a stranger's model.

The library `tokenizers` ends a match after 10 million steps, but begins one at each character. So a text is first cut
in a subprocess, which is killed at a deadline, unless all patterns are of forms that cannot take long.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ...common.process.limited import LimitedProcess, WorkFailed
from ...errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .text import TextTokenizer

#: Seconds in which a text must be cut.
MOST_SECONDS = 10.0
_CUTTING = LimitedProcess("exportable_cache.models.tokenizers.pattern_child", 2 << 30, 1 << 16)
#: Alternatives with more than one quantifier in the patterns of GPT-4, Llama 3, Qwen 2 and others. What follows the
#: first quantifier is nothing that it takes, or need not follow.
_KNOWN = frozenset(
    (
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s*[\r\n]",
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    )
)
_ESCAPED = re.compile(r"\\[pP]\{\^?\w+\}|\\.|\[\^?\]?(?:[^\]\\]|\\.)*\]", re.DOTALL)
_REPEATED = re.compile(r"[*+{]")


def check_cost(tokenizer: PreTrainedTokenizerBase | TextTokenizer, text: str) -> None:
    """Check that a tokenizer's patterns can cut a text in time.

    Raises:
        InputError: If they take too long, or the library fails.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return
    try:
        parts = {
            name: json.loads(part.__getstate__())
            for name in ("normalizer", "pre_tokenizer")
            if (part := getattr(backend, name, None)) is not None
        }
    except Exception:  # a part in Python, which is the caller's own code and not a file's
        return
    if all(is_plain(pattern) for pattern in _patterns(parts)):
        return
    try:
        _CUTTING.call(MOST_SECONDS, {"parts": parts}, text.encode())
    except WorkFailed as error:
        raise InputError(
            f"the tokenizer cannot encode the prompt: {str(error)[:300]}; shorten it, or export the model with another"
        ) from error


@lru_cache(64)
def is_plain(pattern: str) -> bool:
    """Return True if each alternative of a pattern repeats one thing at most, or is known to be cut in time."""
    # What classes and escapes contain is neither a bar nor a quantifier. The length stays the same.
    masked = _ESCAPED.sub(lambda found: "x" * len(found[0]), pattern)
    start = depth = 0
    for index, character in enumerate(masked + "|"):
        depth += (character == "(") - (character == ")")
        if character == "|" and depth == 0:
            if not _is_plain_alternative(pattern[start:index], masked[start:index]):
                return False
            start = index + 1
    return depth == 0


def _is_plain_alternative(text: str, masked: str) -> bool:
    if text in _KNOWN:
        return True
    return len(_REPEATED.findall(masked)) <= 1 and masked.count("?") <= 4 and not re.search(r"\)[*+{]", masked)


def _patterns(part: Any) -> list[str]:
    if isinstance(part, dict):
        own = [part["Regex"]] if isinstance(part.get("Regex"), str) else []
        return own + [pattern for value in part.values() for pattern in _patterns(value)]
    return [pattern for value in part for pattern in _patterns(value)] if isinstance(part, list) else []
