"""OpenAI's Responses API, as agents use it: input items become messages, and parts of a response become output items.

https://platform.openai.com/docs/api-reference/responses. Nothing is stored, so each request has the whole conversation.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import PlainValidator, ValidationError

from ...decoding.completion import Completion
from ...errors import InputError
from ...generation.tool_calls import Part
from .fields import Limit, message_of, only, refuse
from .responses import Answer, call_id, usage_of
from .schema import BaseRequest, ChatRequest

_TEXTS = ("input_text", "output_text", "text")


def _items(value: Any) -> list[dict[str, Any]]:
    """Return the input as items; text is a message of the user."""
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
        refuse("text or a list of items", value, "send text")
    return items


def _content(content: Any, at: str) -> Any:
    """Return the content of a message for chat completions: text, or parts if some are images."""
    if not isinstance(content, list) or not any(_is_image(part) for part in content):
        return _text(content, at)
    return [
        {"type": "image_url", "image_url": part.get("image_url")}
        if _is_image(part)
        else {"type": "text", "text": _text([part], f"{at}.{index}")}
        for index, part in enumerate(content)
    ]


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_image"


def _text(content: Any, at: str) -> Any:
    """Return the text of an item's content."""
    if content is None or isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    for index, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") not in _TEXTS or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise InputError(
                f"{at}.{index}.type must be one of {', '.join(_TEXTS)}, got {str(kind)[:80]!r}; this server takes only "
                "text, and images of messages, so leave audio and files out"
            )
    return "".join(part["text"] for part in parts)


class ItemsRequest(BaseRequest):
    """A request of `POST /v1/responses`."""

    input: Annotated[Any, PlainValidator(_items)]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    max_output_tokens: Limit = None
    previous_response_id: Annotated[Any, only(fix="responses are not stored, so send the whole conversation")] = None
    conversation: Annotated[Any, only(fix="conversations are not stored, so send the whole conversation")] = None
    background: Annotated[Any, only(False, fix="responses are not stored, so leave it out")] = None
    prompt: Annotated[Any, only(fix="prompts are not stored, so send the input")] = None
    truncation: Annotated[Any, only("disabled", "auto", fix="leave it out")] = None
    #: Nothing is stored, which this field would only forbid.
    store: Any = None
    include: Any = None
    reasoning: Any = None
    metadata: Any = None
    top_logprobs: Annotated[Any, only(0, fix="use /v1/chat/completions for log probabilities")] = None
    max_tool_calls: Any = None

    def chat(self) -> ChatRequest:
        """Return the same request for chat completions.

        Raises:
            InputError: If an item, a tool or another field is not supported.
            UnicodeEncodeError: If a text is not UTF-8, because responses repeat fields.
        """
        json.dumps(self.model_dump(), ensure_ascii=False).encode()
        tools = [self._tool(index, tool) for index, tool in enumerate(self.tools or ())]
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": self._messages(),
            "tools": tools,
            "tool_choice": self._choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self._format(),
        }
        try:
            return ChatRequest.model_validate({name: value for name, value in fields.items() if value is not None})
        except ValidationError as error:
            wrong = error.errors()[0]
            raise InputError(message_of({**wrong, "loc": ("body", *wrong["loc"])})[0]) from None

    def _tool(self, index: int, tool: Mapping[str, Any]) -> dict[str, Any]:
        if tool.get("type") != "function":
            raise InputError(
                f"tools.{index}.type must be 'function', got {str(tool.get('type'))[:80]!r}; leave other tools out"
            )
        return {"type": "function", "function": {key: value for key, value in tool.items() if key in _FUNCTION}}

    def _choice(self) -> Any:
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "function":
            return {"type": "function", "function": {"name": choice.get("name")}}
        return choice

    def _format(self) -> dict[str, Any] | None:
        form = (self.text or {}).get("format")
        if not isinstance(form, dict) or form.get("type") != "json_schema":
            return form
        return {"type": "json_schema", "json_schema": {key: value for key, value in form.items() if key != "type"}}

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        reasoning: str | None = None
        for index, item in enumerate(self.input):
            kind = item.get("type", "message")
            if kind == "message":
                content = _content(item.get("content"), f"input.{index}.content")
                messages.append({"role": item.get("role"), "content": content})
            elif kind == "function_call":
                # Calls of one response follow its text.
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                call = {"name": item.get("name"), "arguments": item.get("arguments")}
                messages[-1].setdefault("tool_calls", []).append({"id": item.get("call_id"), "function": call})
            elif kind == "function_call_output":
                output = _text(item.get("output"), f"input.{index}.output")
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
            elif kind == "reasoning":
                given = item.get("content")
                parts = [part for part in given if isinstance(part, dict)] if isinstance(given, list) else []
                reasoning = "".join(str(part.get("text", "")) for part in parts) or None
                continue
            else:
                kinds = "message, function_call, function_call_output, reasoning"
                raise InputError(f"input.{index}.type must be one of {kinds}, got {str(kind)[:80]!r}; leave it out")
            if reasoning is not None and messages[-1]["role"] == "assistant":
                messages[-1]["reasoning_content"] = reasoning
            reasoning = None
        return messages


