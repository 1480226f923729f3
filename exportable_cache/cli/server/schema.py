"""Requests by the reference of OpenAI's API, and the error messages for fields that are not supported.

https://platform.openai.com/docs/api-reference/chat/create and .../completions/create. `top_k`, `min_p` and
`repetition_penalty` are additional fields, as other servers have them.
"""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, FailFast, Field, PlainValidator

from ...decoding.completion import CompletionOptions
from ...errors import InputError
from ...generation.checkpoint_settings import CheckpointSettings
from ...generation.constraint import Constraint
from ...generation.sampling_options import SamplingOptions
from .fields import Fields, Limit, Number, Whole, not_bool, only, refuse, shown

#: Sampling of requests by the API's defaults.
DEFAULT_SAMPLING = SamplingOptions(temperature=1.0)
_MOST_ALTERNATIVES, _MOST_BIASES = 20, 300


def default_sampling(checkpoint: CheckpointSettings) -> SamplingOptions:
    """Return the sampling of requests without these fields: the checkpoint's if it samples, else the API's."""
    return DEFAULT_SAMPLING if checkpoint.sampling.is_greedy else checkpoint.sampling


#: Values of `top_k` that other servers use for all tokens.
_ALL_TOKENS = (0, -1)

_MOST_CHOICES = 128
_Choices = Annotated[Annotated[int, Field(ge=1, le=_MOST_CHOICES)] | None, BeforeValidator(not_bool)]
_Penalty = Annotated[Annotated[float, Field(ge=-2, le=2)] | None, BeforeValidator(not_bool)]
_NoFunctions = Annotated[Any, only([], fix="functions were replaced by tools, so send tools")]
_NoCall = Annotated[Any, only("none", "auto", fix="it was replaced by tool_choice, so send that")]
#: A field that does not affect the response.
_Unused = Any
_Alternatives = Annotated[int, Field(ge=0, le=_MOST_ALTERNATIVES)] | None


def _stops(value: Any) -> tuple[str, ...]:
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        refuse("text or a list of texts", value, "send the texts that end the response, or leave it out")
    return tuple(texts)


_IMAGE = re.compile(r"data:image/(png|jpe?g);base64,", re.IGNORECASE)


def _content(value: Any) -> Any:
    """Return a message's content for chat templates: text, with parts joined; or the parts, if some are not text."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        refuse("text or a list of parts", value, "send text")
    parts = [_part(part, f".{index}") for index, part in enumerate(value)]
    if all("text" in part for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(part: Any, at: str) -> dict[str, Any]:
    """Return a part of a message's content, see `session.inputs.prompt.message_inputs`."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "image_url", "input_audio"):
        fix = "this server takes no other parts, so leave files out"
        refuse('"text", "image_url" or "input_audio"', part if kind is None else kind, fix, f"{at}.type")
    given = part.get(kind)
    if kind == "text":
        if not isinstance(given, str):
            refuse("text", given, "send the part's text", f"{at}.text")
        return {"type": "text", "text": given}
    if kind == "image_url":
        url = given.get("url") if isinstance(given, dict) else given
        head = _IMAGE.match(url) if isinstance(url, str) else None
        if head is None or not isinstance(url, str):
            fix = "this server fetches nothing, so send the image's content"
            refuse("a data: URL with a PNG or JPEG image in base64", url, fix, f"{at}.image_url.url")
        return {"type": "image", "image": _decoded(url[head.end() :], f"{at}.image_url.url")}
    form = given.get("format") if isinstance(given, dict) else given
    if form != "wav":
        refuse('an object with format "wav"', form, "convert the audio", f"{at}.input_audio.format")
    return {"type": "audio", "audio": _decoded(given.get("data"), f"{at}.input_audio.data")}


def _decoded(text: Any, at: str) -> bytes:
    """Return the bytes of base64."""
    try:
        content = base64.b64decode(text, validate=True)
    except (TypeError, ValueError):
        content = b""
    if not content:
        refuse("base64 of at least one byte", text, "encode the file's content", at)
    return content


