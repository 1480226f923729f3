"""Checks of tokenizers from bundles: their regular expressions, and the files that their config names.

Some regular expressions take unbounded time on some texts. The library `tokenizers` stops a match after 10 million
steps, but starts a match at each character. So a text is first split in a subprocess that is killed at a deadline,
unless every pattern has a form that is known to be fast.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.process.limited import LimitedProcess, WorkFailed
from ...errors import BundleError, InputError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .text import TextTokenizer


#: Limit in seconds for splitting a text.
MOST_SECONDS = 10.0
_SPLITTER = LimitedProcess("exportable_cache.models.tokenizers.pattern_child", 2 << 30, 1 << 16)
#: Alternatives with more than one quantifier in the patterns of GPT-4, Llama 3, Qwen 2 and others. They are fast
#: because the characters after the first quantifier are optional, or ones that it does not match.
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
    """Check that a tokenizer's patterns can split a text in time.

    Raises:
        InputError: If splitting takes too long, or the library fails.
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
    except Exception:  # a part in Python is the caller's code, and does not come from a file
        return
    if all(is_plain(pattern) for pattern in _patterns(parts)):
        return
    try:
        _SPLITTER.call(MOST_SECONDS, {"parts": parts}, text.encode())
    except WorkFailed as error:
        raise InputError(
            f"the tokenizer cannot encode the prompt: {str(error)[:300]}; shorten it, or export the model with another "
            "tokenizer"
        ) from error


@lru_cache(64)
def is_plain(pattern: str) -> bool:
    """Return True if each alternative of a pattern has at most one quantifier, or is known to be fast."""
    # Masks classes and escapes with text of equal length, because their characters have no special meaning.
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
        patterns = [part["Regex"]] if isinstance(part.get("Regex"), str) else []
        return patterns + [pattern for value in part.values() for pattern in _patterns(value)]
    return [pattern for value in part for pattern in _patterns(value)] if isinstance(part, list) else []


def check_tokenizer_config(folder: Path) -> None:
    """Check that the tokenizer config of a bundle names no files, because transformers would read them from anywhere.

    Raises:
        BundleError: If it names a file, or cannot be read.
    """
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return
    try:
        named = next(_named_files(json.loads(path.read_bytes()), folder), None)
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise BundleError(f"cannot read {path}: {first_line(error)[:200]}; export the model again") from error
    if named is not None:
        raise BundleError(
            f"{path} must not name files, got {named[0]} = {named[1]!r:.100}; do not trust this bundle, or remove the "
            "entry"
        )


def _named_files(value: Any, folder: Path, key: str = "", in_list: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the keys and values that transformers would open as files."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _named_files(item, folder, name)
    elif isinstance(value, list):
        for item in value:
            yield from _named_files(item, folder, key, in_list=True)
    elif isinstance(value, str) and key in ("vocab", "merges") and not in_list:
        yield key, value
    elif isinstance(value, str) and key.endswith(("_file", "_path")) and key != "name_or_path":
        path = Path(value)
        if path.is_absolute() or ".." in path.parts or (os.path.exists(value) and not (folder / value).is_file()):
            yield key, value
