"""Responses in OpenAI's format: complete, and as chunks of a stream."""

from __future__ import annotations

import secrets
import string
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...decoding.completion import NO_TOKEN, Completion, Piece
from ...generation.templates import TemplateParser
from ...generation.token_text import TokenTexts
from ...generation.tool_calls import Part, ResponseParser

Parser = ResponseParser | TemplateParser

#: Characters and length of the ids of calls. Mistral's templates take no others.
_ID_CHARACTERS, _ID_LENGTH = string.ascii_letters + string.digits, 9


def call_id() -> str:
    """Return a new id of a tool call."""
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))


@dataclass
class Answer:
    """The response so far to a prompt, one of the choices of a `Response`.

    Args:
        parser: Parser of the text; None if all text is content.

    Attributes:
        pieces: The pieces.
        content: Text of the content.
        reasoning: Text of the reasoning.
        calls: Calls of tools: id, name and arguments.
        reasoning_tokens: Number of tokens of the reasoning, with the marks around it.
    """

    parser: Parser | None = None
    pieces: list[Piece] = field(default_factory=list)
    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    reasoning_tokens: int = 0
    _is_reasoning: bool = False

    def add(self, piece: Piece, is_last: bool) -> list[Part]:
        """Add the next piece, and return the parts that it completes."""
        if piece.token != NO_TOKEN:
            self.pieces.append(piece)
        if self.parser is None:
            parts = [Part("content", piece.text)]
        else:
            parts = self.parser.feed(piece.text) + (self.parser.finish() if is_last else [])
        for part in parts:
            if part.kind == "content":
                self.content += part.text
            elif part.kind == "reasoning":
                self.reasoning += part.text
            elif part.kind == "name":
                self.calls.append({"id": call_id(), "name": part.text, "arguments": ""})
            else:
                self.calls[part.call]["arguments"] += part.text
        kinds = {part.kind for part in parts}
        # A token without text, such as part of a mark, belongs to what was before it.
        is_counted = "reasoning" in kinds or (self._is_reasoning and not kinds)
        self.reasoning_tokens += is_counted and piece.token != NO_TOKEN
        self._is_reasoning = parts[-1].kind == "reasoning" if parts else self._is_reasoning
        return parts

    def finish_reason(self, completion: Completion) -> str | None:
        """Return the API's reason for the end."""
        return "tool_calls" if self.calls and completion.finish_reason == "stop" else completion.finish_reason

    def message(self) -> dict[str, Any]:
        """Return the message of a chat completion."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["content"] = self.content or None
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
                for call in self.calls
            ]
        return message

    def delta(self, part: Part) -> dict[str, Any]:
        """Return what a part, which was added, changes in a streamed message."""
        if part.kind == "content":
            return {"content": part.text}
        if part.kind == "reasoning":
            return {"reasoning_content": part.text}
        if part.kind == "arguments":
            return {"tool_calls": [{"index": part.call, "function": {"arguments": part.text}}]}
        function = {"name": part.text, "arguments": ""}
        call = {"index": part.call, "id": self.calls[part.call]["id"], "type": "function", "function": function}
        return {"tool_calls": [call]}


@dataclass
class Response:
    """A response to one request.

    Args:
        model: Name of the model.
        chat: True for a chat completion, False for a text completion.
        texts: Text of each token.
        answers: Its choices.
    """

    model: str
    chat: bool
    texts: TokenTexts
    answers: Sequence[Answer] = field(default_factory=lambda: [Answer()])

    def __post_init__(self) -> None:
        self._id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def add(self, piece: Piece, is_last: bool = False, index: int = 0) -> None:
        """Add the next piece of a choice."""
        self.answers[index].add(piece, is_last)

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the complete response, from the completion of each choice."""
        choices = [
            {
                "index": index,
                **({"message": answer.message()} if self.chat else {"text": answer.content}),
                "logprobs": self._logprobs(answer.pieces, 0),
                "finish_reason": answer.finish_reason(completion),
            }
            for index, (answer, completion) in enumerate(zip(self.answers, completions, strict=True))
        ]
        return self._head("chat.completion" if self.chat else "text_completion", choices) | {
            "usage": usage_of(completions, self.answers)
        }

    def first(self, index: int = 0) -> dict[str, Any] | None:
        """Return the chunk before any text of a streamed message, which has the role; None for a text completion."""
        if not self.chat:
            return None
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None)

    def chunks(self, completion: Completion, piece: Piece, index: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a piece that was not added yet."""
        answer = self.answers[index]
        is_last, offset = completion.finish_reason is not None, len(answer.content)
        parts, logprobs = answer.add(piece, is_last), self._logprobs([piece], offset)
        if not self.chat:
            text = "".join(part.text for part in parts)
            yield self._chunk(index, {"text": text, "logprobs": logprobs}, completion.finish_reason)
            return
        deltas = [answer.delta(part) for part in parts]
        if not deltas and (is_last or logprobs is not None):
            deltas = [{} if answer.calls else {"content": ""}]
        for number, delta in enumerate(deltas, 1):
            reason = answer.finish_reason(completion) if number == len(deltas) else None
            # All log probabilities belong to the first part of a piece.
            yield self._chunk(index, {"delta": delta, "logprobs": logprobs if number == 1 else None}, reason)

    def last(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the last chunk of a stream, which has the usage and no choice."""
        return self._head("chat.completion.chunk" if self.chat else "text_completion", []) | {
            "usage": usage_of(completions, self.answers)
        }

    def _chunk(self, index: int, fields: Mapping[str, Any], reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "logprobs": None, **fields, "finish_reason": reason}
        return self._head("chat.completion.chunk" if self.chat else "text_completion", [choice])

    def _head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self.model, "choices": choices}

    def _logprobs(self, pieces: Sequence[Piece], offset: int) -> dict[str, Any] | None:
        # The first token of a prompt has none.
        if all(piece.logprob is None for piece in pieces):
            return None
        if self.chat:
            content = [
                {
                    **self._token(piece.token, piece.logprob),
                    "top_logprobs": [self._token(token, logprob) for token, logprob in piece.alternatives],
                }
                for piece in pieces
            ]
            return {"content": content, "refusal": None}
        offsets = []
        for piece in pieces:
            offsets.append(offset)
            offset += len(piece.text)
        return {
            "tokens": [self._name(piece.token) for piece in pieces],
            "token_logprobs": [piece.logprob for piece in pieces],
            "top_logprobs": [None if piece.logprob is None else self._named(piece) for piece in pieces],
            "text_offset": offsets,
        }

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        # With bytes, because tokens that are part of a character are all U+FFFD as text.
        return {"token": self.texts.text(token), "logprob": logprob, "bytes": list(self.texts.bytes(token))}

    def _name(self, token: int) -> str:
        r"""Return the text of a token, or `bytes:\xe4` for one that is part of a character, as the API names it."""
        spelled = self.texts.bytes(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def _named(self, piece: Piece) -> dict[str, float | None]:
        """Return the log probabilities of the alternatives and of the token itself, by name.

        Of several tokens with the same text, the chosen one or else the most probable one gets the name; others are
        named `token_id:` and their id.
        """
        found: dict[str, float | None] = {}
        chosen = self._name(piece.token)
        for token, logprob in piece.alternatives:
            name = self._name(token)
            is_taken = name in found or (name == chosen and token != piece.token)
            found[f"token_id:{token}" if is_taken else name] = logprob
        if piece.alternatives:
            found.setdefault(chosen, piece.logprob)
        return found


def usage_of(completions: Sequence[Completion], answers: Sequence[Answer]) -> dict[str, Any]:
    """Return token counts; `cached_tokens` were already in the cache. Choices of one prompt count it once.

    If the cache was full, they include the turns or tokens that were dropped.
    """
    prompts = {tuple(one.ids): one for one in reversed(completions)}.values()
    given, new = sum(one.prompt_tokens for one in prompts), sum(one.new_tokens for one in completions)
    dropped = {name: sum(getattr(one, name) for one in prompts) for name in ("dropped_turns", "dropped_tokens")}
    return {
        "prompt_tokens": given,
        "completion_tokens": new,
        "total_tokens": given + new,
        "prompt_tokens_details": {
            "cached_tokens": sum(one.reused_tokens for one in prompts),
            **{name: count for name, count in dropped.items() if count},
        },
        "completion_tokens_details": {"reasoning_tokens": sum(one.reasoning_tokens for one in answers)},
    }


def error_of(message: str, kind: str = "invalid_request_error", **more: str | None) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    return {"error": {"message": message, "type": kind, "param": None, "code": None, **more}}
