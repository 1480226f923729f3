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


def check_tokenizer_config(folder: Path) -> None:
    """Refuse a tokenizer of a bundle whose config names files: transformers would read them, wherever they are.

    Raises:
        BundleError: If there is such a name, or the config cannot be read.
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
            f"{path} names a file of its own, {named[0]}: {named[1]!r:.100}, which would be read from there; do not "
            "trust this bundle, or remove the entry"
        )


def _named_files(value: Any, folder: Path, key: str = "", in_list: bool = False) -> Iterator[tuple[str, str]]:
    """Keys and values that are taken for files."""
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