_FUNCTION = ("name", "description", "parameters", "strict")
_KINDS: Mapping[str, Literal["message", "reasoning"]] = {"content": "message", "reasoning": "reasoning"}

#: Beginning of the ids of items, by their type.
_IDS = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class Items:
    """The output items of one response, and the events of its stream.

    Args:
        request: The request.
    """

    def __init__(self, request: ItemsRequest) -> None:
        self._request, self._number = request, 0
        self._output: list[dict[str, Any]] = []
        self._is_open = False
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())

    def begin(self) -> Iterator[dict[str, Any]]:
        """Yield the events before any output."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._document("in_progress"))

    def add(self, parts: Iterable[Part]) -> Iterator[dict[str, Any]]:
        """Take parts of the response, and yield their events."""
        for part in parts:
            kind = _KINDS.get(part.kind, "function_call")
            if part.kind == "name" or not self._is_open or self._output[-1]["type"] != kind:
                yield from self._close()
                yield from self._open(kind, part.text)
            if part.kind != "name":
                yield from self._more(part.text)

    def finish(self, completion: Completion, answer: Answer) -> Iterator[dict[str, Any]]:
        """Yield the last events; the last one has the whole response."""
        is_whole = completion.finish_reason == "stop"
        yield from self._close("completed" if is_whole else "incomplete")
        status = "completed" if is_whole else "incomplete"
        yield self._event(f"response.{status}", response=self._document(status, usage_of([completion], [answer])))

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _open(self, kind: str, name: str) -> Iterator[dict[str, Any]]:
        self._is_open = True
        item: dict[str, Any] = {"id": f"{_IDS[kind]}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}
        if kind == "function_call":
            item |= {"call_id": call_id(), "name": name, "arguments": ""}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        else:
            item |= {"role": "assistant", "content": []}
        self._output.append(item)
        yield self._event("response.output_item.added", output_index=self._index, item=_copy(item))
        if kind == "message":
            item["content"] = [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
        elif kind == "reasoning":
            item["content"] = [{"type": "reasoning_text", "text": ""}]
        if kind != "function_call":
            yield self._event("response.content_part.added", **self._place, part=dict(item["content"][0]))

    def _more(self, text: str) -> Iterator[dict[str, Any]]:
        item = self._output[-1]
        if item["type"] == "function_call":
            item["arguments"] += text
            place = {"item_id": item["id"], "output_index": self._index}
            yield self._event("response.function_call_arguments.delta", **place, delta=text)
            return
        item["content"][0]["text"] += text
        more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
        yield self._event(f"response.{item['content'][0]['type']}.delta", **self._place, delta=text, **more)

    def _close(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        if not self._is_open:
            return
        self._is_open, item = False, self._output[-1]
        item["status"] = status
        if item["type"] == "function_call":
            place = {"item_id": item["id"], "output_index": self._index}
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **place, **done)
        else:
            part = item["content"][0]
            more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            yield self._event(f"response.{part['type']}.done", **self._place, text=part["text"], **more)
            yield self._event("response.content_part.done", **self._place, part=dict(part))
        yield self._event("response.output_item.done", output_index=self._index, item=_copy(item))

    @property
    def _index(self) -> int:
        return len(self._output) - 1

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": self._index, "content_index": 0}

    def _document(self, status: str, usage: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the response."""
        request = self._request
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": request.model,
            "output": [_copy(item) for item in self._output],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": request.temperature,
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _renamed(usage),
        }


def _copy(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item that later parts do not change."""
    copied = dict(item)
    if "content" in item:
        copied["content"] = [dict(part) for part in item["content"]]
    return copied


def _renamed(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return token counts under the names of this API."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
