"""Conversion of prompts to token ids, and of tokens to text piece by piece."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, cast

from ..errors import InputError
from ..models.tokenizers.text import check_cost, tokenizer_errors
from .control_tokens import ControlTokens, MarkedMessages
from .templates import render_chat
from .token_text import StopStrings, TextStream

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from ..models.tokenizers.text import TextTokenizer

#: Levels of nested lists and mappings in messages and tools.
_MOST_LEVELS = 100
_ENCODE = "the tokenizer cannot encode the prompt"


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase | TextTokenizer,
    prompt: str | Sequence[Mapping[str, Any]],
    *,
    starts: bool = True,
    split_special_tokens: bool = True,
) -> torch.Tensor:
    """Return the token ids of a prompt, int64 [1, length], see `encode_ids`."""
    # Imported here, because the native runner encodes prompts without torch.
    import torch

    ids = encode_ids(tokenizer, prompt, starts=starts, split_special_tokens=split_special_tokens)
    return torch.tensor([ids], dtype=torch.int64).reshape(1, -1)


def encode_ids(
    tokenizer: PreTrainedTokenizerBase | TextTokenizer,
    prompt: str | Sequence[Mapping[str, Any]],
    *,
    starts: bool = True,
    split_special_tokens: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Return the token ids of a prompt; there may be none.

    Args:
        tokenizer: The tokenizer, with its chat template.
        prompt: Text, or chat messages such as `[{"role": "user", "content": "hello"}]`, which the tokenizer's chat
            template renders up to the start of the assistant's message.
        starts: True if text begins a sequence, and so gets the tokenizer's special tokens (templates write their own).
        split_special_tokens: True to treat control tokens in messages as text, so that a user cannot forge another
            turn. In a prompt of text they are always tokens.
        tools: Tools that the template describes to the model, see `render_chat`.

    Raises:
        InputError: If the prompt is neither, is not valid Unicode, or the tokenizer has no chat template for messages,
            or one that fails or takes too long.
    """
    if isinstance(prompt, str):
        check_text(prompt)
        check_cost(tokenizer, prompt)
        with tokenizer_errors(_ENCODE):
            # Without transformers' warning of long texts, because the limit is that of the cache.
            ids = tokenizer(prompt, add_special_tokens=starts, verbose=False)["input_ids"]
    elif isinstance(prompt, Sequence) and prompt and all(isinstance(message, Mapping) for message in prompt):
        if not getattr(tokenizer, "chat_template", None):
            raise InputError(
                f"got {len(prompt)} chat messages, but the tokenizer has no chat template; "
                "pass the prompt as text, or set tokenizer.chat_template before exporting"
            )
        messages = [dict(message) for message in cast(Sequence[Mapping[str, Any]], prompt)]
        check_depth("messages", messages)
        check_depth("tools", tools)
        texts = [*_texts(messages), *_texts(tools)]
        # One by one, because an error gives the offset in the message.
        for text in texts:
            check_text(text)
        check_cost(tokenizer, "\n".join(texts))
        with tokenizer_errors(_ENCODE):
            control = ControlTokens(tokenizer)
            every = [*messages, {"tools": list(tools)}]
            marked = control.marked(every) if split_special_tokens else MarkedMessages(every)
        *said, described = marked.messages
        rendered = render_chat(tokenizer, said, tools=described["tools"])
        check_text(rendered)
        check_cost(tokenizer, rendered)
        with tokenizer_errors(_ENCODE):
            ids = control.encode(rendered, marked)
    else:
        raise InputError(
            f"prompt must be text, or chat messages as a list of mappings with 'role' and 'content', got {prompt!r:.80}"
        )
    return list(ids)


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts of messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(one)


