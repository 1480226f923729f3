"""Tools and reasoning in `exportable-cache serve`, over scripted texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the serve extra is not installed")
pytest.importorskip("openai", reason="the test extra is not installed")

import openai

from ..support.waiting import wait_until
from .scripted import DEEPSEEK, HARMONY, HERMES, THINKING, Scripted, scripted_tokenizer
from .serving import begun_and_left, client_of, health, post, queued, served

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "the weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ASKED: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
HARMONY_TOKENS = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>")

Serve = Callable[..., tuple[Any, Scripted]]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start a server with a template and a scripted text, and return a client and the completer."""
    with ExitStack() as stack:

        def start(
            template: str, text: str, special: tuple[str, ...] = (), response: Any = None
        ) -> tuple[Any, Scripted]:
            completer = Scripted(scripted_tokenizer(tmp_path, template, special, response), lambda prompt: text)
            address = stack.enter_context(served(completer))
            return client_of(address), completer

        yield start


def joined(chunks: Any) -> tuple[str, str, list[dict[str, str]], str]:
    """Return content, reasoning, calls and finish reason of a stream."""
    content, reasoning, calls, reason = "", "", list[dict[str, str]](), ""
    for chunk in chunks:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or ():
            if call.id:
                assert call.index == len(calls)
                calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
            calls[call.index]["arguments"] += call.function.arguments
    return content, reasoning, calls, reason


def test_a_tool_is_called_and_its_result_is_told(serve: Serve) -> None:
    client, completer = serve(HERMES, f"Sure.\n{CALL}\n{CALL}")
    (choice,) = client.chat.completions.create(**ASKED, tools=[TOOL]).choices
    message = choice.message
    assert choice.finish_reason == "tool_calls" and message.content == "Sure."
    assert [call.function.arguments for call in message.tool_calls] == ['{"city": "Paris"}'] * 2
    assert len({call.id for call in message.tool_calls}) == 2
    assert "[tools " in completer.prompts[0] and "the weather" in completer.prompts[0]
    content, _, calls, reason = joined(client.chat.completions.create(**ASKED, tools=[TOOL], stream=True))
    assert (content, reason, [call["name"] for call in calls]) == ("Sure.", "tool_calls", ["weather"] * 2)
    assert json.loads(calls[1]["arguments"]) == {"city": "Paris"}
    results = [{"role": "tool", "tool_call_id": call.id, "content": "20 C"} for call in message.tool_calls]
    client.chat.completions.create(model="demo", messages=[*ASKED["messages"], message, *results], tools=[TOOL])
    assert completer.prompts[-1].endswith(f"[tool]20 C({message.tool_calls[1].id}, weather)>")
    assert f"[assistant]Sure.{CALL}{CALL}" in completer.prompts[-1]


@pytest.mark.parametrize(("on_full", "kept"), [("drop-turns", "bc"), ("restart", "c")])
def test_whole_turns_are_dropped_from_a_full_cache(serve: Serve, on_full: str, kept: str) -> None:
    """A turn has its calls and results with it, and the system prompt stays. The cache has 20,000 bytes."""
    client, completer = serve(HERMES, "ok")
    completer.use(on_full)
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages: list[Any] = [{"role": "system", "content": "s"}]
    for text in "ab":
        messages += [{"role": "user", "content": text * 4000}, {"role": "assistant", "tool_calls": [call]}]
        messages += [{"role": "tool", "tool_call_id": "1", "content": f"result of {text}"}]
        messages += [{"role": "assistant", "content": text * 4000}]
    messages += [{"role": "user", "content": "c" * 4000}]
    asked = {"model": "demo", "messages": messages, "tools": [TOOL], "max_completion_tokens": 10}
    details = client.chat.completions.create(**asked).usage.prompt_tokens_details
    assert details.dropped_turns == 3 - len(kept)
    (prompt,) = completer.prompts
    assert "[system]s" in prompt and "[tools " in prompt
    assert [text in prompt for text in ("a" * 99, "result of a", "b" * 99, "result of b", "c" * 4000)] == [
        False,
        False,
        *["b" in kept] * 2,
        True,
    ]
    short = client.chat.completions.create(**ASKED).usage.prompt_tokens_details
    assert not hasattr(short, "dropped_turns")


