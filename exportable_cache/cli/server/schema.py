"""What requests hold, as the reference of OpenAI's API names it, and what of that is answered here.

https://platform.openai.com/docs/api-reference/chat/create and .../completions/create. `top_k`, `min_p` and
`repetition_penalty` are not in it; other servers of open models have them under these names.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ...decoding.completion import CompletionOptions
from ...errors import InputError
from ...generation.constraint import Constraint
from ...generation.sampling import Sampling

#: The API's own default: tokens are drawn.
TEMPERATURE = 1.0
_MOST_ALTERNATIVES = 20

Zero = Annotated[float | None, Field(ge=0, le=0)]
#: Of new tokens.
Limit = Annotated[int | None, Field(ge=1)]


class StreamOptions(BaseModel):
    """Of a streamed answer."""

    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False


class TextPart(BaseModel):
    """Part of a message."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """Of a conversation. What else a message has (`name`, `tool_calls`) goes to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[TextPart] | None = None

    def plain(self) -> dict[str, Any]:
        """As chat templates take it."""
        fields = self.model_dump(exclude_unset=True)
        if isinstance(self.content, list):
            fields["content"] = "".join(part.text for part in self.content)
        return fields


class JsonSchema(BaseModel):
    """A schema and its name. It is always followed, `strict` or not."""

    model_config = ConfigDict(extra="ignore")

    name: str
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class ResponseFormat(BaseModel):
    """Of the answer's text."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def constraint(self) -> Constraint | None:
        """The form of the answer, None for any.

        Raises:
            InputError: If there is no schema where there has to be one.
        """
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Constraint.json_object()
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise InputError("response_format is of type json_schema without a schema; pass json_schema.schema")
        return Constraint("json_schema", json.dumps(self.json_schema.schema_))


class _Request(BaseModel):
    """What both kinds of requests have. Fields that would change the answer and are not answered here take only the
    value that changes nothing; others that are unknown are refused, as the API does.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Limit = None
    n: Annotated[int | None, Field(ge=1, le=1)] = None
    presence_penalty: Zero = None
    frequency_penalty: Zero = None
    logit_bias: Annotated[dict[str, float] | None, Field(max_length=0)] = None
    user: str | None = None

    def _options(self, limit: int | None, alternatives: int | None) -> CompletionOptions:
        temperature = TEMPERATURE if self.temperature is None else self.temperature
        drawn = temperature > 0
        # 1 takes all tokens. Greedy requests carry it, too.
        top_p = None if self.top_p == 1 or (not drawn and self.top_p is not None) else self.top_p
        sampling = Sampling(
            temperature,
            self.top_k if drawn else None,
            top_p,
            self.min_p if drawn else None,
            self.repetition_penalty,
            self.seed,
        )
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return CompletionOptions(sampling, limit, tuple(stop), alternatives)


class ChatRequest(_Request):
    """`POST /v1/chat/completions`"""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Limit = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=_MOST_ALTERNATIVES)] = None
    tools: Annotated[list[Any] | None, Field(max_length=0)] = None
    tool_choice: Literal["none"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: str | None = None

    def options(self) -> CompletionOptions:
        """How it is to be answered.

        Raises:
            InputError: If a value is out of range.
        """
        if self.top_logprobs is not None and not self.logprobs:
            raise InputError("top_logprobs was given without logprobs; pass logprobs=true, too")
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        options = self._options(limit, (self.top_logprobs or 0) if self.logprobs else None)
        form = self.response_format
        return options if form is None else replace(options, constraint=form.constraint())

    def prompt(self) -> list[dict[str, Any]]:
        """Messages, as chat templates take them."""
        return [message.plain() for message in self.messages]


class CompletionRequest(_Request):
    """`POST /v1/completions`"""

    #: Token ids are taken as they are.
    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: Limit = 16
    logprobs: Annotated[int | None, Field(ge=0, le=_MOST_ALTERNATIVES)] = None
    echo: Literal[False] | None = None
    best_of: Annotated[int | None, Field(ge=1, le=1)] = None
    suffix: Annotated[str | None, Field(max_length=0)] = None

    def options(self) -> CompletionOptions:
        """How it is to be answered.

        Raises:
            InputError: If a value is out of range.
        """
        return self._options(self.max_tokens, self.logprobs)

    def text(self) -> str | list[int]:
        """The prompt.

        Raises:
            InputError: If there are several.
        """
        if isinstance(self.prompt, list) and self.prompt and isinstance(self.prompt[0], str | list):
            if len(self.prompt) != 1:
                raise InputError(f"got {len(self.prompt)} prompts; send one a request")
            return self.prompt[0]
        return self.prompt  # type: ignore[return-value]
