"""Fields of requests, by the reference of OpenAI's API, and the error messages for those that are not supported.

https://platform.openai.com/docs/api-reference/chat/create and .../completions/create. `top_k`, `min_p` and
`repetition_penalty` are additional fields, as other servers have them.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from ...decoding.completion import CompletionOptions
from ...errors import InputError
from ...generation.checkpoint_settings import CheckpointSettings
from ...generation.constraint import Constraint
from ...generation.sampling_options import SamplingOptions

_REFUSED = "refused"
_BODY = "the body"
#: Constraint of a value, by the type of pydantic's error.
_MUST: Mapping[str, str] = {
    "string_type": "text",
    "string_unicode": "text in UTF-8",
    "string_too_short": "text of at least {min_length} characters",
    "string_too_long": "text of at most {max_length} characters",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number of fewer digits",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "literal_error": "{expected}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
}

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_short.maxlevel, _short.maxdict, _short.maxlist = 3, 4, 4


def shown(value: Any) -> str:
    """Return a request's value as text for an error message, shortened."""
    return _short.repr(value)


def refuse(must: str, value: Any, fix: str, at: str = "") -> NoReturn:
    """Refuse the value of a validator.

    Args:
        must: Constraint of the value.
        value: The value.
        fix: Remedy.
        at: Path within the value, such as ".0.type".

    Raises:
        PydanticCustomError: Always.
    """
    # pydantic encodes it as UTF-8, which lone surrogates do not allow.
    at = at.encode("utf-8", "backslashreplace").decode()
    raise PydanticCustomError(_REFUSED, "{must}", {"must": must, "got": shown(value), "fix": fix, "at": at})


def message_of(error: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the message for one of pydantic's errors, and the name of its field.

    Args:
        error: An error from `ValidationError.errors()`, with a `loc` that begins with "body".

    Returns:
        The message, and the field as the API's `param`; None for the whole body.
    """
    context = error.get("ctx", {})
    # The first is "body".
    field = ".".join(str(part) for part in error["loc"][1:]) + context.get("at", "")
    field = field.removeprefix(".")[:200]
    name = field or _BODY
    if error["type"] == _REFUSED:
        return f"{name} must be {context['must']}, got {context['got']}; {context['fix']}", field or None
    if error["type"] == "missing":
        return f"{name} must be given, got nothing; send it", field or None
    must = _MUST.get(error["type"], "a value of another kind").format(**context)
    return f"{name} must be {must}, got {shown(error.get('input'))}; change it", field or None


class Fields(BaseModel):
    """An object that refuses unknown fields by name."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _are_known(cls, given: Any) -> Any:
        # Checked here, because pydantic would list every one of a million fields.
        if isinstance(given, dict) and cls.model_config["extra"] == "forbid":
            known = [field.alias or name for name, field in cls.model_fields.items()]
            for name in given:
                if name not in known:
                    near = get_close_matches(str(name)[:80], known, 1)
                    fix = f"there is no such field; did you mean {near[0]}?" if near else "there is no such field"
                    refuse("left out", given[name], fix, at=f".{str(name)[:80]}")
        return given


def only(*harmless: Any, fix: str) -> PlainValidator:
    """Return a validator for a field that only accepts values without an effect.

    Args:
        harmless: Accepted values besides null.
        fix: Remedy for other values.
    """
    return PlainValidator(lambda value: _harmless(value, harmless, fix))


def _harmless(value: Any, harmless: Collection[Any], fix: str) -> None:
    if value is not None and not any(value == one for one in harmless):
        refuse(" or ".join(map(json.dumps, [*harmless, None])), value, fix)


def not_bool(value: Any) -> Any:
    """Refuse true and false for a number, because pydantic converts them to 1 and 0."""
    if isinstance(value, bool):
        refuse("a number", value, "send a number, or leave it out")
    return value


#: Numbers; pydantic would also accept true and false.
Whole = Annotated[int | None, BeforeValidator(not_bool)]
Number = Annotated[float | None, BeforeValidator(not_bool)]

#: Sampling of requests by the API's defaults.
DEFAULT_SAMPLING = SamplingOptions(temperature=1.0)
_MOST_ALTERNATIVES = 20


def default_sampling(checkpoint: CheckpointSettings) -> SamplingOptions:
    """Return the sampling of requests without these fields: the checkpoint's if it samples, else the API's."""
    return DEFAULT_SAMPLING if checkpoint.sampling.is_greedy else checkpoint.sampling


#: Values of `top_k` that other servers use for all tokens.
_ALL_TOKENS = (0, -1)

_One = Annotated[Any, only(1, fix="send one request for each response")]
_NoPenalty = Annotated[Any, only(0, fix="use repetition_penalty, or leave it out")]
_NoTools = Annotated[Any, only([], fix="tools are not supported, so leave it out and describe them in a message")]
_NoChoice = Annotated[Any, only("none", "auto", fix="tools are not supported, so leave it out")]
#: A field that does not affect the response.
_Unused = Any
#: Limit of new tokens.
Limit = Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(not_bool)]
_Alternatives = Annotated[int, Field(ge=0, le=_MOST_ALTERNATIVES)] | None


