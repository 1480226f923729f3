"""`exportable-cache serve`: OpenAI's own client, and what is said of requests that are refused."""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from exportable_cache import load
from exportable_cache.decoding import Completer
from exportable_cache.generation import constraint

pytest.importorskip("fastapi", reason="the serve extra is not installed")
pytest.importorskip("openai", reason="the test extra is not installed")

import openai

from ..support.native import require_native
from ..support.waiting import wait_until
from .serving import (
    CHAT,
    MAX_CACHE_LEN,
    QUESTION,
    TEXT,
    client_of,
    post,
    queued,
    served,
    served_natively,
)

pytestmark = pytest.mark.usefixtures("fake_backend")
TOOL = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module", params=["session", "native"])
def server_address(request: pytest.FixtureRequest, server_bundle: Path) -> Iterator[str]:
    """Where a server answers, over a session or the native runner."""
    if request.param == "session":
        with served(load(server_bundle)) as address:
            yield address
        return
    require_native()
    with served_natively(request.getfixturevalue("demo_bundle")) as address:
        yield address


@pytest.fixture(scope="module")
def client(server_address: str) -> Any:
    return client_of(server_address)


def test_a_chat_is_the_sessions_answer(client, greedy_answer: str) -> None:
    asked = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    answer = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    (choice,) = answer.choices
    assert choice.message.content == greedy_answer and choice.finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    for token in choice.logprobs.content:
        assert token.logprob == token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
    streamed = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content for chunk in streamed if chunk.choices) == greedy_answer
    assert streamed[0].choices[0].delta.role == "assistant" and streamed[-2].choices[0].finish_reason == "stop"
    assert streamed[-1].usage.completion_tokens == answer.usage.completion_tokens
    parts = [{"type": "text", "text": QUESTION[:9]}, {"type": "text", "text": QUESTION[9:]}]
    in_parts = {**asked, "messages": [{"role": "user", "content": parts}]}
    assert client.chat.completions.create(**in_parts).choices[0].message.content == greedy_answer


def test_a_conversation_that_goes_on_is_fed_its_new_turn(client, greedy_answer: str) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    first = client.chat.completions.create(model="demo", messages=messages, temperature=0)
    messages += [{"role": "assistant", "content": greedy_answer}, {"role": "user", "content": "amber?"}]
    second = client.chat.completions.create(model="demo", messages=messages, temperature=0)
    held = first.usage.prompt_tokens + first.usage.completion_tokens - 1
    assert second.usage.prompt_tokens_details.cached_tokens == held


def test_text_completions(client, server_bundle: Path) -> None:
    session = load(server_bundle)
    text = "".join(session.stream_text(QUESTION, max_new_tokens=5))
    asked = {"model": "demo", "prompt": QUESTION, "max_tokens": 5, "temperature": 0}
    answer = client.completions.create(**asked, logprobs=1)
    assert answer.choices[0].text == text and answer.choices[0].finish_reason == "length"
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == text and logprobs.text_offset[0] == 0
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)) == text
    ids = session.text_tokenizer(QUESTION, add_special_tokens=True)["input_ids"]
    for form in (ids, [ids], [QUESTION]):
        assert client.completions.create(**{**asked, "prompt": form}).choices[0].text == text
    stopped = client.completions.create(**asked, stop=text[2:4])
    assert stopped.choices[0].text == text[:2] and stopped.choices[0].finish_reason == "stop"


def test_prompts_with_log_probabilities(client, server_bundle: Path) -> None:
    """Log-likelihood tasks of lm_eval send lists of token ids with `echo`."""
    asked = {"model": "demo", "temperature": 0, "logprobs": 2}
    answer = client.completions.create(**asked, prompt=QUESTION, max_tokens=5)
    ids = load(server_bundle).text_tokenizer(QUESTION)["input_ids"]
    text, new = answer.choices[0].text, answer.choices[0].logprobs
    known = load(server_bundle).text_tokenizer(QUESTION + text)["input_ids"]
    both = client.completions.create(**asked, prompt=[known, ids[:3]], max_tokens=0, echo=True).choices
    scores = both[0].logprobs
    assert both[0].text == QUESTION + text and scores.token_logprobs[0] is None is scores.top_logprobs[0]
    assert scores.token_logprobs[-5:] == pytest.approx(new.token_logprobs, abs=1e-4)
    assert scores.token_logprobs[1:3] == pytest.approx(both[1].logprobs.token_logprobs[1:], abs=1e-4)
    echoed = client.completions.create(**asked, prompt=QUESTION, max_tokens=5, echo=True).choices[0]
    assert echoed.text == QUESTION + text and len(echoed.logprobs.tokens) == len(ids) + 5