def _prompts(value: Any) -> list[str | list[int]]:
    """Return the prompts of a request: one, or a list of them."""
    several = isinstance(value, list) and bool(value) and isinstance(value[0], (str, list))
    prompts = value if several else [value]
    if len(prompts) > _MOST_CHOICES:
        refuse(f"at most {_MOST_CHOICES} prompts", value, "send several requests")
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str) and not (
            isinstance(prompt, list) and all(type(token) is int for token in prompt)
        ):
            refuse("text or a list of token ids", prompt, "send text", f".{index}" if several else "")
    return prompts


def _bias(value: Any) -> dict[int, float]:
    """Return numbers to be added to logits, by token id."""
    found: dict[int, float] = {}
    if not isinstance(value or {}, dict) or len(value or {}) > _MOST_BIASES:
        refuse(f"an object of at most {_MOST_BIASES} token ids", value, "send token ids and numbers")
    for token, number in (value or {}).items():
        if not str(token).isdecimal() or len(str(token)) > 9:
            refuse("an object with token ids as names", token, "see /tokenize for ids", f".{str(token)[:80]}")
        if type(number) not in (int, float) or not -100 <= number <= 100:
            refuse("a number from -100 to 100", number, "send a smaller one", f".{token}")
        found[int(token)] = float(number)
    return found


def _seed(seed: int, index: int) -> int:
    """Return the seed of the choice at `index`, in the range of seeds."""
    return seed + index if seed + index < 2**64 else seed - index


def _none_for_false(value: Any) -> Any:
    """Return the number of alternatives, with None for false, as chat clients send it."""
    return None if value is False else not_bool(value)


class StreamOptions(Fields):
    """Options of a streamed response. `include_obfuscation` has no effect, because no padding is sent."""

    include_usage: bool | None = False
    include_obfuscation: bool | None = None


_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_MOST_TOOLS = 128
_MOST_DEPTH = 64
_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
#: Keywords of JSON Schema whose value is a schema, maps names to schemas, or lists schemas.
_SCHEMA = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_SCHEMAS = ("properties", "$defs", "definitions", "patternProperties")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")


def _tool_name(value: Any) -> str:
    if not isinstance(value, str) or not _TOOL_NAME.fullmatch(value):
        refuse("1 to 64 letters, digits, dots, dashes and underscores", value, "rename the tool")
    return value


def _parameters(value: Any) -> dict[str, Any]:
    """Return the schema of a tool's arguments; without one, any object."""
    if value is None:
        return {"type": "object", "properties": {}}
    if not isinstance(value, dict) or value.get("type", "object") != "object":
        refuse('a JSON schema with type "object"', value, "describe the arguments as the properties of an object")
    _check_schema(value, "", 0)
    return value


