"""A JSON schema that llguidance follows, by the C interface's masks of allowed tokens; in a process of its own.

Its arguments are the library, a bundle and what is asked, as JSON. What came of each call is written as JSON.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from ctypes import POINTER, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import llguidance

from exportable_cache_runner.library import AllowTokens
from exportable_cache_runner.library import OptionsStruct as Options

from .c_api_calls import Library

#: Takes the tokens so far and the mask, and says what the callback returns.
Allow = Callable[[list[int], Any], int]


class Schema:
    """One answer's way through a JSON schema."""

    def __init__(self, tokenizer: str, asked: dict[str, Any]) -> None:
        known = llguidance.LLTokenizer(tokenizer, n_vocab=asked["vocabulary"], eos_token=asked["end_token"])
        self._matcher = llguidance.LLMatcher(known, llguidance.LLMatcher.grammar_from_json_schema(asked["schema"]))
        self._taken = 0

    def __call__(self, tokens: list[int], mask: Any) -> int:
        assert self._matcher.consume_tokens(tokens[self._taken :]), self._matcher.get_error()
        self._taken = len(tokens)
        if self._matcher.is_stopped():
            return 0
        bits = self._matcher.compute_bitmask()
        assert len(bits) == ctypes.sizeof(mask)
        ctypes.memmove(mask, bits, len(bits))
        return 1


def bound(library: Library, session: c_void_p, prompt: list[int], allow: Allow, **fields: Any) -> dict[str, Any]:
    """Generate, with each call of `allow` counted."""
    calls = []

    def allowed(tokens: Any, count: int, mask: Any, words: int, user: int | None) -> int:
        calls.append(tokens[:count])
        whole = ctypes.cast(mask, POINTER(c_uint32 * words)).contents
        assert not any(whole)
        return allow(tokens[:count], whole)

    options = library.options(Options, allowed_tokens=AllowTokens(allowed), **fields)
    found = library.generate(session, prompt, options)
    assert calls == [found["tokens"][:count] for count in range(len(calls))]
    held = library.length(session)[0]
    return {**found, "calls": len(calls), "held": held}


def after(count: int, then: Allow) -> Allow:
    """Everything may come `count` times, then what `then` says."""

    def allow(tokens: list[int], mask: Any) -> int:
        if len(tokens) == count:
            return then(tokens, mask)
        mask[:] = [0xFFFFFFFF] * len(mask)
        return 1

    return allow


def calls(library: Library, bundle: str, asked: dict[str, Any]) -> dict[str, Any]:
    session, opened = library.open(bundle)
    prompt = asked["prompt"]
    tokenizer = Path(bundle, "tokenizer", "tokenizer.json").read_text()
    found: dict[str, Any] = {"open": opened, "answers": []}
    for seed in range(4):
        library.c.ec_reset(session)
        drawn = {"temperature": 1.5, "seed": seed, "has_seed": 1}
        found["answers"].append(bound(library, session, prompt, Schema(tokenizer, asked), **drawn))
    # What is refused before anything was fed changes nothing; what fails later leaves what was given out.
    library.c.ec_reset(session)
    found["nothing at once"] = bound(library, session, prompt, lambda tokens, mask: 1)
    found["failed at once"] = bound(library, session, prompt, lambda tokens, mask: -7)

    def beyond(tokens: list[int], mask: Any) -> int:
        mask[len(mask) - 1] = 0xFFFFFFFF << asked["vocabulary"] % 32 & 0xFFFFFFFF
        return 1

    for name, then in {"nothing later": beyond, "failed later": lambda tokens, mask: -7, "whole": lambda *_: 0}.items():
        library.c.ec_reset(session)
        found[name] = bound(library, session, prompt, after(3, then))
        # As after any end: the newest token was not fed.
        found[f"after {name}"] = library.prefill(session, found[name]["tokens"][-1:])
    library.c.ec_reset(session)
    found["free"] = library.generate(session, prompt, library.options(max_new_tokens=4))
    library.c.ec_reset(session)
    found["next"] = library.prefill(session, [*prompt, *found["free"]["tokens"][:3]])
    # Every token but the likeliest.
    likeliest = found["free"]["tokens"][0]

    def others(tokens: list[int], mask: Any) -> int:
        mask[:] = [0xFFFFFFFF] * len(mask)
        mask[likeliest // 32] &= ~(1 << likeliest % 32)
        return 1

    library.c.ec_reset(session)
    found["others"] = bound(library, session, prompt, others, max_new_tokens=1)
    library.c.ec_close(session)
    return found


if __name__ == "__main__":
    path, bundle, asked = sys.argv[1:]
    print(json.dumps(calls(Library(path), bundle, json.loads(asked))))