def test_logits_are_biased(client, server_address: str) -> None:
    asked = {"model": "demo", "prompt": QUESTION, "max_tokens": 4, "temperature": 0}
    chosen = client.completions.create(**asked, logit_bias={"7": 100}, logprobs=0).choices[0]
    token = post(server_address, "/detokenize", {"tokens": [7]})[1]["content"]
    assert chosen.text == token * 4
    # Each time that the token was generated makes it less likely, until another one is chosen.
    mixed = client.completions.create(**asked, logit_bias={"7": 20}, frequency_penalty=2, extra_body={"n": 2})
    assert [choice.index for choice in mixed.choices] == [0, 1]


def test_the_model_is_there_by_its_name(client) -> None:
    (listed,) = client.models.list().data
    assert client.models.retrieve(listed.id) == listed
    with pytest.raises(openai.NotFoundError, match="no model 'another/one'; this server has 'demo'"):
        client.models.retrieve("another/one")


def test_a_seed_draws_the_same(client) -> None:
    asked = {"model": "demo", "prompt": "the", "max_tokens": 20, "temperature": 1.5}
    texts = [client.completions.create(**asked, seed=seed).choices[0].text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    narrow = client.completions.create(**asked, extra_body={"top_k": 1, "min_p": 0.1}).choices[0].text
    assert narrow == client.completions.create(**{**asked, "temperature": 0}).choices[0].text


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def schema_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "number", "schema": schema}}


