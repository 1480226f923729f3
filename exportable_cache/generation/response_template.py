"""Parsing of responses by a checkpoint's own `response_template`, with the parser of transformers.

The template has regular expressions, which come with the checkpoint and may take hours, so a limited subprocess parses.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..common.process.limited import LimitedProcess, WorkFailed
from ..errors import InputError, first_line
from .tool_calls import Part

#: Limits of the subprocess: seconds for one piece of text, seconds for the import, address space, bytes of a reply.
_SECONDS, _START_SECONDS = 1.0, 30.0
_MEMORY, _MOST_BYTES = 1 << 30, 1 << 24
_PARSING = LimitedProcess("exportable_cache.generation.response_child", _MEMORY, _MOST_BYTES)
#: Names of fields that hold reasoning.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class TemplateParser:
    """Splits a response into parts by a response template; see `ResponseParser` for the methods.

    Args:
        template: The checkpoint's template.
        prompt: Text of the prompt, whose end may begin a part of the response.
        tools: The tools, as chat templates take them; empty to recognize no calls.

    Raises:
        InputError: If the template is not valid.
    """

    def __init__(self, template: Mapping[str, Any], prompt: str, tools: Sequence[Mapping[str, Any]]) -> None:
        self._names = {tool["function"]["name"] for tool in tools}
        self._name, self._calls = uuid.uuid4().hex, 0
        # The text of the current region, for a call that is not valid.
        self._raw = self._space = ""
        self._strips = True
        self._call("begin", prompt, _START_SECONDS, template=template, tools=list(tools))
        self._starts = _PARSING.starts

    def feed(self, text: str) -> list[Part]:
        """Return the parts that are known with a piece of text."""
        return [*self._parts(self._call("feed", text))] if text else []

    def finish(self) -> list[Part]:
        """Return the remaining parts, because the response has ended."""
        try:
            return [*self._parts(self._call("finish"))]
        except InputError:
            # The response ends within a call, or without a part that the template demands.
            return [Part("content", self._raw)] if self._raw else []

    def _call(self, do: str, text: str = "", seconds: float = _SECONDS, **more: Any) -> list[dict[str, Any]]:
        if do != "begin" and (_PARSING.starts != self._starts or not _PARSING.is_alive):
            raise InputError("the parser of this response was ended by a limit; send the request again")
        request = {"do": do, "name": self._name, **more}
        try:
            _, found = _PARSING.call(seconds, request, text.encode("utf-8", "surrogatepass"))
        except WorkFailed as error:
            raise InputError(
                f"the checkpoint's response_template cannot parse the response: {first_line(error)[:300]}; correct it, "
                "or remove it from tokenizer_config.json"
            ) from error
        events: list[dict[str, Any]] = json.loads(found)
        return events

    def _parts(self, events: Sequence[Mapping[str, Any]]) -> Iterator[Part]:
        for event in events:
            name = event["field"]
            if event["type"] == "region_open":
                self._raw, self._space, self._strips = "", "", True
            elif event["type"] == "region_chunk" and name != "tool_calls":
                kind = "reasoning" if name in _REASONING else "content"
                # Space around a region belongs to the format.
                text = self._space + event["text"]
                text = text.lstrip() if self._strips else text
                kept = text.rstrip()
                self._space, self._strips = text[len(kept) :], self._strips and not kept
                if kept and name in (*_REASONING, "content"):
                    yield Part(kind, kept)  # type: ignore[arg-type]
            elif event["type"] == "region_chunk":
                self._raw += event["text"]
            elif name == "tool_calls":
                yield from self._called(event["value"])
                self._raw = ""

    def _called(self, value: Any) -> Iterator[Part]:
        found = value if isinstance(value, list) else [value]
        calls = [one.get("function", one) for one in found if isinstance(one, dict)]
        names = [one.get("name") for one in calls if isinstance(one, dict)]
        if len(names) < len(found) or not all(isinstance(name, str) and name in self._names for name in names):
            yield Part("content", self._raw)
            return
        for one in calls:
            arguments = one.get("arguments") or {}
            yield Part("name", one["name"], self._calls)
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            yield Part("arguments", text, self._calls)
            self._calls += 1