def _check_schema(schema: Any, at: str, depth: int) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict) or depth > _MOST_DEPTH:
        refuse(f"a JSON schema of at most {_MOST_DEPTH} levels", schema, "correct the schema", at)
    kinds = schema.get("type", [])
    for kind in [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else [None]:
        if kind not in _TYPES:
            refuse(f"one of {', '.join(_TYPES)}", kinds, "correct the schema", f"{at}.type")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        refuse("a list of names", required, "correct the schema", f"{at}.required")
    for name in _SCHEMA:
        # A list of schemas for items is that of older drafts.
        if name in schema and not isinstance(schema[name], list):
            _check_schema(schema[name], f"{at}.{name}", depth + 1)
    for name in _SCHEMAS:
        if not isinstance(schema.get(name, {}), dict):
            refuse("an object of schemas", schema[name], "correct the schema", f"{at}.{name}")
        for key, one in schema.get(name, {}).items():
            _check_schema(one, f"{at}.{name}.{key}", depth + 1)
    for name in _SCHEMA_LISTS:
        if not isinstance(schema.get(name, []), list):
            refuse("a list of schemas", schema[name], "correct the schema", f"{at}.{name}")
        for index, one in enumerate(schema.get(name, [])):
            _check_schema(one, f"{at}.{name}.{index}", depth + 1)


class Function(Fields):
    """A function that the model may call."""

    name: Annotated[str, PlainValidator(_tool_name)]
    description: str | None = None
    parameters: Annotated[dict[str, Any], PlainValidator(_parameters)] = Field(
        default_factory=lambda: _parameters(None)
    )
    strict: bool | None = None


class Tool(Fields):
    """A tool: a function."""

    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """Return the tool for chat templates."""
        about = {"description": self.function.description or ""}
        return {
            "type": "function",
            "function": {"name": self.function.name, **about, "parameters": self.function.parameters},
        }


class _Named(Fields):
    name: str


class NamedTool(Fields):
    """The tool that a response must call."""

    type: Literal["function"]
    function: _Named


def _choice(value: Any) -> str | NamedTool:
    if value is None or value in ("none", "auto", "required"):
        return value or "auto"
    if not isinstance(value, dict) or value.get("type") != "function":
        fix = 'send {"type": "function", "function": {"name": ...}} for one tool'
        refuse('"none", "auto", "required" or a tool', value, fix)
    return NamedTool.model_validate(value)


class CalledFunction(Fields):
    """The function of a call, with its arguments as JSON. Fields that clients add are ignored."""

    model_config = ConfigDict(extra="ignore")

    name: str
    arguments: str = "{}"


class ToolCall(Fields):
    """A call of a tool in an earlier message. Fields that clients add are ignored."""

    model_config = ConfigDict(extra="ignore")

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self, parsed: bool) -> dict[str, Any]:
        """Return the call for chat templates, with its arguments as an object if `parsed`."""
        arguments: Any = self.function.arguments
        if parsed:
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                # A call that was cut off, which the model gets to see.
                pass
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class Message(Fields):
    """A message of a conversation. Further fields (`name`) are passed to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[Any, PlainValidator(_content)] = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def plain(self, parsed: bool = True) -> dict[str, Any]:
        """Return the message for chat templates.

        Args:
            parsed: True if the arguments of calls are objects and not JSON, see `ChatRequest.prompts`.
        """
        fields = {"content": self.content} if "content" in self.model_fields_set else {}
        if self.tool_calls:
            fields["content"] = (self.content or "") if parsed else self.content
            fields["tool_calls"] = [call.plain(parsed) for call in self.tool_calls]
        if self.tool_call_id is not None:
            fields["tool_call_id"] = self.tool_call_id
        return {"role": self.role, **fields, **(self.model_extra or {})}


class JsonSchema(Fields):
    """A schema and its name. It is always enforced, `strict` or not."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Fields):
    """The constraint of the response, in the fields of several servers.

    OpenAI uses `json_schema`, llama.cpp `schema`, and text-generation-inference `value`, which huggingface_hub sends.
    """

    type: Literal["text", "json_object", "json_schema", "json", "regex"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    value: Any = None

    def constraint(self) -> Constraint | None:
        """Return the constraint, or None.

        Raises:
            InputError: If a required schema is missing, several are given, or one is given where none is allowed.
        """
        of_openai = None if self.json_schema is None else self.json_schema.schema_
        given = {"json_schema.schema": of_openai, "schema": self.schema_, "value": self.value}
        given = {name: form for name, form in given.items() if form is not None}
        if len(given) > 1:
            raise InputError(f"response_format must have one schema, got {' and '.join(given)}; send one of them")
        name, form = next(iter(given.items()), ("", None))
        if self.type == "text":
            if form is not None:
                raise InputError(f'response_format.{name} must be left out with type "text"; send type "json_schema"')
            return None
        if self.type == "regex":
            if not isinstance(form, str):
                raise InputError('response_format.value must be a pattern with type "regex", got none; send it as text')
            return Constraint("regex", form)
        if form is None:
            if self.type == "json_object" and self.json_schema is None:
                return Constraint.json_object()
            raise InputError(
                f'response_format must have a schema with type "{self.type}", got none; send json_schema.schema'
            )
        if not isinstance(form, (dict, str)):
            raise InputError(f"response_format.{name} must be an object, got {form!r:.80}; send a JSON schema")
        try:
            return Constraint("json_schema", form if isinstance(form, str) else json.dumps(form))
        except RecursionError:
            raise InputError(
                "the JSON schema must be less deeply nested, got one too deep to read; flatten it"
            ) from None


class BaseRequest(Fields):
    """Fields of all requests for a response."""

    model: str
    temperature: Number = None
    top_p: Number = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: _Unused = None
    service_tier: _Unused = None
    safety_identifier: _Unused = None
    prompt_cache_key: _Unused = None
    prompt_cache_options: _Unused = None
    prompt_cache_retention: _Unused = None


class _Request(BaseRequest):
    """Fields of both kinds of requests for completions.

    Fields that would change the response and are not supported only accept values without an effect. Unknown fields are
    refused, as in the API.
    """

    top_k: Whole = None
    min_p: Number = None
    repetition_penalty: Number = None
    seed: Whole = None
    stop: Annotated[Any, PlainValidator(_stops)] = ()
    max_tokens: Limit = None
    n: _Choices = None
    presence_penalty: _Penalty = None
    frequency_penalty: _Penalty = None
    logit_bias: Annotated[Any, PlainValidator(_bias)] = {}

    def _options(
        self, default: SamplingOptions, limit: int | None, alternatives: int | None, echo: bool = False
    ) -> CompletionOptions:
        common = {"repetition_penalty": self.repetition_penalty, "seed": self.seed}
        top_k = 0 if self.top_k in _ALL_TOKENS else self.top_k
        limits = {"top_k": top_k, "top_p": self.top_p, "min_p": self.min_p}
        is_greedy = default.is_greedy if self.temperature is None else self.temperature == 0
        if is_greedy:
            # Limits are checked, because greedy requests carry these fields, too.
            DEFAULT_SAMPLING.over(**limits)
            sampling = default.over(temperature=0, **common)
        else:
            sampling = default.over(temperature=self.temperature, **limits, **common)
        return CompletionOptions(
            sampling,
            limit,
            self.stop,
            alternatives,
            echo=echo,
            logit_bias=self.logit_bias,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
        )

    def choices(self, options: CompletionOptions) -> list[CompletionOptions]:
        """Return the options of each of `n` choices, which differ in their seeds."""
        seed = options.sampling.seed
        return [
            options if seed is None else replace(options, sampling=replace(options.sampling, seed=_seed(seed, index)))
            for index in range(self.n or 1)
        ]


class ChatRequest(_Request):
    """A request of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1), FailFast()]
    max_completion_tokens: Limit = None
    logprobs: bool | None = None
    top_logprobs: Annotated[_Alternatives, BeforeValidator(not_bool)] = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=_MOST_TOOLS)] | None = None
    tool_choice: Annotated[Any, PlainValidator(_choice)] = "auto"
    parallel_tool_calls: bool | None = None
    functions: _NoFunctions = None
    function_call: _NoCall = None
    modalities: Annotated[Any, only(["text"], fix="this server returns only text, so leave it out")] = None
    audio: Annotated[Any, only(fix="this server returns only text, so leave it out")] = None
    moderation: Annotated[Any, only(fix="responses are not moderated, so leave it out")] = None
    web_search_options: Annotated[Any, only(fix="this server does not search, so leave it out")] = None
    reasoning_effort: Annotated[Any, only(fix="describe it in a message, or leave it out")] = None
    verbosity: Annotated[Any, only("medium", fix="describe the length in a message, or leave it out")] = None
    store: Annotated[Any, only(False, fix="responses are not stored, so leave it out")] = None
    prediction: _Unused = None
    metadata: _Unused = None

    def options(self, default: SamplingOptions) -> CompletionOptions:
        """Return the options of the completion.

        Args:
            default: Sampling of requests without these fields.

        Raises:
            InputError: If a value is out of range.
        """
        if self.top_logprobs and not self.logprobs:
            raise InputError("top_logprobs must be combined with logprobs; pass logprobs=true, too")
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        options = self._options(default, limit, (self.top_logprobs or 0) if self.logprobs else None)
        form = self.response_format
        return options if form is None else replace(options, constraint=form.constraint())

    def prompts(self) -> list[list[dict[str, Any]]]:
        """Return the messages for chat templates, the most common form first.

        Most templates take the arguments of calls as objects, and a few (DeepSeek's) as text.

        Raises:
            InputError: If the result of a tool has no call.
        """
        names: dict[str, str] = {}
        for index, message in enumerate(self.messages):
            names |= {call.id: call.function.name for call in message.tool_calls or ()}
            if message.role == "tool" and message.tool_call_id not in names:
                raise InputError(
                    f"messages.{index}.tool_call_id must be the id of a call in an earlier message, got "
                    f"{shown(message.tool_call_id)}; send the assistant's message with its tool_calls, too"
                )
        has_calls = any(message.tool_calls for message in self.messages)
        forms = [[message.plain(parsed) for message in self.messages] for parsed in (True, False)[: 1 + has_calls]]
        for said in (one for form in forms for one in form if one["role"] == "tool"):
            said.setdefault("name", names[said["tool_call_id"]])
        return forms

    @property
    def least_characters(self) -> int:
        """The number of characters that any chat template keeps. Some shorten messages of the assistant."""
        said = [one.content for one in self.messages if one.role != "assistant"]
        parts = [[content] if isinstance(content, str) else content or () for content in said]
        texts = [part if isinstance(part, str) else part.get("text", "") for one in parts for part in one]
        return sum(len(text.strip()) for text in texts)

    def used_tools(self) -> list[Tool]:
        """Return the tools that the response may call.

        Raises:
            InputError: If two tools have one name, or `tool_choice` names another one.
        """
        tools = list(self.tools or ())
        names = [tool.function.name for tool in tools]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise InputError(f"tools must have different names, got {twice!r} twice; rename one")
        if self.tool_choice == "none":
            return []
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            if name not in names:
                raise InputError(
                    f"tool_choice must name one of the tools, got {shown(name)}; send one of "
                    f"{', '.join(names)[:200] or 'no tool'}"
                )
            return [tool for tool in tools if tool.function.name == name]
        if self.tool_choice == "required" and not tools:
            raise InputError('tool_choice must be "auto" or "none" without tools, got "required"; send tools')
        return tools

    @property
    def must_call(self) -> bool:
        """True if the response must be a call."""
        return self.tool_choice not in ("none", "auto")

    def plain_tools(self) -> list[dict[str, Any]]:
        """Return the tools for chat templates."""
        return [] if self.tool_choice == "none" else [tool.plain() for tool in self.tools or ()]


class CompletionRequest(_Request):
    """A request of `POST /v1/completions`."""

    #: Text or token ids, or a list of either.
    prompt: Annotated[Any, PlainValidator(_prompts)]
    max_tokens: Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(not_bool)] = 16
    logprobs: Annotated[_Alternatives, BeforeValidator(_none_for_false)] = None
    echo: bool | None = None
    best_of: Annotated[Any, only(1, fix="send n, and choose one of the responses")] = None
    suffix: Annotated[Any, only("", fix="text after the response is not supported, so leave it out")] = None

    def options(self, default: SamplingOptions) -> CompletionOptions:
        """Return the options of the completion, see `ChatRequest.options`."""
        if self.max_tokens == 0 and not self.echo:
            raise InputError("max_tokens must be at least 1 without echo, got 0; send echo=true for the prompt alone")
        return replace(self._options(default, self.max_tokens, self.logprobs, bool(self.echo)), continues=True)

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts."""
        prompts: list[str | list[int]] = self.prompt
        return prompts


class TokenizeRequest(Fields):
    """A request of `POST /tokenize`, in the fields of vLLM (`prompt`, `messages`) and llama.cpp (`content`)."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: Annotated[list[Tool], Field(max_length=_MOST_TOOLS)] | None = None
    add_special_tokens: bool = True

    def input(self) -> str | ChatRequest:
        """Return the text, or the messages as a request.

        Raises:
            InputError: If there is not exactly one.
        """
        given = [value for value in (self.prompt, self.content, self.messages) if value is not None]
        if len(given) != 1:
            raise InputError(f"one of prompt, content and messages must be given, got {len(given)} of them")
        if isinstance(given[0], str):
            return given[0]
        return ChatRequest(model=self.model or "", messages=given[0], tools=self.tools)


class DetokenizeRequest(Fields):
    """A request of `POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0), BeforeValidator(not_bool)]], FailFast()]


def field_of(message: str) -> str | None:
    """Return the field of a request that an error message begins with; None if it names none."""
    found = re.match(r"([a-z_]+)(\.[\w.]+)? (must|requires)", message)
    known = ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys()
    return found[1] + (found[2] or "") if found and found[1] in known else None