def test_tokens_of_the_reasoning_are_counted(serve: Serve) -> None:
    """Each character is a token, and the mark at the end counts too."""
    client, _ = serve(THINKING, "hm</think>Sure.")
    usage = client.chat.completions.create(**ASKED).usage
    assert usage.completion_tokens_details.reasoning_tokens == len("hm</think>")
    assert usage.completion_tokens == len("hm</think>Sure.") + 1
    *_, last = client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True})
    assert last.usage.completion_tokens_details.reasoning_tokens == len("hm</think>")
    response = client.responses.create(model="demo", input="hi")
    assert response.usage.output_tokens_details.reasoning_tokens == len("hm</think>")


def test_tools_that_are_not_to_be_called_are_text(serve: Serve) -> None:
    client, completer = serve(HERMES, CALL)
    for more in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        (choice,) = client.chat.completions.create(**ASKED, **more).choices
        assert (choice.message.content, choice.finish_reason) == (CALL, "stop")
        assert "[tools" not in completer.prompts[-1]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_is_forced_and_fits_the_schema(serve: Serve, choice: Any) -> None:
    client, _ = serve(HERMES, "no idea")
    answer = client.chat.completions.create(**ASKED, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather" and list(json.loads(call.function.arguments)) == ["city"]


def test_arguments_of_a_strict_tool_fit_its_schema(serve: Serve) -> None:
    client, _ = serve(HERMES, 'ok <tool_call>\n{"name": "weather", "arguments": {"town": 5, "x')
    free = client.chat.completions.create(**ASKED, tools=[TOOL]).choices[0].message
    assert free.tool_calls[0].function.arguments == '{"town": 5, "x'
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    message = client.chat.completions.create(**ASKED, tools=[strict]).choices[0].message
    assert message.content == "ok" and list(json.loads(message.tool_calls[0].function.arguments)) == ["city"]


def test_reasoning_is_separate(serve: Serve) -> None:
    client, _ = serve(THINKING, f"I ponder\n</think>\n\nfine {CALL}")
    message = client.chat.completions.create(**ASKED).choices[0].message
    assert (message.reasoning_content, message.content) == ("I ponder", f"fine {CALL}")
    found = joined(client.chat.completions.create(**ASKED, tools=[TOOL], stream=True))
    assert found[:2] == ("fine", "I ponder") and found[2][0]["name"] == "weather"
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [1234]}}}
    message = client.chat.completions.create(**ASKED, response_format=form).choices[0].message
    assert (message.reasoning_content, message.content) == ("I ponder", "1234")


def test_harmony(serve: Serve) -> None:
    text = (
        "<|channel|>analysis<|message|>Need.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"city": "Paris"}'
    )
    client, _ = serve(HARMONY, text, HARMONY_TOKENS)
    for found in (
        joined(client.chat.completions.create(**ASKED, tools=[TOOL], stream=True)),
        joined(client.chat.completions.create(**ASKED, tools=[TOOL], tool_choice="required", stream=True)),
    ):
        assert found[:2] == ("", "Need.") and found[3] == "tool_calls"
        assert [(call["name"], call["arguments"]) for call in found[2]] == [("weather", '{"city": "Paris"}')]


