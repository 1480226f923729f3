"""Tool calls and reasoning in generated text, in the formats of all families, and forms of calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from exportable_cache.generation import tool_calls
from exportable_cache.generation.constraint import Constraint
from exportable_cache.generation.tool_calls import FORMATS, Dialect, ResponseParser
from tests.cli.scripted import byte_level_tokenizer

FORMAT = {one.name: one for one in FORMATS}
TOOLS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "add": {"type": "object", "properties": {"a": {"type": "number"}, "note": {"type": ["string", "null"]}}},
}
THINK = ("<think>", "</think>")
THOUGHTS = (THINK, ("[THINK]", "[/THINK]"), ("<|channel>thought", "<channel|>"))
WEATHER = ("weather", {"city": 'Par}is "x"', "days": 3})
TEXT = '{"city": "Par}is \\"x\\"", "days": 3}'
ADD = ("add", {"a": 1})
#: Name of a format, a response, and its content, reasoning and calls.
RESPONSES: list[tuple[str, str, str, str, list[tuple[str, Any]]]] = [
    (
        "hermes",
        f'Sure.\n<tool_call>\n{{"name": "weather", "arguments": {TEXT}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        "Sure.",
        "",
        [WEATHER, ADD],
    ),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call> done', "done", "", [ADD]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}', "", "", [ADD]),
    (
        "hermes",
        "<tool_call>\n<function=weather>\n<parameter=city>\n12 </p\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        "",
        "",
        [("weather", {"city": "12 </p", "days": 3})],
    ),
    (
        "hermes",
        "<tool_call><function=add><parameter=a>1</parameter><parameter=note>12</parameter></function></tool_call>",
        "",
        "",
        [("add", {"a": 1, "note": "12"})],
    ),
    (
        "hermes",
        '<think>\nhm\n\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        "",
        "hm",
        [ADD],
    ),
    (
        "hermes",
        'A <tool_call> is text, <tool_call>{"name": "x", "arguments": {}}</tool_call> <tool_call>[1]</tool_call> <too',
        'A <tool_call> is text, <tool_call>{"name": "x", "arguments": {}}</tool_call> <tool_call>[1]</tool_call> <too',
        "",
        [],
    ),
    ("hermes", "I <think> not.</think>", "I <think> not.</think>", "", []),
    (
        "llama",
        f'{{"name": "weather", "parameters": {TEXT}}}; {{"name": "add", "parameters": {{"a": 1}}}}',
        "",
        "",
        [WEATHER, ADD],
    ),
    ("llama", '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1}}', "", "", [ADD]),
    (
        "llama",
        '{"city": "P"} or {"name": "add", "parameters": {"a": 1}}',
        '{"city": "P"} or {"name": "add", "parameters": {"a": 1}}',
        "",
        [],
    ),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {TEXT}, "id": "abcdefghi"}}, '
        '{"name": "add", "arguments": {"a": 1}}]',
        "",
        "",
        [WEATHER, ADD],
    ),
    ("mistral", '[TOOL_CALLS] [{"arguments": {"a": 1}, "name": "add"}]', "", "", [ADD]),
    (
        "mistral-v11",
        f'Hi [TOOL_CALLS]weather[ARGS]{TEXT}[TOOL_CALLS]add[CALL_ID]abc[ARGS]{{"a": 1}}',
        "Hi",
        "",
        [WEATHER, ADD],
    ),
    ("mistral-v11", '[THINK]hm[/THINK]ok [TOOL_CALLS]x[ARGS]{"a": 1}', 'ok [TOOL_CALLS]x[ARGS]{"a": 1}', "hm", []),
    (
        "gemma",
        '<|tool_call>call:weather{city:<|"|>Par}is "x"<|"|>,days:3}<tool_call|><|tool_call>call:add{a:1}<tool_call|>',
        "",
        "",
        [WEATHER, ADD],
    ),
    (
        "gemma",
        "<|channel>thought\nhm<channel|>x <|tool_call>call:add{a:<tool_call|> y",
        "x <|tool_call>call:add{a:<tool_call|> y",
        "hm",
        [],
    ),
    (
        "gemma",
        '<|tool_call>call:add{a:[1.5,{b:true,<|"|>c d<|"|>:null}]}<tool_call|>',
        "",
        "",
        [("add", {"a": [1.5, {"b": True, "c d": None}]})],
    ),
    (
        "function-gemma",
        "<start_function_call>call:weather{city:<escape>Paris<escape>}<end_function_call>",
        "",
        "",
        [("weather", {"city": "Paris"})],
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        f"<|constrain|>json<|message|>{TEXT}<|call|>",
        "",
        "hm",
        [WEATHER],
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hello <b> there",
        "Hello <b> there",
        "hm",
        [],
    ),
    ("harmony", ' to=functions.add<|channel|>commentary json<|message|>{"a":1}', "", "", [ADD]),
    (
        "harmony",
        '<|channel|>commentary to=functions.x <|constrain|>json<|message|>{"a":1}',
        '<|channel|>commentary to=functions.x <|constrain|>json<|message|>{"a":1}',
        "",
        [],
    ),
    (
        "deepseek",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{TEXT}\n```<｜tool▁call▁end｜>\n"
        '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "",
        "",
        [WEATHER, ADD],
    ),
    ("deepseek", "x<｜tool▁calls▁begin｜> nothing", "x<｜tool▁calls▁begin｜> nothing", "", []),
]
IDS = [f"{name}-{index}" for index, (name, *_) in enumerate(RESPONSES)]


def parsed(name: str, pieces: list[str], thought: tuple[str, str] | None = None) -> tuple[str, str, list[list[str]]]:
    """Return content, reasoning and calls of a response that comes in pieces."""
    parser = ResponseParser(Dialect(FORMAT[name], THOUGHTS), TOOLS, thought)
    texts, calls = {"content": "", "reasoning": ""}, list[list[str]]()
    for part in [part for piece in pieces for part in parser.feed(piece)] + parser.finish():
        if part.kind == "name":
            calls.append([part.text, ""])
        elif part.kind == "arguments":
            calls[part.call][1] += part.text
        else:
            texts[part.kind] += part.text
    return texts["content"], texts["reasoning"], calls


@pytest.mark.parametrize(("name", "text", "content", "reasoning", "calls"), RESPONSES, ids=IDS)
def test_parts_of_a_response(name: str, text: str, content: str, reasoning: str, calls: list[tuple[str, Any]]) -> None:
    found = parsed(name, [text])
    assert found[:2] == (content, reasoning)
    assert [(called, json.loads(arguments)) for called, arguments in found[2]] == calls


@pytest.mark.parametrize(("name", "text", "content", "reasoning", "calls"), RESPONSES, ids=IDS)
def test_pieces_and_cuts_change_nothing(
    name: str, text: str, content: str, reasoning: str, calls: list[tuple[str, Any]]
) -> None:
    whole = parsed(name, [text])
    for end in range(len(text)):
        assert parsed(name, [text[:end], text[end:]]) == whole
        cut = parsed(name, [text[:end]])
        assert parsed(name, list(text[:end])) == cut
        # A call that is passed on stays one, and its arguments grow.
        assert [one[0] for one in cut[2]] == [one[0] for one in whole[2][: len(cut[2])]]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama", " " * 4000),
        ("mistral", "[TOOL_CALLS] [" * 300),
        ("hermes", "<tool_call>{" * 300),
        ("hermes", "<tool_call><function=weather>" + "<parameter=a>" * 300 + "</function></tool_call>"),
    ],
)
def test_a_response_of_beginnings_is_text_and_read_a_few_times(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server parses in its event loop, so work must not grow with the square of the length."""
    read = []
    find = tool_calls._JsonEnd.find
    monkeypatch.setattr(tool_calls._JsonEnd, "find", lambda self, text: read.append(len(text)) or find(self, text))
    parser = ResponseParser(Dialect(FORMAT[name], THOUGHTS), TOOLS)
    parts = []
    for index in range(0, len(text), 4):
        parts += parser.feed(text[index : index + 4])
        if name == "llama":
            assert len(parser._text) <= tool_calls._LONGEST_HEAD
    parts += parser.finish()
    assert "".join(part.text for part in parts) == text and {part.kind for part in parts} == {"content"}
    assert sum(read) <= (tool_calls._MOST_FAILURES + 1) * len(text)