def test_an_answer_has_the_form_that_was_asked_for(client, greedy_answer: str) -> None:
    asked = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "temperature": 1.5}
    form = schema_of({"enum": [4822, 9157]})
    for seed in range(4):
        (choice,) = client.chat.completions.create(**asked, response_format=form, seed=seed).choices
        assert choice.message.content in ("4822", "9157") and choice.finish_reason == "stop"
    text = {**asked, "temperature": 0, "response_format": {"type": "text"}}
    assert client.chat.completions.create(**text).choices[0].message.content == greedy_answer


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("chat/completions", {**CHAT, "model": "gpt"}, 404, "there is no model 'gpt'; this server has 'demo'"),
        ("chat/completions", {**CHAT, "messages": []}, 400, "messages must be a list of at least 1, got []"),
        ("chat/completions", {"model": "demo"}, 400, "messages must be given, got nothing; send it"),
        ("chat/completions", {**CHAT, "n": 0}, 400, "n must be at least 1, got 0"),
        ("chat/completions", {**CHAT, "n": 129}, 400, "n must be at most 128, got 129"),
        (
            "chat/completions",
            {**CHAT, "tools": [{"type": "function"}]},
            400,
            "tools.0.function must be given",
        ),
        ("chat/completions", {**CHAT, "tools": [TOOL]}, 400, "this model's chat template does not describe tools"),
        ("chat/completions", {**CHAT, "tool_choice": "required"}, 400, 'must be "auto" or "none" without tools'),
        ("chat/completions", {**CHAT, "presence_penalty": 3}, 400, "presence_penalty must be at most 2.0, got 3"),
        (
            "chat/completions",
            {**CHAT, "modalities": ["text", "audio"]},
            400,
            'modalities must be ["text"] or null, got',
        ),
        ("chat/completions", {**CHAT, "reasoning_effort": "high"}, 400, "reasoning_effort must be null, got 'high'"),
        (
            "chat/completions",
            {**CHAT, "response_format": {"type": "xml"}},
            400,
            "response_format.type must be 'text', ",
        ),
        ("chat/completions", {**CHAT, "response_format": {"type": "json_schema"}}, 400, "response_format must have a "),
        ("chat/completions", {**CHAT, "response_format": schema_of({"type": "x"})}, 400, "cannot be enforced"),
        (
            "chat/completions",
            {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "shema": {}}}},
            400,
            "response_format.json_schema.shema must be left out, got {}; there is no such field; did you mean schema?",
        ),
        ("chat/completions", {**CHAT, "top_logprobs": 2}, 400, "top_logprobs must be combined with logprobs"),
        ("chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs must be at most 20"),
        ("chat/completions", {**CHAT, "frequency_penalty": -3}, 400, "frequency_penalty must be at least -2.0"),
        ("chat/completions", {**CHAT, "logit_bias": {"x": 1}}, 400, "logit_bias.x must be an object with token ids"),
        ("chat/completions", {**CHAT, "logit_bias": {"5": 101}}, 400, "logit_bias.5 must be a number from -100 to 100"),
        ("chat/completions", {**CHAT, "logit_bias": [5]}, 400, "logit_bias must be an object of at most 300 token ids"),
        ("chat/completions", {**CHAT, "store": True}, 400, "store must be false or null, got True"),
        ("chat/completions", {**CHAT, "messages": [{"role": "", "content": "x"}]}, 400, "messages.0.role must be text"),
        (
            "chat/completions",
            {**CHAT, "messages": [{"role": "x" * 65}]},
            400,
            "messages.0.role must be text of at most 64",
        ),
        ("chat/completions", {**CHAT, "messages": [{"content": "x"}]}, 400, "messages.0.role must be given"),
        ("chat/completions", {**CHAT, "messages": [5]}, 400, "messages.0 must be an object, got 5"),
        (
            "chat/completions",
            {**CHAT, "max_completion_tokens": 0},
            400,
            "max_completion_tokens must be at least 1, got 0",
        ),
        (
            "chat/completions",
            {**CHAT, "temperatur": 0},
            400,
            "temperatur must be left out, got 0; there is no such field; did you",
        ),
        (
            "chat/completions",
            {**CHAT, "guided_json": {}},
            400,
            "guided_json must be left out, got {}; there is no such",
        ),
        ("chat/completions", {**CHAT, "temperature": -1}, 400, "temperature must be"),
        ("chat/completions", {**CHAT, "temperature": "hot"}, 400, "temperature must be a number, got 'hot'"),
        ("chat/completions", {**CHAT, "temperature": True}, 400, "temperature must be a number, got True"),
        ("chat/completions", {**CHAT, "max_tokens": 1.5}, 400, "max_tokens must be a whole number, got 1.5"),
        ("chat/completions", {**CHAT, "stop": 5}, 400, "stop must be text or a list of texts, got 5"),
        ("chat/completions", {**CHAT, "stream": "x"}, 400, "stream must be true or false, got 'x'"),
        ("chat/completions", {**CHAT, "stream_options": {"include_usge": True}}, 400, "did you mean include_usage?"),
        ("chat/completions", [1], 400, "the body must be an object, got [1]"),
        (
            "chat/completions",
            {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            400,
            "messages.0.content.0.image_url.url must be a data: URL with a PNG or JPEG image in base64, got 'x'; this "
            "server fetches nothing",
        ),
        (
            "chat/completions",
            {**CHAT, "messages": [{"role": "user", "content": [{"type": "file"}]}]},
            400,
            'messages.0.content.0.type must be "text", "image_url" or "input_audio", got \'file\'',
        ),
        (
            "chat/completions",
            {
                **CHAT,
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}],
                    }
                ],
            },
            400,
            "messages must have no parts of type audio, got 1; this server takes only text, so leave them out",
        ),
        ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": 5}]}, 400, "messages.0.content must be"),
        ("completions", {**TEXT, "prompt": {"a": 1}}, 400, "prompt must be text or a list of token ids, got {'a': 1}"),
        ("completions", {**TEXT, "prompt": [True]}, 400, "prompt must be text or a list of token ids"),
        ("completions", {**TEXT, "prompt": ""}, 400, "the prompt is empty"),
        ("completions", {**TEXT, "prompt": [10**9]}, 400, "got 1000000000"),
        ("completions", {**TEXT, "prompt": ["x", 5]}, 400, "prompt.1 must be text or a list of token ids, got 5"),
        ("completions", {**TEXT, "\ud800": 1}, 400, "\\ud800 must be left out"),
        ("chat/completions", {**CHAT, "response_format": schema_of({"\ud800": 1})}, 400, "cannot be enforced"),
        ("chat/completions", {**CHAT, "messages": [{"role": "user", "\ud800": 1}]}, 400, "UTF-8"),
        ("completions", {**TEXT, "prompt": ["x"] * 129}, 400, "prompt must be at most 128 prompts"),
        ("completions", {**TEXT, "prompt": "\ud800"}, 400, "must be UTF-8"),
        ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": "\ud800"}]}, 400, "must be UTF-8"),
        ("completions", {**TEXT, "max_tokens": 1000}, 400, f"the cache holds {MAX_CACHE_LEN}; request at most"),
        (
            "completions",
            {**TEXT, "prompt": "the " * 1000},
            400,
            f"maximum context length is {MAX_CACHE_LEN} tokens",
        ),
        ("completions", {**TEXT, "top_p": 3}, 400, "top_p must be"),
        ("completions", {**TEXT, "seed": 2**70}, 400, "seed must be"),
        ("completions", {**TEXT, "logprobs": 21}, 400, "logprobs must be at most 20"),
        ("completions", {**TEXT, "best_of": 2}, 400, "best_of must be 1"),
        ("completions", {**TEXT, "max_tokens": 0}, 400, "max_tokens must be at least 1 without echo, got 0"),
        ("completions", {**TEXT, "suffix": "y"}, 400, 'suffix must be ""'),
        ("completions", b"{", 400, "the body must be valid JSON"),
        ("completions", b"\xff\xfe", 400, "the body must be valid JSON"),
        ("completions", b"[" * 100_000, 400, "error parsing the body"),
        ("completions", b" " * (9 * 2**20), 413, "Too Large"),
        ("embeddings", TEXT, 404, "embeddings are not supported"),
    ],
)
def test_what_is_refused_says_why(server_address: str, path: str, body: Any, status: int, message: str) -> None:
    found, document = post(server_address, f"/v1/{path}", body)
    said = document["error"]["message"]
    assert (found, message in said) == (status, True), (found, said)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_p", 7),
        ("top_p", 0),
        ("min_p", 7),
        ("min_p", -0.5),
        ("top_k", -5),
        ("repetition_penalty", 0),
        ("top_p", "nan"),
    ],
)
def test_sampling_is_checked_at_any_temperature(server_address: str, temperature: int, field: str, value: Any) -> None:
    for kind, asked in (("chat/", CHAT), ("", TEXT)):
        body = {**asked, "temperature": temperature, field: value}
        status, document = post(server_address, f"/v1/{kind}completions", body)
        assert status == 400 and document["error"]["message"].startswith(f"{field} must be "), document


