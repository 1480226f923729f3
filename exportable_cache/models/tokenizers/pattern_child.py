"""Subprocess that splits a text with the patterns of a tokenizer, for `text.py`. It imports only `tokenizers`."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

#: A tokenizer without tokens, so that encoding only normalises and splits the text.
_EMPTY = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}


def handle(request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    """Normalise and split a text with `request["parts"]`; return an empty response."""
    _tokenizer(json.dumps({**_EMPTY, **request["parts"]})).encode(data.decode())
    return {}, b""


@lru_cache(4)
def _tokenizer(text: str) -> Tokenizer:
    return Tokenizer.from_str(text)
