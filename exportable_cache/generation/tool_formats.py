"""Formats of tool calls and reasoning: a table of what families of checkpoints write, and the readers of their calls.

A format lists the texts at which a part other than content may begin, and patterns for the beginning of each part.
`tool_calls` parses responses by it, and forces calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import regex

#: JSON schemas of the arguments of tools, by their names.
Tools = Mapping[str, Mapping[str, Any]]
Call = tuple[str, str]
#: A function that reads the body of a call; None if it is not a valid call.
Reader = Callable[[str, str, Tools], "list[Call] | None"]


@dataclass(frozen=True)
class Head:
    """The beginning of a part.

    Attributes:
        pattern: Pattern of the beginning; group `name` is the name of a tool.
        kind: What follows. "json": an object of arguments. "value": one JSON value, for `read`. "body": text up to
            `tail`, for `read`. "reasoning": text up to one of `ends`. "content": content. "skip": nothing.
        where: Where it may begin: "o" at one of the format's `opens`, "s" at the start of the response or after
            reasoning, "a" directly after a call.
        tail: Pattern of what follows the arguments; for "body" it ends them.
        ends: Texts that end reasoning.
        keeps_end: True if the text that ends reasoning begins the next part.
        read: Function that reads a value or body.
    """

    pattern: regex.Pattern[str]
    kind: Literal["json", "value", "body", "reasoning", "content", "skip"]
    where: str = "o"
    tail: regex.Pattern[str] | None = None
    ends: tuple[str, ...] = ()
    keeps_end: bool = False
    read: Reader | None = None


@dataclass(frozen=True)
class Format:
    """A format of tool calls, which a family of checkpoints writes.

    Attributes:
        name: Name of the family.
        marks: Texts that its chat templates contain.
        opens: Texts at which a part may begin.
        heads: Beginnings of parts, the first match counts.
        tokens: Special tokens that the parser needs to see in the text.
        first: Text before the first call of a forced response.
        begin: Text before the arguments; `NAME` is replaced by the tool's name.
        end: Text after the arguments.
        between: Text between two calls; None if a response has one call.
        last: Text after the last call.
    """

    name: str
    marks: tuple[str, ...]
    opens: tuple[str, ...]
    heads: tuple[Head, ...]
    tokens: tuple[str, ...] = ()
    first: str = ""
    begin: str = ""
    end: str = ""
    between: str | None = ""
    last: str = ""


def compiled(text: str) -> regex.Pattern[str]:
    """Return a pattern in which a dot matches every character."""
    return regex.compile(text, regex.DOTALL)


_NAME = r'"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*'
_ARGUMENTS = r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
_TYPE = r'(?:"type"\s*:\s*"function"\s*,\s*)?'


def _read_json(name: str, text: str, tools: Tools) -> list[Call] | None:
    """Read an object with a name and arguments, or a list of such objects."""
    try:
        found = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    calls: list[Call] = []
    for one in found if isinstance(found, list) else [found]:
        inner = one.get("function") if isinstance(one, dict) else None
        one = inner if isinstance(inner, dict) else one
        if not isinstance(one, dict) or not isinstance(one.get("name"), str) or one["name"] not in tools:
            return None
        arguments: Any = next((one[key] for key in ("arguments", "parameters") if one.get(key) is not None), {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments, parse_constant=_refuse)
            except (ValueError, RecursionError):
                return None
        if not isinstance(arguments, dict):
            return None
        calls.append((one["name"], json.dumps(arguments, ensure_ascii=False)))
    return calls


_PARAMETER = compiled(r"\s*<parameter=(?P<key>[^>\n]+)>\n?")
_PARAMETER_END = compiled(r"\n?</parameter>\s*(?=<parameter=|\Z)")


def _read_xml(name: str, text: str, tools: Tools) -> list[Call] | None:
    """Read `<parameter=key>value</parameter>`; the schema says which values are JSON."""
    arguments: dict[str, Any] = {}
    done = 0
    # Two patterns, because one with the value between them would search to the end of the text for each key.
    while (found := _PARAMETER.match(text, done)) is not None:
        end = _PARAMETER_END.search(text, found.end())
        if end is None:
            return None
        value = text[found.end() : end.start()]
        arguments[found["key"]] = _typed(value, _property(tools[name], found["key"]))
        done = end.end()
    if text[done:].strip():
        return None
    return [(name, json.dumps(arguments, ensure_ascii=False))]


def _property(schema: Mapping[str, Any], key: str) -> Any:
    properties = schema.get("properties")
    return properties.get(key) if isinstance(properties, Mapping) else None


def _typed(text: str, schema: Any) -> Any:
    """Return a value that is written without quotes: text, unless the schema has another type that it fits."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    if "string" in ([kinds] if isinstance(kinds, str) else kinds or []):
        return text
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


