"""Patterns of a tokenizer tried on a text, in the process of `tokenizer_patterns.py`: it imports tokenizers alone."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

#: A tokenizer without tokens: what is left of encoding is to normalise the text and to cut it.
_EMPTY = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}


def handle(request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    """Normalise a text and cut it, as `request["parts"]` says, and give nothing back."""
    _made(json.dumps({**_EMPTY, **request["parts"]})).encode(data.decode())
    return {}, b""


@lru_cache(4)
def _made(text: str) -> Tokenizer:
    return Tokenizer.from_str(text)
