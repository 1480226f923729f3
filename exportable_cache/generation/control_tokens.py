"""Encoding of chat messages in which control tokens stay text, so that no message can forge a turn.

Before rendering, control tokens in the messages are enclosed in two marks. In the rendered text, those without marks
come from the template. A copy of the tokenizer encodes the text: it knows the template's tokens by secret names and
treats all others as text.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ..errors import InputError
from ..models.tokenizers.text import encoded, plain_backend

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerBase

    from ..models.tokenizers.text import TextTokenizer

# Characters for private use; two that the messages do not have are the marks.
_PRIVATE = range(0xF0000, 0xFFFFE)
# No message can spell the secret names, because they are drawn when the process starts.
_SECRET = secrets.token_hex(8)
#: The role whose text the model may have written, with tokens of the template that are not special.
_MODEL = "assistant"
#: The methods by which a tokenizer encodes.
_ENCODING = ("__call__", "_encode_plus")
#: What was made of tokenizers, because some have thousands of control tokens.
_known: WeakKeyDictionary[Any, _Known] = WeakKeyDictionary()


class ControlTokens:
    """The control tokens of a tokenizer: special tokens, and added tokens that the chat template writes.

    Args:
        tokenizer: Has the tokens and the chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | TextTokenizer) -> None:
        self._tokenizer = tokenizer
        added, template = _added_tokens(tokenizer), _template_of(tokenizer)
        found = _known.get(tokenizer)
        if found is None or (found.template, found.count) != (template, len(added)):
            tokens = _control_tokens(added, template, getattr(tokenizer, "chat_control_tokens", None))
            found = _known[tokenizer] = _Known(tokens, template, len(added), plain_backend(tokenizer, *_ENCODING))
        self._known = found

    def marked(self, messages: Sequence[Mapping[str, Any]]) -> MarkedMessages:
        """Return chat messages with marks around the control tokens that they spell.

        All strings of the messages are searched, those in lists and mappings too. A token that is spread over strings
        that follow each other under the same key (text parts of a content) counts as well, because templates may join
        them. Tokens that are not special stay tokens in the assistant's messages, because the model may have written
        them (`<think>`, `<tool_call>`).
        """
        given = [dict(message) for message in messages]
        texts: dict[str, list[tuple[str, bool]]] = {}
        for message in given:
            for key, text in _strings(message):
                texts.setdefault(key, []).append((text, message.get("role") == _MODEL))
        spans = {key: [*self._spans(found)] for key, found in texts.items()}
        first = next((key for key, found in spans.items() if found), None)
        if first is None:
            return MarkedMessages(given)
        used = {char for found in texts.values() for text, _ in found for char in text}
        unused = (chr(code) for code in _PRIVATE if chr(code) not in used)
        marks = next(unused), next(unused)
        new = {key: _with_marks([text for text, _ in found], spans[key], marks) for key, found in texts.items()}
        marked = [_mapped(message, lambda key, text: next(new[key])) for message in given]
        start, end = spans[first][0]
        return MarkedMessages(marked, marks, "".join(text for text, _ in texts[first])[start:end])

    def encode(self, rendered: str, messages: MarkedMessages) -> list[int]:
        """Return the token ids of a rendered conversation.

        Args:
            rendered: What the template made of the messages.
            messages: As `marked` returned them.

        Raises:
            InputError: If the tokenizer makes a control token even of text.
        """
        if messages.marks is None:
            return list(self._tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"])
        first, last = messages.marks
        # The odd ones were marked. A template may part a token from its marks, which are dropped then. What they parted
        # stays apart here, so that it does not join to a control token.
        parts = re.split(f"{first}([^{first}{last}]*){last}|[{first}{last}]", rendered)
        pieces = [(part, index % 2 == 1 and self._known.is_token(part)) for index, part in enumerate(parts) if part]
        copy = self._known.copy
        return self._encode_alone(pieces) if copy is None else self._encode_in(copy, pieces)

    def _spans(self, texts: Sequence[tuple[str, bool]]) -> Iterator[tuple[int, int]]:
        """Yield first and last index of each control token in joined texts, each with whether it is the assistant's."""
        ends = [*accumulate(len(text) for text, _ in texts)]
        for start, end, name in self._known.find("".join(text for text, _ in texts)):
            if name in self._known.special or not texts[bisect(ends, start)][1]:
                yield start, end

    def _encode_in(self, copy: _Copy, pieces: Sequence[tuple[str, bool]]) -> list[int]:
        parts: list[str] = []
        for piece, is_marked in pieces:
            done = 0
            for start, end, name in [] if is_marked else self._known.find(piece):
                parts += [piece[done:start], copy.aliases[name]]
                done = end
            parts.append(piece[done:])
        ids = encoded(copy.tokenizer, "".join(parts)).ids
        self._check_text(token for token in ids if token not in copy.tokens)
        return [copy.tokens.get(token, token) for token in ids]

    def _encode_alone(self, pieces: Sequence[tuple[str, bool]]) -> list[int]:
        """Encode piece by piece, by a tokenizer that cannot be copied."""
        ids: list[int] = []
        for piece, is_marked in pieces:
            options = {"split_special_tokens": True} if is_marked else {}
            found = self._tokenizer(piece, add_special_tokens=False, verbose=False, **options)["input_ids"]
            if is_marked:
                self._check_text(found)
            ids += found
        return ids

    def _check_text(self, ids: Iterator[int] | Sequence[int]) -> None:
        tokens, unknown = self._known.tokens, getattr(self._tokenizer, "unk_token_id", None)
        wrong = next((token for token in ids if token in tokens and token != unknown), None)
        if wrong is not None:
            raise InputError(
                f"messages must not spell {tokens[wrong].content!r}, because this tokenizer makes a control token of "
                "that text; remove it, or let messages write control tokens with split_special_tokens=False"
            )


@dataclass(frozen=True)
class MarkedMessages:
    """Chat messages whose control tokens are marked; made by `ControlTokens.marked`.

    Attributes:
        messages: The messages.
        marks: The characters in front of and after each control token, None if the messages spell none.
        found: The first control token that they spell.
    """

    messages: list[dict[str, Any]]
    marks: tuple[str, str] | None = None
    found: str | None = None


class _Known:
    """Cached data about a tokenizer's control tokens; it does not reference the tokenizer.

    Args:
        tokens: The control tokens by id.
        template: The chat templates.
        count: The number of the tokenizer's added tokens.
        backend: The tokenizer of the library `tokenizers` that encodes for it, None where there is none.

    Attributes:
        special: Names of those that are special tokens.
    """

    def __init__(self, tokens: Mapping[int, AddedToken], template: str, count: int, backend: Tokenizer | None) -> None:
        from tokenizers import Tokenizer, models

        self.tokens, self.template, self.count = tokens, template, count
        self.special = {token.content for token in tokens.values() if token.special}
        self._backend = backend
        # It has no vocabulary, so that it gives control tokens alone, as the tokenizer itself finds them.
        self._finder = Tokenizer(models.BPE())
        if backend is not None and backend.normalizer is not None:
            self._finder.normalizer = backend.normalizer
        self._finder.add_special_tokens([_named(token, token.content, strips=False) for token in tokens.values()])

    def find(self, text: str) -> list[tuple[int, int, str]]:
        """Return first and last index and the name of each control token in a text."""
        found = encoded(self._finder, text, offsets=True)
        return [(start, end, name) for (start, end), name in zip(found.offsets, found.tokens, strict=True)]

    def is_token(self, text: str) -> bool:
        """Return True if a text spells one control token."""
        return [(start, end) for start, end, _ in self.find(text)] == [(0, len(text))]

    @cached_property
    def copy(self) -> _Copy | None:
        """The copy of the tokenizer, made when a message contains a control token for the first time."""
        return None if self._backend is None else _Copy(self._backend, self.tokens)


class _Copy:
    """A copy of a tokenizer that treats control tokens as text and knows them by secret names.

    Attributes:
        tokenizer: The copy.
        aliases: The secret name of each token, by its own.
        tokens: The id of each token, by that of its secret name.
    """

    def __init__(self, backend: Tokenizer, tokens: Mapping[int, AddedToken]) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_str(backend.to_str())
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        mark = chr(_PRIVATE[0])
        self.aliases = {token.content: f"{mark}{_SECRET}-{id}{mark}" for id, token in tokens.items()}
        # Only special tokens are taken for text.
        self.tokenizer.add_special_tokens([_named(token, token.content) for token in tokens.values()])
        self.tokenizer.add_tokens([_named(token, self.aliases[token.content]) for token in tokens.values()])
        ids = self.tokenizer.get_vocab(with_added_tokens=True)
        self.tokens = {ids[self.aliases[token.content]]: id for id, token in tokens.items()}
        self.tokenizer.encode_special_tokens = True


def _named(token: AddedToken, name: str, strips: bool = True) -> AddedToken:
    """Return a token as a special token, or renamed as one that is not special."""
    from tokenizers import AddedToken

    return AddedToken(
        name,
        lstrip=strips and token.lstrip,
        rstrip=strips and token.rstrip,
        single_word=token.single_word,
        normalized=token.normalized and name == token.content,
        special=name == token.content,
    )


def _added_tokens(tokenizer: PreTrainedTokenizerBase | TextTokenizer) -> Mapping[int, AddedToken]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return tokenizer.added_tokens_decoder if backend is None else backend.get_added_tokens_decoder()


def _template_of(tokenizer: PreTrainedTokenizerBase | TextTokenizer) -> str:
    template = getattr(tokenizer, "chat_template", None)
    return "\0".join(template.values()) if isinstance(template, dict) else template or ""


def _control_tokens(
    added: Mapping[int, AddedToken], template: str, listed: Sequence[str] | None
) -> dict[int, AddedToken]:
    def is_written(name: str) -> bool:
        # Templates have white space as text, and some tokenizers as tokens.
        return name in template and not name.isspace() if listed is None else name in listed

    return {id: token for id, token in added.items() if token.special or is_written(token.content)}


def _strings(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the strings of a message in order, each with its key."""
    found: list[tuple[str, str]] = []

    def collect(key: str, text: str) -> str:
        found.append((key, text))
        return text

    _mapped(message, collect)
    return found


def _mapped(value: Any, change: Callable[[str, str], str], key: str = "") -> Any:
    """Return a message with its strings changed; keys of mappings stay."""
    if isinstance(value, str):
        return change(key, value)
    if isinstance(value, Mapping):
        return {name: _mapped(item, change, str(name)) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(item, change, key) for item in value]
    return value


def _with_marks(texts: Sequence[str], spans: Sequence[tuple[int, int]], marks: tuple[str, str]) -> Iterator[str]:
    """Yield texts with marks around spans of the joined texts."""
    pending = deque(mark for start, end in spans for mark in ((start, marks[0]), (end, marks[1])))
    start = 0
    for text in texts:
        parts, done = [], 0
        # An opening mark belongs to the character after it, a closing one to the character before it.
        while pending and pending[0][0] - start < len(text) + (pending[0][1] == marks[1]):
            index, mark = pending.popleft()
            parts += [text[done : index - start], mark]
            done = index - start
        yield "".join([*parts, text[done:]])
        start += len(text)