def test_what_clients_send_and_changes_nothing_is_answered(client, greedy_answer: str) -> None:
    asked = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    same: dict[str, Any] = {
        "n": 1, "stop": None, "seed": None, "top_p": 1, "top_k": -1, "min_p": 0, "presence_penalty": 0.0,
        "logit_bias": {}, "frequency_penalty": 0, "modalities": ["text"], "prediction": None, "prompt_cache_key": "a",
        "user": "b", "safety_identifier": "c", "service_tier": "auto", "metadata": {"d": "e"}, "store": False,
        "tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "verbosity": "medium",
        "reasoning_effort": None, "logprobs": False, "top_logprobs": 0, "audio": None, "stream_options": None,
        "prompt_cache_retention": "in_memory",
    }  # fmt: skip
    answer = client.chat.completions.create(**asked, extra_body=same)
    assert answer.choices[0].message.content == greedy_answer and answer.choices[0].logprobs is None
    options = {"include_usage": True, "include_obfuscation": False}
    streamed = list(client.chat.completions.create(**asked, stream=True, stream_options=options))
    assert "".join(chunk.choices[0].delta.content for chunk in streamed if chunk.choices) == greedy_answer
    text = {"echo": False, "best_of": 1, "suffix": "", "logprobs": False, "top_k": 0}
    answer = client.completions.create(model="demo", prompt="x", max_tokens=2, temperature=0, extra_body=text)
    assert answer.choices[0].logprobs is None


#: A form that is compiled for hours.
ENDLESS = schema_of({"allOf": [{"type": "string", "pattern": f"a{index}"} for index in range(30)]})


