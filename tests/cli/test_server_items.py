"""`/v1/responses` as agents use it, and the smaller routes of `exportable-cache serve`."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the serve extra is not installed")
pytest.importorskip("openai", reason="the test extra is not installed")

from ..support.waiting import wait_until
from .scripted import THINKING, Scripted, scripted_tokenizer
from .serving import begun_and_left, client_of, post, queued, served

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}
CALL = 'hm\n</think>\n\nSure. <tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture(scope="module")
def completer(tmp_path_factory: pytest.TempPathFactory) -> Scripted:
    """Return a model that calls a tool once."""
    tokenizer = scripted_tokenizer(tmp_path_factory.mktemp("t"), THINKING)
    return Scripted(tokenizer, lambda prompt: "ok</think>It is 20 C." if "[tool]" in prompt else CALL)


@pytest.fixture(scope="module")
def address(completer: Scripted) -> Iterator[str]:
    """Return the address of a server."""
    with served(completer) as found:
        yield found


def test_an_agent_calls_a_tool(address: str, completer: Scripted) -> None:
    client = client_of(address)
    first = client.responses.create(model="demo", instructions="be short", input="weather?", tools=[TOOL])
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    assert first.output_text == "Sure." and first.output[0].content[0].text == "hm"
    call = first.output[2]
    assert (call.name, json.loads(call.arguments), first.status) == ("weather", {"city": "Paris"}, "completed")
    told = [{"role": "user", "content": "weather?"}, *(item.model_dump(exclude_none=True) for item in first.output)]
    told.append({"type": "function_call_output", "call_id": call.call_id, "output": "20 C"})
    second = client.responses.create(model="demo", instructions="be short", input=told, tools=[TOOL])
    assert second.output_text == "It is 20 C." and second.usage.output_tokens == len("ok</think>It is 20 C.") + 1
    prompt = completer.prompts[-1]
    assert "[system]be short[user]weather?[assistant]Sure.<tool_call>" in prompt
    assert f"[tool]20 C({call.call_id}, weather)>" in prompt


def test_the_events_of_a_stream_make_the_response(address: str) -> None:
    with client_of(address).responses.stream(model="demo", input="weather?", tools=[TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas: dict[str, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            deltas[event.type] = deltas.get(event.type, "") + event.delta
    assert deltas == {
        "response.reasoning_text.delta": "hm",
        "response.output_text.delta": "Sure.",
        "response.function_call_arguments.delta": '{"city": "Paris"}',
    }
    assert final.output[2].arguments == '{"city": "Paris"}' and events[-1].type == "response.completed"
    short = list(client_of(address).responses.create(model="demo", input="x", max_output_tokens=2, stream=True))
    assert short[-1].type == "response.incomplete"
    assert short[-1].response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type must be one of message, function_call"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0.type must be one of"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "https://x/y.png"}]}]},
            "image_url.url must be a data: URL with a PNG or JPEG image in base64, got 'https://x/y.png'",
        ),
        (
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]}
                ]
            },
            "messages must have no parts of type image, got 1; this server takes only text",
        ),
        ({"input": []}, "input must be text or a list of items"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "must be the id of a call in"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type must be 'function', got 'web_search'"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.function.name must be 1 to 64 letters"),
        ({"previous_response_id": "resp_1"}, "responses are not stored, so send the whole conversation"),
        ({"temperature": -1}, "temperature must be"),
        ({"inpt": 1}, "did you mean input?"),
        ({"model": "x"}, "there is no model 'x'"),
        ({"metadata": {"a": "\ud800"}}, "must be valid UTF-8"),
        ({"input": [{"type": "reasoning", "content": 5}]}, "messages must be a list"),
    ],
)
def test_what_is_wrong_is_named(address: str, more: dict[str, Any], says: str) -> None:
    status, document = post(address, "/v1/responses", {"model": "demo", "input": "x", **more})
    assert status in (400, 404) and says in document["error"]["message"], document


def test_tokens(address: str) -> None:
    status, found = post(address, "/tokenize", {"prompt": "né"})
    assert (status, found["count"], found["max_model_len"]) == (200, 3, 20_000)
    assert post(address, "/detokenize", {"tokens": found["tokens"]})[1]["prompt"] == "né"
    messages = post(address, "/tokenize", {"messages": [{"role": "user", "content": "x"}]})[1]["tokens"]
    assert post(address, "/detokenize", {"tokens": messages})[1]["content"] == "[user]x><think>"
    for body, says in (
        ({}, "one of prompt, content and messages must be given"),
        ({"prompt": 5}, "prompt must be text"),
    ):
        status, document = post(address, "/tokenize", body)
        assert status == 400 and says in document["error"]["message"]
    assert post(address, "/detokenize", {"tokens": ["x"]})[0] == 400


def test_several_choices_and_metrics(address: str) -> None:
    client = client_of(address)

    def counted(name: str) -> float:
        with urllib.request.urlopen(f"{address}/metrics", timeout=20) as reply:
            lines = reply.read().decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"exportable_cache_{name} "))

    before = counted("generated_tokens_total")
    asked = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "n": 3, "max_tokens": 4}
    answer = client.chat.completions.create(**asked)
    assert [choice.index for choice in answer.choices] == [0, 1, 2] and answer.usage.completion_tokens == 12
    assert counted("generated_tokens_total") - before == 12 and counted("requests_waiting") == 0
    chunks = client.chat.completions.create(**asked, stream=True)
    reasons = [(chunk.choices[0].index, chunk.choices[0].finish_reason) for chunk in chunks]
    assert [one for one in reasons if one[1]] == [(0, "length"), (1, "length"), (2, "length")]


def test_choices_run_together_in_rows(tmp_path: Any) -> None:
    """Choices share the rows of a session, and an error or a client that leaves ends all of them."""
    completer = Scripted(scripted_tokenizer(tmp_path, THINKING), lambda prompt: "ok</think>yes")
    completer.rows = 2
    order: list[int] = []
    with served(completer) as found:
        asked = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "n": 3, "stream": True}
        texts = ["", "", ""]
        for chunk in client_of(found).chat.completions.create(**asked):
            order.append(chunk.choices[0].index)
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert texts == ["yes"] * 3
        # The first two are interleaved, and the third follows the one that ends first.
        assert order.index(1) < len(order) - 1 - order[::-1].index(0)
        begun_and_left(found, asked, read=200, path="/v1/chat/completions")
        wait_until(lambda: queued(found) == 0)
        assert client_of(found).chat.completions.create(**{**asked, "stream": False}).usage.completion_tokens == 42