def test_a_response_that_begins_within_reasoning() -> None:
    assert parsed("hermes", ["hm\n", "</th", "ink>\n\nok"], THINK) == ("ok", "hm", [])
    assert parsed("hermes", ["hm\n"], THINK) == ("", "hm", [])


def test_the_dialect_is_that_of_the_template() -> None:
    for one in FORMATS:
        tokenizer = type("", (), {"chat_template": f"{{{{ tools }}}} {' '.join(one.marks)} <think>"})()
        dialect = Dialect.of(tokenizer)
        assert dialect.format is one and dialect.takes_tools and THINK in dialect.thoughts
    assert Dialect.of(type("", (), {"chat_template": "{{ messages }}"})()).is_plain


HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "P"}}\n</tool_call>'
LLAMA = '{"name": "weather", "parameters": {"city": "P"}}'
DEEPSEEK = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "P"}\n```'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
HARMONY = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "P"}'
OBJECT = Constraint("json_schema", '{"type": "object", "required": ["x"]}')


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize(
    ("name", "text", "options", "is_allowed"),
    [
        ("hermes", HERMES, {"required": True}, True),
        ("hermes", HERMES.replace("city", "town"), {"required": True}, False),
        ("hermes", f"{HERMES}\n{HERMES}", {"required": True}, True),
        ("hermes", f"{HERMES}\n{HERMES}", {"required": True, "parallel": False}, False),
        ("hermes", "hello", {"required": True}, False),
        ("hermes", "hello", {"required": False}, True),
        ("hermes", f"hello {HERMES}", {"required": False}, True),
        ("hermes", f"hello {HERMES}".replace("city", "town"), {"required": False}, False),
        ("hermes", '{"x":1}', {"required": False, "content": OBJECT}, True),
        ("hermes", HERMES, {"required": False, "content": OBJECT}, True),
        ("hermes", "a/b", {"required": False, "content": Constraint("regex", r"a\/b")}, True),
        ("hermes", "a/b", {"required": False, "content": Constraint("regex", "a/b")}, True),
        ("hermes", HERMES, {"required": False, "content": Constraint("regex", "")}, True),
        ("hermes", f"<think>hm</think>\n\n{HERMES}", {"required": True}, True),
        ("hermes", f"hm</think>\n\n{HERMES}", {"required": True, "thought": THINK}, True),
        ("hermes", HERMES, {"required": True, "thought": THINK}, False),
        ("llama", f"{LLAMA}; {LLAMA}", {"required": False}, True),
        ("llama", LLAMA.replace("city", "town"), {"required": False}, False),
        ("llama", "hello", {"required": False}, True),
        ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "P"}}]', {"required": True}, True),
        ("mistral", 'hi[TOOL_CALLS] [{"name": "weather", "arguments": {"town": "P"}}]', {"required": False}, False),
        ("mistral-v11", 'hi[TOOL_CALLS]weather[ARGS]{"city": "P"}', {"required": False}, True),
        ("gemma", '<|tool_call>call:weather{"city": "P"}<tool_call|>', {"required": True}, True),
        ("harmony", f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{HARMONY}", {"required": True}, True),
        ("harmony", "<|channel|>final<|message|>hi", {"required": False}, True),
        ("harmony", "<|channel|>final<|message|>hi", {"required": True}, False),
        ("harmony", HARMONY.replace("city", "town"), {"required": False}, False),
        ("deepseek", f"hi{DEEPSEEK}", {"required": False}, True),
        ("deepseek", DEEPSEEK.replace("city", "town"), {"required": True}, False),
    ],
)
def test_forms_of_calls(name: str, text: str, options: dict[str, Any], is_allowed: bool, has_tokens: bool) -> None:
    llguidance = pytest.importorskip("llguidance", reason="the serve extra is not installed")
    tokens = FORMAT[name].tokens if has_tokens else ()
    tokenizer = byte_level_tokenizer(tokens)
    special = {token: tokenizer.token_to_id(token) for token in tokens}
    form = Dialect(FORMAT[name], (THINK,) if name == "hermes" else (), True, special).form(TOOLS, **options)
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("<eos>")),
        llguidance.LLMatcher.grammar_from_lark(form.text),
        log_level=0,
    )
    assert not matcher.is_error(), matcher.get_error()
    found = all(matcher.consume_token(token) for token in tokenizer.encode(text, add_special_tokens=False).ids)
    assert (found and matcher.is_accepting()) == is_allowed
    if is_allowed and "city" in text:
        assert parsed(name, [text], options.get("thought"))[2][0] == ["weather", '{"city": "P"}']