def check_depth(name: str, value: Any) -> None:
    """Check that lists and mappings are not deeply nested, because a chat template may be a recursive program.

    Raises:
        InputError: If they are.
    """
    within = [value]
    for _ in range(_MOST_LEVELS):
        nested = (one.values() if isinstance(one, Mapping) else one for one in within)
        within = [part for one in nested for part in one if isinstance(part, (Mapping, list, tuple))]
    if within:
        raise InputError(f"{name} must have at most {_MOST_LEVELS} levels, got more; flatten them")


def check_text(text: str) -> None:
    """Check that a text is valid Unicode: bytes of another encoding from a terminal or file are lone surrogates.

    Raises:
        InputError: If there is a lone surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the prompt must be UTF-8, got {text[error.start]!r} at character {error.start}; save it as UTF-8"
        ) from error


class TextPieces:
    """Text of one row's tokens, piece by piece, up to an end token or a stop string, which are not returned.

    Stop strings may include special tokens.

    Args:
        tokenizer: The tokenizer of the tokens.
        end_tokens: Tokens that end the text.
        stop_strings: Strings that end the text with the token that completes them.
        after: Tokens whose text the row's text continues; see `TextStream`.
        shown: Special tokens that are part of the text; others are left out.

    Attributes:
        ended: True once the text has ended.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | TextTokenizer,
        end_tokens: Collection[int] = (),
        stop_strings: Sequence[str] = (),
        after: Sequence[int] = (),
        shown: Collection[str] = (),
    ) -> None:
        self._stream, self._shown = TextStream(tokenizer, after), shown
        self._stops = StopStrings(stop_strings)
        self._end_tokens = end_tokens
        self.ended = False

    def push(self, token: int) -> str:
        """Return the text that `token` adds, and all held back text if it is the last; possibly none."""
        if self.ended:
            return ""
        if token in self._end_tokens:
            return self.finish()
        special = self._stream.special(token)
        if special is not None and special[0] in self._shown:
            piece = self._stops.push(self._stream.settled() + special[0])
        elif special is not None:
            piece = self._stops.hide(*special)
        else:
            text = self._stream.push(token)
            piece = self._stops.push(text) if text else ""
            if not self._stops.stopped:
                piece += self._stops.look_ahead(self._stream.ahead)
        self.ended = self._stops.stopped
        return piece

    def finish(self) -> str:
        """Return the text that is still held back; none comes after it."""
        if self.ended:
            return ""
        self.ended = True
        rest = self._stops.push(self._stream.finish())
        return rest if self._stops.stopped else rest + self._stops.finish()


def stream_text(
    tokens: Iterable[int],
    tokenizer: PreTrainedTokenizerBase | TextTokenizer,
    end_tokens: Collection[int] = (),
    stop_strings: Sequence[str] = (),
    after: Sequence[int] = (),
) -> Iterator[str]:
    """Yield the text of a stream of tokens, piece by piece, up to an end token or a stop string; see `TextPieces`."""
    pieces = TextPieces(tokenizer, end_tokens, stop_strings, after)
    for token in tokens:
        piece = pieces.push(token)
        if piece:
            yield piece
        if pieces.ended:
            return
    rest = pieces.finish()
    if rest:
        yield rest


def stream_texts(
    steps: Iterable[torch.Tensor],
    tokenizer: PreTrainedTokenizerBase | TextTokenizer,
    end_tokens: Collection[int] = (),
    stop_strings: Sequence[str] = (),
    after: Sequence[Sequence[int]] = (),
) -> Iterator[list[str]]:
    """Yield the texts of a stream of tokens int64 [batch], a piece per row and step, empty where a row adds nothing."""
    rows: list[TextPieces] = []
    for tokens in steps:
        rows = rows or [
            TextPieces(tokenizer, end_tokens, stop_strings, before)
            for before, _ in zip(after or repeat(()), tokens, strict=False)
        ]
        pieces = [row.push(token) for row, token in zip(rows, tokens.tolist(), strict=True)]
        if any(pieces):
            yield pieces
        if all(row.ended for row in rows):
            return
    pieces = [row.finish() for row in rows]
    if any(pieces):
        yield pieces