def test_a_form_without_end_holds_up_no_other_request_and_not_the_end(
    server_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies: list[tuple[int, Any]] = []

    def ask() -> None:
        with suppress(http.client.HTTPException, OSError):  # the server may end first
            replies.append(post(address, "/v1/chat/completions", {**CHAT, "response_format": ENDLESS}))

    completer, short_is_answered = Completer(load(server_bundle)), threading.Event()
    follow = completer.follow

    def held(form: Any) -> Any:
        # The short request must come before the end of the compilation, however slow the machine is.
        assert "allOf" not in str(form) or short_is_answered.wait(60)
        return follow(form)

    completer.follow = held  # type: ignore[method-assign]
    with served(completer) as address:
        # What compiles forms is started.
        assert post(
            address, "/v1/chat/completions", {**CHAT, "response_format": schema_of({"const": 1}), "max_tokens": 4}
        )
        monkeypatch.setattr(constraint, "MOST_SECONDS", 0.5)
        asking = [threading.Thread(target=ask) for _ in range(2)]
        for one in asking:
            one.start()
        wait_until(lambda: queued(address) == 2)
        status, _ = post(address, "/v1/chat/completions", {**CHAT, "max_tokens": 2})
        assert status == 200 and not replies
        short_is_answered.set()
        for one in asking:
            one.join()
        assert {status for status, _ in replies} == {400}
        assert "it runs longer than 0.5 s" in replies[0][1]["error"]["message"]
        last = threading.Thread(target=ask)
        last.start()
        wait_until(lambda: queued(address) == 1)
    # The server has ended, as `served` checks.
    last.join()


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "json_schema": {"schema": {"const": 4822}}},
        {"type": "json_schema", "schema": {"const": 4822}},
        {"type": "json_object", "schema": {"const": 4822}},
        {"type": "json_object", "value": {"const": 4822}},
        {"type": "json", "value": '{"const": 4822}'},
        {"type": "regex", "value": "4822"},
    ],
    ids=["OpenAI", "OpenAI, flat", "llama.cpp", "huggingface_hub", "text-generation-inference", "its patterns"],
)
def test_a_form_is_followed_in_the_spelling_of_each_server(server_address: str, form: dict[str, Any]) -> None:
    asked = {**CHAT, "temperature": 1.5, "seed": 1, "response_format": form}
    status, document = post(server_address, "/v1/chat/completions", asked)
    assert status == 200 and document["choices"][0]["message"]["content"] == "4822", document


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"type": "text", "schema": {}}, 'response_format.schema must be left out with type "text"'),
        ({"type": "json_object", "schema": {}, "value": {}}, "must have one schema, got schema and value"),
        ({"type": "json_object", "json_schema": {"name": "a"}}, 'must have a schema with type "json_object"'),
        ({"type": "json_object", "value": 5}, "response_format.value must be an object, got 5"),
        ({"type": "regex"}, 'response_format.value must be a pattern with type "regex"'),
        ({"type": "json", "value": "{"}, "the JSON schema cannot be read"),
    ],
)
def test_a_form_that_would_be_dropped_is_refused(server_address: str, form: dict[str, Any], says: str) -> None:
    status, document = post(server_address, "/v1/chat/completions", {**CHAT, "response_format": form})
    assert status == 400 and says in document["error"]["message"], document


def test_an_overflow_is_said_as_clients_know_it(server_address: str) -> None:
    words = {"messages": [{"role": "user", "content": "the " * 1000}]}
    for path, asked, field in (
        ("chat/completions", {**CHAT, **words}, "messages"),
        ("completions", {**TEXT, "max_tokens": 1000}, "prompt"),
    ):
        for stream in (False, True):
            status, document = post(server_address, f"/v1/{path}", {**asked, "stream": stream})
            error = document["error"]
            assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", field)
            begins = f"This model's maximum context length is {MAX_CACHE_LEN} tokens (context_length_exceeded): the "
            assert error["message"].startswith(begins)


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(server_address: str) -> None:
    """The longest token of the demo has 8 characters. White space at the ends may be dropped by a template."""
    most = MAX_CACHE_LEN * 8
    says = f"the prompt has {most + 1} characters, but a cache of {MAX_CACHE_LEN} tokens holds at most {most}; shorten"
    content = "x" * (most + 1) + " " * 9
    for path, asked in (
        ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": content}]}),
        ("completions", {**TEXT, "prompt": "x" * (most + 1)}),
    ):
        status, document = post(server_address, f"/v1/{path}", asked)
        assert (status, document["error"]["code"]) == (400, "context_length_exceeded")
        assert says in document["error"]["message"]
    fits = post(server_address, "/v1/completions", {**TEXT, "prompt": "x" * most})[1]["error"]["message"]
    assert f"the prompt has {most} tokens" in fits