#: A response template whose marks no known format has.
RESPONSE = {
    "start_anchor": ">",
    "fields": {
        "thinking": {"open": "<hm>", "close": "</hm>"},
        "tool_calls": {
            "open_pattern": r"<\|do\|>(?P<name>\w+)",
            "close": "<|done|>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    },
}


def test_the_checkpoints_response_template(serve: Serve) -> None:
    text = '<hm>I ponder\n</hm>Sure. <|do|>weather{"city": "Paris"}<|done|><|do|>other{"a": 1}<|done|><|do|>weather{"ci'
    client, _ = serve(HERMES, text, ("<|do|>", "<|done|>"), RESPONSE)
    for stream in (False, True):
        answer = client.chat.completions.create(**ASKED, tools=[TOOL], stream=stream)
        if stream:
            content, reasoning, calls, _ = joined(answer)
            names = [(call["name"], json.loads(call["arguments"])) for call in calls]
        else:
            message = answer.choices[0].message
            content, reasoning = message.content, message.reasoning_content
            names = [(one.function.name, json.loads(one.function.arguments)) for one in message.tool_calls]
        assert (reasoning, names) == ("I ponder", [("weather", {"city": "Paris"})])
        # A call of another tool, and one that was cut off, are text.
        assert content == 'Sure.{"a": 1}{"ci'
    assert client.chat.completions.create(**ASKED).choices[0].message.reasoning_content == "I ponder"


@pytest.mark.parametrize("change", [{"start_anchor": 5}, {"start_anchor_pattern": "(("}, {"version": 2}])
def test_a_response_template_that_cannot_be_read(serve: Serve, change: dict[str, Any]) -> None:
    client, _ = serve(HERMES, "x", (), {**RESPONSE, **change})
    with pytest.raises(openai.BadRequestError, match="response_template cannot parse the response"):
        client.chat.completions.create(**ASKED)


def test_templates_that_take_arguments_as_text(serve: Serve) -> None:
    client, completer = serve(DEEPSEEK, "x")
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    told = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    result = [{"role": "tool", "tool_call_id": "a", "content": "20 C"}]
    client.chat.completions.create(model="demo", messages=[*ASKED["messages"], *told, *result], tools=[TOOL])
    assert '<｜tool▁calls▁begin｜>function{"city": "Paris"}[tool]20 C' in completer.prompts[-1]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_clients_that_leave_amid_reasoning_or_a_call(serve: Serve, path: str) -> None:
    client, completer = serve(THINKING, f"{'hm ' * 20}</think>{CALL[:-30]}{'x' * 4000}")
    address = str(client.base_url).removesuffix("/v1/")
    tools = [TOOL] if "chat" in path else [{"type": "function", **TOOL["function"]}]
    message = {"messages": ASKED["messages"], "n": 2} if "chat" in path else {"input": "hi"}
    body = {"model": "demo", **message, "tools": tools, "stream": True}
    for read in (0, 300, 20_000):
        ended = health(address)["answered"]
        asked = len(completer.prompts)
        begun_and_left(address, body, read, until=lambda: len(completer.prompts) > asked, path=path)  # noqa: B023
        wait_until(lambda: health(address)["answered"] > ended)  # noqa: B023
        assert queued(address) == 0
    assert client.chat.completions.create(**ASKED, max_tokens=1).usage.completion_tokens == 1


def test_the_developer_is_the_system_to_most_templates(serve: Serve) -> None:
    client, completer = serve(HERMES, "x")
    client.chat.completions.create(model="demo", messages=[{"role": "developer", "content": "be short"}])
    assert completer.prompts[-1] == "[system]be short>"


def tool_of(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "a", **function}}]}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            {"messages": [{"role": "tool", "tool_call_id": "x", "content": "y"}]},
            "must be the id of a call in an earlier",
        ),
        ({"tools": [TOOL, TOOL]}, "tools must have different names, got 'weather' twice"),
        ({"tools": [TOOL] * 1000}, "tools must be a list of at most 128"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type must be 'function', got 'web_search'"),
        (tool_of(name="a b"), "tools.0.function.name must be 1 to 64 letters"),
        (tool_of(parameters=[1]), 'tools.0.function.parameters must be a JSON schema with type "object", got [1]'),
        (tool_of(parameters={"properties": {"x": {"type": "strin"}}}), "parameters.properties.x.type must be one of"),
        (tool_of(parameters={"properties": 5}), "parameters.properties must be an object of schemas, got 5"),
        (tool_of(parameters={"required": "x"}), "parameters.required must be a list of names"),
        (tool_of(parameters={"anyOf": [5]}), "parameters.anyOf.0 must be a JSON schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "z"}}}, "got 'z'; send one of"),
        ({"tools": [TOOL], "tool_choice": "x"}, 'must be "none", "auto", "required" or a tool'),
        ({"functions": [{"name": "a"}]}, "functions were replaced by tools"),
        ({"messages": [{"role": "user", "content": "a" * 9 * 2**20}]}, "(Content Too Large)"),
        ({"messages": [{"role": "user", "content": "a" * 2**20}]}, "maximum context length"),
    ],
)
def test_what_is_wrong_is_named(hermes_address: str, more: dict[str, Any], says: str) -> None:
    status, document = post(hermes_address, "/v1/chat/completions", {**ASKED, **more})
    assert status in (400, 413) and says in document["error"]["message"], document


@pytest.fixture(scope="module")
def hermes_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of a server with a template that takes tools."""
    with served(Scripted(scripted_tokenizer(tmp_path_factory.mktemp("t"), HERMES), lambda prompt: "x")) as address:
        yield address