def _refuse(name: str) -> Any:
    raise ValueError(name)


_BARE = compiled(r"[^,\]}]+")
_KEY = compiled(r"\s*(?P<key>[^:{}\s]+)\s*:")
_MOST_DEPTH = 64


class _Gemma:
    """Reader of Gemma's arguments, `{key:<|"|>text<|"|>,other:3}`, whose quotes are a token."""

    def __init__(self, text: str, quote: str) -> None:
        self._text, self._quote, self._index = text, quote, 0

    def whole(self, schema: Any) -> Any:
        value = self._value(schema, 0)
        self._space()
        if self._index != len(self._text):
            raise ValueError
        return value

    def _space(self) -> None:
        while self._index < len(self._text) and self._text[self._index].isspace():
            self._index += 1

    def _at(self, text: str) -> bool:
        self._space()
        if not self._text.startswith(text, self._index):
            return False
        self._index += len(text)
        return True

    def _value(self, schema: Any, depth: int) -> Any:
        if depth > _MOST_DEPTH:
            raise ValueError
        if self._at(self._quote):
            end = self._text.index(self._quote, self._index)
            text, self._index = self._text[self._index : end], end + len(self._quote)
            return text
        if self._at("{"):
            found: dict[str, Any] = {}
            while not self._at("}"):
                key = self._key(found)
                found[key] = self._value(_property(schema, key) if isinstance(schema, Mapping) else None, depth + 1)
            return found
        if self._at("["):
            items: list[Any] = []
            of_item = schema.get("items") if isinstance(schema, Mapping) else None
            while not self._at("]"):
                if items and not self._at(","):
                    raise ValueError
                items.append(self._value(of_item, depth + 1))
            return items
        bare = _BARE.match(self._text, self._index)
        if bare is None:
            raise ValueError
        self._index = bare.end()
        return _typed(bare[0].strip(), schema)

    def _key(self, found: Mapping[str, Any]) -> str:
        if found and not self._at(","):
            raise ValueError
        if self._at(self._quote):
            end = self._text.index(self._quote, self._index)
            key, self._index = self._text[self._index : end], end + len(self._quote)
            if not self._at(":"):
                raise ValueError
            return key
        match = _KEY.match(self._text, self._index)
        if match is None:
            raise ValueError
        self._index = match.end()
        return str(match["key"])


def _gemma_reader(quote: str) -> Reader:
    def read(name: str, text: str, tools: Tools) -> list[Call] | None:
        try:
            # A forced response has JSON here.
            arguments = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            try:
                arguments = _Gemma(text, quote).whole(tools[name])
            except ValueError:
                return None
        return [(name, json.dumps(arguments, ensure_ascii=False))] if isinstance(arguments, dict) else None

    return read


_HERMES = (
    Head(
        compiled(rf"<tool_call>\s*\{{\s*{_NAME}{_ARGUMENTS}"),
        "json",
        tail=compiled(r"\s*\}?\s*</tool_call>"),
    ),
    Head(
        compiled(r"<tool_call>\s*<function=(?P<name>[^>\n]+)>"),
        "body",
        tail=compiled(r"</function>\s*</tool_call>"),
        read=_read_xml,
    ),
    Head(compiled(r"<tool_call>\s*(?=[\[{])"), "value", tail=compiled(r"\s*</tool_call>"), read=_read_json),
)
_HERMES_FORM: dict[str, Any] = {
    "begin": '<tool_call>\n{"name": "NAME", "arguments": ',
    "end": "}\n</tool_call>",
    "between": "\n",
}

_HEADER = (
    r"(?:<\|start\|>assistant)?{to}\s*<\|channel\|>{channel}{to}(?:\s*<\|constrain\|>)?(?:\s*\w+)?\s*<\|message\|>"
)
_TO = r"(?:\s*to=functions\.(?P<name>[^\s<]+))?"
_HARMONY_ENDS = ("<|end|>", "<|start|>", "<|channel|>", "<|call|>", "<|return|>")


def _harmony(channel: str, to: str = "") -> str:
    return _HEADER.replace("{channel}", channel).replace("{to}", to)