def test_a_body_that_is_not_said_to_be_json_is_refused(server_address: str) -> None:
    """What a page of somebody else can send without being asked."""
    assert post(server_address, "/v1/completions", TEXT, {"Content-Type": "text/plain"})[0] == 400


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("v1/completions", {**TEXT, "top_p": 3}, 400, "top_p"),
        ("v1/completions", {**TEXT, "max_tokens": 0}, 400, "max_tokens"),
        ("v1/chat/completions", {**CHAT, "top_logprobs": 2}, 400, "top_logprobs"),
        ("v1/chat/completions", {**CHAT, "response_format": {"type": "json_schema"}}, 400, "response_format"),
        ("v1/chat/completions", {**CHAT, "tools": [TOOL]}, 400, "tools"),
        ("v1/chat/completions", {**CHAT, "temperature": "hot"}, 400, "temperature"),
        ("v1/completions", {**TEXT, "prompt": ""}, 400, None),
        ("tokenize", {"messages": CHAT["messages"], "tools": [TOOL]}, 400, "tools"),
        ("tokenize", {"prompt": "x", "model": "other"}, 404, None),
        ("detokenize", {"tokens": [5], "model": "other"}, 404, None),
    ],
)
def test_errors_name_their_field(server_address: str, path: str, body: Any, status: int, param: str | None) -> None:
    found, document = post(server_address, f"/{path}", body)
    assert (found, document["error"]["param"]) == (status, param), document


@pytest.mark.parametrize("levels", [120, 900])
def test_a_field_of_many_levels_is_named(server_address: str, levels: int) -> None:
    """Templates get further fields of messages, so this is no fault of the tokenizer."""
    nested: Any = "x"
    for _ in range(levels):
        nested = [nested]
    messages = [{**CHAT["messages"][0], "extra": nested}]
    status, document = post(server_address, "/v1/chat/completions", {**CHAT, "messages": messages})
    says = "messages must have at most 100 levels, got more; flatten them"
    assert (status, document["error"]["message"], document["error"]["param"]) == (400, says, "messages")


def test_what_is_at_a_limit_is_taken(server_address: str) -> None:
    body = json.dumps({**TEXT, "max_tokens": 1, "logprobs": 20, "temperature": 0}).encode()
    status, document = post(server_address, "/v1/completions", body.ljust(8 * 2**20))
    assert status == 200 and len(document["choices"][0]["logprobs"]["top_logprobs"][0]) == 20
    asked = {**CHAT, "max_tokens": 5, "max_completion_tokens": 2, "temperature": 0}
    assert post(server_address, "/v1/chat/completions", asked)[1]["usage"]["completion_tokens"] == 2


def test_it_still_answers_after_all_that(client, greedy_answer: str) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    answer = client.chat.completions.create(model="demo", messages=messages, temperature=0)
    assert answer.choices[0].message.content == greedy_answer


def test_the_page_and_the_cache(server_address: str, client) -> None:
    client.completions.create(model="demo", prompt="the code of amber", max_tokens=2, temperature=0)
    connection = http.client.HTTPConnection(server_address.removeprefix("http://"), timeout=20)
    connection.request("GET", "/")
    page = connection.getresponse().read().decode()
    # Nothing comes from elsewhere.
    assert "<title>exportable-cache</title>" in page and not re.search(r"(src|href)=|https?:", page)
    connection.request("GET", "/v1/cache")
    fill = json.loads(connection.getresponse().read())
    assert fill["max_length"] == MAX_CACHE_LEN
    layers = [(layer["kind"].partition(" ")[0], layer["slots"]) for layer in fill["layers"]]
    assert layers[:2] == [("ring", 16), ("full", MAX_CACHE_LEN)]
    assert all(layer["filled"] == min(fill["length"], layer["slots"]) for layer in fill["layers"])
    connection.request("GET", "/health")
    assert json.loads(connection.getresponse().read())["status"] == "ok"
    connection.close()