def _stops(value: Any) -> tuple[str, ...]:
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        refuse("text or a list of texts", value, "send the texts that end the response, or leave it out")
    return tuple(texts)


def _content(value: Any) -> Any:
    """Return a message's content for chat templates: text, with parts joined."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        refuse("text or a list of parts", value, "send text")
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            fix = "this server takes only text, so leave images, audio and files out"
            refuse('"text"', part if kind is None else kind, fix, at=f".{index}.type")
        if not isinstance(part.get("text"), str):
            refuse("text", part.get("text"), "send the part's text", at=f".{index}.text")
    return "".join(part["text"] for part in value)


def _prompt(value: Any) -> str | list[int]:
    """Return a prompt, also from a list of one prompt."""
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        if len(value) != 1:
            refuse("one prompt", value, f"got {len(value)} prompts; send one request for each")
        value = value[0]
    if isinstance(value, str) or (isinstance(value, list) and all(type(token) is int for token in value)):
        return value
    refuse("text or a list of token ids", value, "send text")


def _none_for_false(value: Any) -> Any:
    """Return the number of alternatives, with None for false, as chat clients send it."""
    return None if value is False else not_bool(value)


class StreamOptions(Fields):
    """Options of a streamed response. `include_obfuscation` has no effect, because no padding is sent."""

    include_usage: bool | None = False
    include_obfuscation: bool | None = None


class Message(Fields):
    """A message of a conversation. Further fields (`name`, `tool_calls`) are passed to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[Any, PlainValidator(_content)] = None

    def plain(self) -> dict[str, Any]:
        """Return the message for chat templates."""
        content = {"content": self.content} if "content" in self.model_fields_set else {}
        return {"role": self.role, **content, **(self.model_extra or {})}


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


class _Request(Fields):
    """Fields of both kinds of requests.

    Fields that would change the response and are not supported only accept values without an effect. Unknown fields are
    refused, as in the API.
    """

    model: str
    temperature: Number = None
    top_p: Number = None
    top_k: Whole = None
    min_p: Number = None
    repetition_penalty: Number = None
    seed: Whole = None
    stop: Annotated[Any, PlainValidator(_stops)] = ()
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Limit = None
    n: _One = None
    presence_penalty: _NoPenalty = None
    frequency_penalty: _NoPenalty = None
    logit_bias: Annotated[Any, only({}, fix="tokens cannot be weighted, so leave it out")] = None
    user: _Unused = None
    service_tier: _Unused = None
    safety_identifier: _Unused = None
    prompt_cache_key: _Unused = None
    prompt_cache_options: _Unused = None
    prompt_cache_retention: _Unused = None

    def _options(self, default: SamplingOptions, limit: int | None, alternatives: int | None) -> CompletionOptions:
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
        return CompletionOptions(sampling, limit, self.stop, alternatives)


class ChatRequest(_Request):
    """A request of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1), FailFast()]
    max_completion_tokens: Limit = None
    logprobs: bool | None = None
    top_logprobs: Annotated[_Alternatives, BeforeValidator(not_bool)] = None
    response_format: ResponseFormat | None = None
    tools: _NoTools = None
    functions: _NoTools = None
    tool_choice: _NoChoice = None
    function_call: _NoChoice = None
    modalities: Annotated[Any, only(["text"], fix="this server returns only text, so leave it out")] = None
    audio: Annotated[Any, only(fix="this server returns only text, so leave it out")] = None
    moderation: Annotated[Any, only(fix="responses are not moderated, so leave it out")] = None
    web_search_options: Annotated[Any, only(fix="this server does not search, so leave it out")] = None
    reasoning_effort: Annotated[Any, only(fix="describe it in a message, or leave it out")] = None
    verbosity: Annotated[Any, only("medium", fix="describe the length in a message, or leave it out")] = None
    store: Annotated[Any, only(False, fix="responses are not stored, so leave it out")] = None
    parallel_tool_calls: _Unused = None
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

    def prompt(self) -> list[dict[str, Any]]:
        """Return the messages for chat templates."""
        return [message.plain() for message in self.messages]


class CompletionRequest(_Request):
    """A request of `POST /v1/completions`."""

    #: Text, or token ids.
    prompt: Annotated[Any, PlainValidator(_prompt)]
    max_tokens: Limit = 16
    logprobs: Annotated[_Alternatives, BeforeValidator(_none_for_false)] = None
    echo: Annotated[Any, only(False, fix="prepend the prompt to the response yourself, or leave it out")] = None
    best_of: _One = None
    suffix: Annotated[Any, only("", fix="text after the response is not supported, so leave it out")] = None

    def options(self, default: SamplingOptions) -> CompletionOptions:
        """Return the options of the completion, see `ChatRequest.options`."""
        return replace(self._options(default, self.max_tokens, self.logprobs), continues=True)

    def text(self) -> str | list[int]:
        """Return the prompt."""
        prompt: str | list[int] = self.prompt
        return prompt