_DEEPSEEK = (
    Head(
        compiled(
            r"(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<name>[^\n<]+)\n```json\n"
            r"|(?P<name>[^\n<]+)<｜tool▁sep｜>)\s*(?=\{)"
        ),
        "json",
        "oa",
        tail=compiled(r"\s*(?:```)?\s*<｜tool▁call▁end｜>"),
    ),
    Head(compiled(r"\s*<｜tool▁calls▁end｜>"), "skip", "a"),
)
_DEEPSEEK_TOKENS = tuple(f"<｜tool▁{part}｜>" for part in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end"))
_DEEPSEEK_COMMON: dict[str, Any] = {"opens": _DEEPSEEK_TOKENS[:2], "heads": _DEEPSEEK, "tokens": _DEEPSEEK_TOKENS}
_DEEPSEEK_FORM: dict[str, Any] = {"first": _DEEPSEEK_TOKENS[0], "last": _DEEPSEEK_TOKENS[4]}

_MISTRAL: dict[str, Any] = {
    "opens": ("[TOOL_CALLS]",),
    "heads": (
        Head(
            compiled(rf"(?:\[TOOL_CALLS\]\s*\[|\s*,)\s*\{{\s*{_NAME}{_ARGUMENTS}"),
            "json",
            "oa",
            tail=compiled(r'\s*(?:,\s*"id"\s*:\s*"[^"]*"\s*)?\}'),
        ),
        Head(compiled(r"\s*\]"), "skip", "a"),
        Head(compiled(r"\[TOOL_CALLS\]\s*(?=\[)"), "value", read=_read_json),
        Head(
            compiled(r"\[TOOL_CALLS\]\s*(?P<name>[^\s\[{]+)(?:\[CALL_ID\][^\s\[{]*)?(?:\[ARGS\])?\s*(?=\{)"),
            "json",
        ),
    ),
    "tokens": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
}


def _gemma(name: str, begin: str, end: str, quote: str) -> Format:
    head = Head(
        compiled(rf"{regex.escape(begin)}\s*call:(?P<name>[^{{\s]+)\s*(?=\{{)"),
        "body",
        tail=compiled(regex.escape(end)),
        read=_gemma_reader(quote),
    )
    form = {"begin": f"{begin}call:NAME", "end": end}
    return Format(name, (begin,), (begin,), (head,), (begin, end, quote), **form)


#: The formats. A chat template has the first one whose marks it contains.
FORMATS = (
    Format(
        "harmony",
        ("<|channel|>", "<|message|>"),
        _HARMONY_ENDS,
        (
            Head(compiled(_harmony("(?:commentary|analysis)", _TO) + r"\s*(?=\{)"), "json", "os"),
            Head(compiled(_harmony("analysis")), "reasoning", "os", ends=_HARMONY_ENDS, keeps_end=True),
            Head(compiled(_harmony("(?:commentary|final)")), "content", "os"),
            Head(compiled(r"<\|(?:end|call|return)\|>"), "skip"),
        ),
        (*_HARMONY_ENDS, "<|message|>", "<|constrain|>"),
        begin="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
        between=None,
    ),
    Format(
        "deepseek",
        ("<｜tool▁calls▁begin｜>", "function"),
        **_DEEPSEEK_COMMON,
        begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
        end="\n```<｜tool▁call▁end｜>",
        between="\n",
        **_DEEPSEEK_FORM,
    ),
    Format(
        "mistral-v11",
        ("[TOOL_CALLS]", "[ARGS]"),
        **_MISTRAL,
        begin="[TOOL_CALLS]NAME[ARGS]",
    ),
    Format(
        "mistral",
        ("[TOOL_CALLS]",),
        **_MISTRAL,
        first="[TOOL_CALLS] [",
        begin='{"name": "NAME", "arguments": ',
        end="}",
        between=", ",
        last="]",
    ),
    _gemma("gemma", "<|tool_call>", "<tool_call|>", '<|"|>'),
    _gemma("function-gemma", "<start_function_call>", "<end_function_call>", "<escape>"),
    Format("hermes", ("<tool_call>",), ("<tool_call>",), _HERMES, ("<tool_call>", "</tool_call>"), **_HERMES_FORM),
    Format(
        "llama",
        ("<|start_header_id|>", "parameters"),
        ("<|python_tag|>",),
        (
            Head(
                compiled(rf"\s*(?:<\|python_tag\|>)?\s*;?\s*\{{\s*{_TYPE}{_NAME}{_ARGUMENTS}"),
                "json",
                "osa",
                tail=compiled(r"\s*\}"),
            ),
            Head(compiled(r"\s*(?:<\|python_tag\|>)?\s*;?\s*(?=[\[{])"), "value", "osa", read=_read_json),
        ),
        ("<|python_tag|>",),
        begin='{"name": "NAME", "parameters": ',
        end="}",
        between="; ",
    ),
)
#: Format of checkpoints that write no calls.
NONE = Format("none", (), (), ())
#: Format of checkpoints whose template has tools and no known marks.
DEFAULT = next(one for one in FORMATS if one.name == "hermes")
#: Texts around reasoning, except those of harmony.
THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought", "<channel|>"))
