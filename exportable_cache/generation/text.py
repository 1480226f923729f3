"""Text in and out: prompts to token ids, and tokens to text piece by piece."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InputError
from .templates import limited_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..models.text_tokenizer import TextTokenizer

# What decoders put in place of bytes that are not (yet) a character.
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase | TextTokenizer,
    prompt: str | Sequence[Mapping[str, Any]],
    *,
    starts: bool = True,
) -> torch.Tensor:
    """Token ids of a prompt.

    Args:
        prompt: Text, or chat messages such as `[{"role": "user", "content": "hello"}]`, which the tokenizer's chat
            template renders up to where the assistant begins.
        starts: Whether text begins a sequence, and so gets the tokenizer's special tokens (the template has its own).

    Returns:
        int64 [1, length]; length may be 0.

    Raises:
        InputError: If the prompt is neither, it is no text that has a form in UTF-8, or the tokenizer has no chat
            template for messages, or one that fails or takes too long.
    """
    if isinstance(prompt, str):
        check_text(prompt)
        ids = tokenizer(prompt, add_special_tokens=starts)["input_ids"]
    elif isinstance(prompt, Sequence) and prompt and all(isinstance(message, Mapping) for message in prompt):
        if not getattr(tokenizer, "chat_template", None):
            raise InputError(
                f"got {len(prompt)} chat messages, but the tokenizer has no chat template; "
                "pass the prompt as text, or set tokenizer.chat_template before exporting"
            )
        messages = [dict(message) for message in prompt]
        for message in messages:
            for text in message.values():
                if isinstance(text, str):
                    check_text(text)
        with limited_template(tokenizer.chat_template):
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)[
                "input_ids"
            ]
    else:
        raise InputError(
            f"prompt is {prompt!r:.80}; pass text, or chat messages as a list of mappings with 'role' and 'content'"
        )
    return torch.tensor([ids], dtype=torch.int64).reshape(1, -1)


def check_text(text: str) -> None:
    """Refuse what is no text: bytes of another encoding that a terminal or a file gave, kept as lone surrogates.

    Raises:
        InputError: If there is one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the prompt is no UTF-8: character {error.start} is {text[error.start]!r}; save it as UTF-8"
        ) from error


class TextStream:
    """Detokenises one token at a time. The pieces join to what decoding all tokens at once gives.

    A piece never ends inside a character: bytes that do not make one yet are held back, until they do or the stream
    ends.
    Special tokens give no text, and spaces are not cleaned up, which later tokens could undo.

    Args:
        tokenizer: Its `decode` is called on the newest few tokens only.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | TextTokenizer) -> None:
        self._tokenizer = tokenizer
        # Tokens given out last, then those held back: how a token reads may depend on the one before it.
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """Text that `token` completes, possibly none."""
        self._held.append(token)
        piece = self._piece()
        if not piece or piece.endswith(_REPLACEMENT):
            return ""
        self._context, self._held = self._held, []
        return piece

    def finish(self) -> str:
        """Text still held back."""
        piece = self._piece() if self._held else ""
        self._context, self._held = [], []
        return piece

    def _piece(self) -> str:
        return self._decode(self._context + self._held)[len(self._decode(self._context)) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class StopStrings:
    """Ends a text at the first of some strings, which is never given out, not even in part.

    `StopStrings(["END"])` gives "x" for "xE", nothing for "N", and "EN" back with "y" for "y"; on "D" instead it stops.

    Args:
        strings: Not empty, any number of them.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """The text that may be given out now that `piece` follows; sets `stopped` once a string is complete."""
        text = self._held + piece
        found = [index for index in (text.find(string) for string in self._strings) if index >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        kept = max((_overlap(text, string) for string in self._strings), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def finish(self) -> str:
        """Text that could have begun a string and did not."""
        text, self._held = self._held, ""
        return text


class TextPieces:
    """Text of one row's tokens, piece by piece, up to an end token or a stop string, neither of which is given out.

    Args:
        tokenizer: Of the tokens.
        end_tokens: Any of these ends the text.
        stop_strings: So does any of these.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | TextTokenizer,
        end_tokens: Collection[int] = (),
        stop_strings: Sequence[str] = (),
    ) -> None:
        self._stream = TextStream(tokenizer)
        self._stops = StopStrings(stop_strings)
        self._end_tokens = end_tokens
        self.ended = False

    def push(self, token: int) -> str:
        """Text that `token` adds, and what was held back where it is the last; possibly none."""
        if self.ended:
            return ""
        if token in self._end_tokens:
            return self.finish()
        piece = self._stops.push(self._stream.push(token))
        self.ended = self._stops.stopped
        return piece

    def finish(self) -> str:
        """Text still held back; none comes after it."""
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
) -> Iterator[str]:
    """Text of a stream of tokens, piece by piece, up to an end token or a stop string, neither of which is given
    out.
    """
    pieces = TextPieces(tokenizer, end_tokens, stop_strings)
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
) -> Iterator[list[str]]:
    """Texts of a stream of tokens int64 [batch], a piece per row and step, empty where a row adds nothing."""
    rows: list[TextPieces] = []
    for tokens in steps:
        rows = rows or [TextPieces(tokenizer, end_tokens, stop_strings) for _ in tokens]
        pieces = [row.push(token) for row, token in zip(rows, tokens.tolist(), strict=True)]
        if any(pieces):
            yield pieces
        if all(row.ended for row in rows):
            return
    pieces = [row.finish() for row in rows]
    if any(pieces):
        yield pieces


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that begins `string` without completing it."""
    return next((size for size in range(min(len(text), len(string) - 1), 0, -1) if string.startswith(text[-size:])), 0)
