"""Responses in OpenAI's format: complete, and as chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...decoding.completion import Completion, Piece
from ...generation.token_text import TokenTexts


@dataclass
class Response:
    """A response to one request.

    Args:
        model: Name of the model.
        chat: True for a chat completion, False for a text completion.
        texts: Text of each token.
    """

    model: str
    chat: bool
    texts: TokenTexts
    pieces: list[Piece] = field(default_factory=list)
    text: str = ""

    def __post_init__(self) -> None:
        self._id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def add(self, piece: Piece) -> None:
        """Add the next piece."""
        self.pieces.append(piece)
        self.text += piece.text

    def whole(self, completion: Completion) -> dict[str, Any]:
        """Return the complete response."""
        fields = {"message": {"role": "assistant", "content": self.text}} if self.chat else {"text": self.text}
        choice = {
            "index": 0,
            **fields,
            "logprobs": self._logprobs(self.pieces, 0),
            "finish_reason": completion.finish_reason,
        }
        return self._head("chat.completion" if self.chat else "text_completion", [choice]) | {
            "usage": usage_of(completion)
        }

    def first(self) -> dict[str, Any] | None:
        """Return the chunk before any text of a streamed message, which has the role; None for a text completion."""
        if not self.chat:
            return None
        return self._chunk({"delta": {"role": "assistant", "content": ""}}, None)

    def chunk(self, completion: Completion, piece: Piece) -> dict[str, Any]:
        """Return the chunk of a piece that was not added yet."""
        fields: dict[str, Any] = {"delta": {"content": piece.text}} if self.chat else {"text": piece.text}
        fields["logprobs"] = self._logprobs([piece], len(self.text))
        self.text += piece.text
        return self._chunk(fields, completion.finish_reason)

    def last(self, completion: Completion) -> dict[str, Any]:
        """Return the last chunk of a stream, which has the usage and no choice."""
        return self._head("chat.completion.chunk" if self.chat else "text_completion", []) | {
            "usage": usage_of(completion)
        }

    def _chunk(self, fields: Mapping[str, Any], reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "logprobs": None, **fields, "finish_reason": reason}
        return self._head("chat.completion.chunk" if self.chat else "text_completion", [choice])

    def _head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self.model, "choices": choices}

    def _logprobs(self, pieces: Sequence[Piece], offset: int) -> dict[str, Any] | None:
        if not pieces or pieces[0].logprob is None:
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
            "top_logprobs": [self._named(piece) for piece in pieces],
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


def usage_of(completion: Completion) -> dict[str, Any]:
    """Return token counts; `cached_tokens` were already in the cache."""
    return {
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.new_tokens,
        "total_tokens": completion.prompt_tokens + completion.new_tokens,
        "prompt_tokens_details": {"cached_tokens": completion.reused_tokens},
    }


def error_of(message: str, kind: str = "invalid_request_error", **more: str | None) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    return {"error": {"message": message, "type": kind, "param": None, "code": None, **more}}
