"""Requests for `make fuzz`: valid ones that are changed at random, by a seed each."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

#: Values that a field was not made for, or only just.
_ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 5, -5, 0.5, 1.0, 1e308, -1e308, float("inf"), float("nan"), 2**31, 2**53 + 1, 2**63,
    -(2**63), -(2**63) - 1, 2**64, 10**400, "", " ", "x", "0", "-1", "nan", "1e5", "true", "\0", "\x1b[2J", "\ud800",
    "\u202e", "<end>", "[user]", "Grüße 世界 🙂", [], {}, [[]], [{}], [None], {"": None}, {"type": None}, [0], [-1],
    [2**70], [1, "x"], ["x"] * 50, {"a": {"a": {"a": 1}}},
)  # fmt: skip
_WORDS = (
    "amber",
    "the",
    "{{ x }}",
    "{% raw %}",
    "\n",
    "\t",
    "<end>",
    "🙂",
    "é",
    "a" * 60,
    "]",
    ">",
    '"',
    "\\",
    "\0",
    "\r\n",
)
_PATTERNS = (
    "[0-9]{4}", "(a|b)*c", "a{0,3}", "(a*)*b", "(?=a)b", "(a)\\1", "[", "(", "a{1000}", "(a{100}){100}", "\\d+\\.\\d*",
    "^$", "[^\\x00-\\x7f]{2}", "(((((a?)?)?)?)?)", "", "\ud800", "(?i)abc", ".{0,5000}", "[a-z]{1,3}|", "\\p{L}+",
    "a{3,2}", "*",
)  # fmt: skip
_NUMBERS = (
    0, 1, -1, 0.1, 0.5, 1e-300, 1e300, 7, 100, 255, 2**31, 2**53, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1,
    2**64, 10**40, float("inf"), float("nan"), 9007199254740993, 0.30000000000000004,
)  # fmt: skip
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null", "x", ["string", "null"], [])


@dataclass
class Sent:
    """What goes over one connection.

    Attributes:
        data: All bytes.
        leaves: Seconds after which the client goes without the answer; None if it waits.
        path: For the report.
    """

    data: bytes
    leaves: float | None = None
    path: str = ""


@dataclass
class _Made:
    """A request that is being made, before it is bytes."""

    path: str
    body: Any
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=lambda: {"Host": "localhost", "Content-Type": "application/json"})


def made(seed: int) -> Sent:
    """Return the request of a seed."""
    rng = random.Random(seed)
    request = _valid(rng)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        request.body = rng.choice(_CHANGES)(rng, request.body)
    body = _written(rng, request.body)
    if rng.random() < 0.1:
        body = _damaged(rng, body)
    return Sent(
        _over_http(rng, request, body), rng.choice((0.0, 0.02, 0.1)) if rng.random() < 0.05 else None, request.path
    )


# Valid requests


def _valid(rng: random.Random) -> _Made:
    kind = rng.random()
    if kind < 0.06:
        paths = (
            "/",
            "/health",
            "/v1/models",
            "/v1/models/m",
            "/v1/models/x%00",
            "/v1/cache",
            "/v1/embeddings",
            "/v1",
            "//",
            "/docs",
        )
        return _Made(rng.choice(paths), {}, rng.choice(("GET", "GET", "HEAD", "OPTIONS", "POST", "DELETE", "PUT", "X")))
    fields: dict[str, Any] = {"model": "m", "max_tokens": rng.randint(1, 6)}
    for name, value in _OPTIONS.items():
        if rng.random() < 0.12:
            fields[name] = value(rng)
    if kind < 0.35:
        prompt = rng.choice((_text(rng), [rng.randrange(257) for _ in range(rng.randint(1, 9))], [_text(rng)]))
        return _Made("/v1/completions", {**fields, "prompt": prompt})
    for name, value in _CHAT_OPTIONS.items():
        if rng.random() < 0.1:
            fields[name] = value(rng)
    if rng.random() < 0.3:
        fields["response_format"] = _form(rng)
    return _Made("/v1/chat/completions", {**fields, "messages": [_message(rng) for _ in range(rng.randint(1, 4))]})


def _text(rng: random.Random) -> str:
    return "".join(rng.choice(_WORDS) for _ in range(rng.randint(0, 6)))


def _message(rng: random.Random) -> dict[str, Any]:
    content: Any = _text(rng)
    if rng.random() < 0.2:
        content = [
            {"type": rng.choice(("text", "text", "image_url", "x")), "text": _text(rng)}
            for _ in range(rng.randint(0, 3))
        ]
    role = rng.choice(("user", "user", "assistant", "system", "tool", "x"))
    more = {name: rng.choice(_ODD) for name in ("name", "tool_calls", "refusal") if rng.random() < 0.05}
    return {"role": role, "content": content, **more}


def _form(rng: random.Random) -> dict[str, Any]:
    kind = rng.random()
    if kind < 0.1:
        return {"type": rng.choice(("text", "json_object"))}
    if kind < 0.25:
        return {"type": "regex", "value": rng.choice(_PATTERNS)}
    schema = _schema(rng, 3)
    if kind < 0.4:
        return {"type": "json_object", rng.choice(("schema", "value")): schema}
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def _schema(rng: random.Random, depth: int) -> Any:
    """Return a JSON schema that may be odd, contradictory or large."""
    if rng.random() < 0.05:
        return rng.choice((True, False, {}, None, 5))
    found: dict[str, Any] = {"type": rng.choice(_TYPES)} if rng.random() < 0.8 else {}
    for name in rng.sample(sorted(_KEYWORDS), rng.randint(0, 3)):
        found[name] = _KEYWORDS[name](rng)
    if depth:
        for name in rng.sample(sorted(_NESTED), rng.choice((0, 0, 1, 1, 2))):
            found[name] = _NESTED[name](rng, depth - 1)
    if rng.random() < 0.03:
        found["$defs"] = {"a": _schema(rng, 0) if rng.random() < 0.5 else {"$ref": "#/$defs/a"}}
        found["$ref"] = rng.choice(("#/$defs/a", "#", "#/nowhere", "http://localhost/x"))
    return found


def _many(rng: random.Random, depth: int) -> list[Any]:
    one = _schema(rng, depth)
    return (
        [one] * rng.choice((1, 2, 3, 9, 30))
        if rng.random() < 0.3
        else [_schema(rng, depth) for _ in range(rng.randint(0, 3))]
    )


_KEYWORDS: dict[str, Callable[[random.Random], Any]] = {
    **{
        name: lambda rng: rng.choice(_NUMBERS)
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    },
    **{
        name: lambda rng: rng.choice((0, 1, 3, 100, 10**4, 10**9, -1, 1.5, "x"))
        for name in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
    },
    "pattern": lambda rng: rng.choice(_PATTERNS),
    "format": lambda rng: rng.choice(("date-time", "email", "uuid", "ipv6", "x", 5)),
    "const": lambda rng: rng.choice((*_NUMBERS, *_ODD)),
    "enum": lambda rng: [rng.choice((*_NUMBERS, *_ODD)) for _ in range(rng.randint(0, 5))],
    "required": lambda rng: rng.choice((["a"], ["a", "b"], [], "a", [5], ["a"] * 9)),
    "uniqueItems": lambda rng: True,
}
_NESTED: dict[str, Callable[[random.Random, int], Any]] = {
    "properties": lambda rng, depth: {
        name: _schema(rng, depth) for name in rng.sample(("a", "b", "", "\ud800", "é"), 2)
    },
    "additionalProperties": lambda rng, depth: rng.choice((False, True, _schema(rng, depth))),
    "patternProperties": lambda rng, depth: {rng.choice(_PATTERNS): _schema(rng, depth)},
    "items": _schema,
    "prefixItems": _many,
    "anyOf": _many,
    "oneOf": _many,
    "allOf": _many,
    "not": _schema,
}
_OPTIONS: dict[str, Callable[[random.Random], Any]] = {
    "temperature": lambda rng: rng.choice((0, 0.7, 1, 2)),
    "top_p": lambda rng: rng.choice((0.1, 0.9, 1)),
    "top_k": lambda rng: rng.choice((1, 5, 0, -1)),
    "min_p": lambda rng: rng.choice((0, 0.1)),
    "repetition_penalty": lambda rng: rng.choice((0.5, 1, 1.3, 1e30, 1e-30)),
    "seed": lambda rng: rng.choice((0, 1, 2**63)),
    "stop": lambda rng: rng.choice(("a", ["a", "b"], "<end>", ["x" * 50] * 4)),
    "stream": lambda rng: rng.choice((True, False)),
    "stream_options": lambda rng: {"include_usage": True},
    "n": lambda rng: 1,
    "logit_bias": lambda rng: {},
    "user": lambda rng: "u",
}
_CHAT_OPTIONS: dict[str, Callable[[random.Random], Any]] = {
    "logprobs": lambda rng: True,
    "top_logprobs": lambda rng: rng.choice((0, 3, 20)),
    "max_completion_tokens": lambda rng: rng.randint(1, 9),
    "tools": lambda rng: [],
    "tool_choice": lambda rng: rng.choice(("none", "auto")),
    "modalities": lambda rng: ["text"],
    "prediction": lambda rng: {"type": "content", "content": "x"},
}


# Changes of a document


def _places(document: Any) -> list[tuple[Any, Any]]:
    """Return every container of a document with every key of it."""
    found, waiting = [], [document]
    while waiting and len(found) < 5000:
        one = waiting.pop()
        keys = list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        for key in keys:
            found.append((one, key))
            waiting.append(one[key])
    return found


def _at_a_place(change: Callable[[random.Random, Any, Any], None]) -> Callable[[random.Random, Any], Any]:
    def changed(rng: random.Random, document: Any) -> Any:
        # A copy: parts of some documents are one object.
        try:
            document = json.loads(json.dumps(document))
        except (RecursionError, ValueError):  # too deep, or a number of too many digits: odd enough
            return document
        places = _places(document)
        if places:
            change(rng, *rng.choice(places))
        return document

    return changed


def _replace(rng: random.Random, owner: Any, key: Any) -> None:
    owner[key] = rng.choice(_ODD)


def _drop(rng: random.Random, owner: Any, key: Any) -> None:
    del owner[key]


def _rename(rng: random.Random, owner: Any, key: Any) -> None:
    if isinstance(owner, dict):
        owner[rng.choice((key[:-1], key + "s", key.upper(), "\ud800" + key, "x" * 10_000))] = owner.pop(key)


def _wrap(rng: random.Random, owner: Any, key: Any) -> None:
    owner[key] = rng.choice(([owner[key]], {"value": owner[key]}, {"type": owner[key]}))


def _deepen(rng: random.Random, owner: Any, key: Any) -> None:
    for _ in range(rng.choice((5, 100, 300, 900))):
        owner[key] = [owner[key]] if rng.random() < 0.5 else {"a": owner[key]}


def _lengthen(rng: random.Random, owner: Any, key: Any) -> None:
    count = rng.choice((10, 1000, 100_000))
    value = owner[key]
    if isinstance(value, str):
        owner[key] = (value or "a")[:20] * count
    elif isinstance(value, list):
        owner[key] = (value or [0])[:1] * min(count, 20_000)
    elif isinstance(value, dict):
        owner[key] = {**value, **{f"k{index}": 1 for index in range(min(count, 20_000))}}
    else:
        owner[key] = "x" * count


_CHANGES = [
    *map(_at_a_place, (_replace, _replace, _replace, _replace, _drop, _rename, _wrap, _deepen, _lengthen)),
    lambda rng, document: rng.choice(_ODD),
]


# Bytes


def _written(rng: random.Random, document: Any) -> bytes:
    try:
        text = json.dumps(document, ensure_ascii=rng.random() < 0.7)
    except (RecursionError, ValueError):
        text = "[" * 100_000
    if rng.random() < 0.02:
        text = text.replace("{", "{" + " " * rng.choice((100, 100_000)), 1)
    if rng.random() < 0.02:
        text = text[:-1] + ', "model": "m"}'
    return text.encode(rng.choice(("utf-8",) * 20 + ("utf-16", "utf-8-sig")), "surrogatepass")


def _damaged(rng: random.Random, body: bytes) -> bytes:
    data = bytearray(body)
    for _ in range(rng.choice((1, 1, 4, 30))):
        at = rng.randrange(len(data) + 1)
        how = rng.random()
        if how < 0.4 and at < len(data):
            data[at] = rng.randrange(256)
        elif how < 0.7:
            del data[at : at + rng.randint(1, 20)]
        else:
            data[at:at] = rng.choice(
                (b"\0", b"{", b"]", b'"', b"\xff\xfe", b"9" * 5000, b"1e999", b"-", b"\\u0000", b"[" * 2000)
            )
    return bytes(data)


def _over_http(rng: random.Random, request: _Made, body: bytes) -> bytes:
    headers, version, ending = dict(request.headers), "HTTP/1.1", b""
    headers["Connection"] = "close"
    if rng.random() < 0.06:
        headers["Content-Type"] = rng.choice(
            ("text/plain", "", "application/json; charset=x", "multipart/form-data", "a/b+json")
        )
    if rng.random() < 0.04:
        headers["Host"] = rng.choice(
            ("evil.example", "", "127.0.0.1:99999", "[::1", "x" * 5000, "localhost, x", "\xe9")
        )
    if rng.random() < 0.04:
        headers["Origin"] = rng.choice(("http://evil.example", "null", "http://localhost", "http://[", "x", ""))
    if rng.random() < 0.03:
        headers["Authorization"] = rng.choice(("Bearer x", "\xff", "Basic"))
    length = len(body)
    if rng.random() < 0.02:
        length = rng.choice((0, 1, length + 5, 10**9, 10**30))
    if rng.random() < 0.04:
        headers["Transfer-Encoding"] = rng.choice(("chunked", "chunked", "gzip", "chunked, chunked"))
        size = rng.choice((f"{len(body):x}", "ffffffffffffffff", "-1", "x"))
        body, ending = size.encode() + b"\r\n" + body + b"\r\n", b"0\r\n\r\n"
    else:
        headers["Content-Length"] = str(length)
    if rng.random() < 0.02:
        version = rng.choice(("HTTP/1.0", "HTTP/2.0", "HTTP/9", ""))
    lines = [f"{request.method} {request.path} {version}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body + ending
