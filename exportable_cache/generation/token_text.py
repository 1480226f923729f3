"""Conversion of tokens to text, one token at a time, with the same result as decoding all of them at once."""

from __future__ import annotations

import codecs
import json
import re
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from ..models.tokenizers.text import plain_backend, tokenizer_errors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..models.tokenizers.text import TextTokenizer


_DECODE = "the tokenizer cannot decode tokens"
# Character that decoders write for bytes that are not (yet) a character.
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A text before a token, which no decoder changes.
_BEFORE = "a"
#: Tokens of a prompt that are looked at for how the text after them begins.
_TAIL = 16
#: Tokens that are held back before a window of them is cut, and tokens that a cut window keeps as context.
_LONGEST_WINDOW, _CONTEXT = 16, 8
_FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """The texts that tokens of a tokenizer add to a text.

    Args:
        tokenizer: The tokenizer. One of the library `tokenizers` is reproduced exactly; others decode themselves.

    Attributes:
        tokenizer: The tokenizer.
        decoder: Joins names of tokens to a text; None if the tokenizer has unknown decoding steps.
        is_byte_level: True if the names spell bytes, as those of GPT 2 do.
        has_fallback: True if bytes that no token has are tokens such as `<0x0A>`.
        looks_ahead: True if the text of a token depends on whether another one follows.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self._backend = plain_backend(tokenizer, "decode", "_decode")
        steps = None if self._backend is None else _steps_of(self._backend.decoder)
        kinds = {step["type"] for step in steps or ()}
        self.decoder: Any = None if steps is None or self._backend is None else self._backend.decoder
        self.is_byte_level = "ByteLevel" in kinds
        self.has_fallback = "ByteFallback" in kinds
        self.looks_ahead = "BPEDecoder" in kinds
        self._texts: dict[str, str] = {}

    def name(self, token: int) -> str | None:
        """Return the token as the vocabulary spells it, or None for an id that is not in the vocabulary."""
        if self._backend is not None:
            return self._backend.id_to_token(token)
        name = self.tokenizer.convert_ids_to_tokens(token)
        return name if isinstance(name, str) else None

    @cached_property
    def specials(self) -> frozenset[int]:
        """Ids of the tokens that give no text where special tokens are skipped."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None and hasattr(backend, "get_added_tokens_decoder"):
            return frozenset(id for id, token in backend.get_added_tokens_decoder().items() if token.special)
        return frozenset(getattr(self.tokenizer, "all_special_ids", ()))

    def text(self, token: int) -> str:
        """Return what a token adds to a text before it, special tokens included; half a character is U+FFFD."""
        return self.bytes(token).decode("utf-8", "replace")

    @tokenizer_errors(_DECODE)
    def bytes(self, token: int) -> bytes:
        """Return what a token adds to the bytes of a text before it, special tokens included."""
        name = self.name(token)
        if name is None:
            return b""
        if self.is_byte_level:
            return byte_level_bytes(name)
        byte = _fallback_byte(name) if self.has_fallback or self.decoder is None else None
        if byte is not None:
            return byte
        if self.decoder is not None:
            return self.added([name]).encode()
        text = self.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text).encode("utf-8", "replace")

    def added(self, names: Sequence[str], is_first: bool = False, is_last: bool = True) -> str:
        """Return the text that tokens add, by their names; of decoders that are known here.

        Args:
            names: One token, or the bytes of a run.
            is_first: True if no token is before them.
            is_last: True if none follows.
        """
        if is_first:
            return self.decoder.decode([*names]) if is_last else self.decoder.decode([*names, _BEFORE])[: -len(_BEFORE)]
        end = None if is_last else -len(_BEFORE)
        return self.decoder.decode([_BEFORE, *names, *([] if is_last else [_BEFORE])])[len(_BEFORE) : end]


class TextStream:
    """Detokenises one token at a time. The pieces join to what decoding all tokens at once gives.

    A piece never ends inside a character: bytes that do not make one yet are held back, until they do or the stream
    ends. So is a run of tokens that are a byte each, until it ends or is known to be broken, because decoders take a
    run with one wrong byte for wrong from its beginning.
    Special tokens give no text, and spaces are not cleaned up, which later tokens could undo.
    Each token takes the same time, however many there were before it.

    Args:
        tokenizer: The tokenizer of the tokens.
        after: Tokens whose text is before the stream's. A tokenizer may leave out a space in front of a text's first
            word only.

    Attributes:
        ahead: Characters that the newest token completed and that are held back with a run of bytes.
    """

    @tokenizer_errors(_DECODE)
    def __init__(self, tokenizer: PreTrainedTokenizerBase | TextTokenizer, after: Sequence[int] = ()) -> None:
        self._texts = texts = TokenTexts(tokenizer)
        tail = [*islice((token for token in reversed(after) if token not in texts.specials), _TAIL)][::-1]
        self._joiner: _Joiner
        if texts.decoder is None:
            self._joiner = _Windows(texts, tail)
        else:
            self._joiner = _Bytes(texts) if texts.is_byte_level else _Pieces(texts)
            for token in tail:
                self._joiner.push(token)
            self._joiner.settle()
        self.ahead = ""

    @tokenizer_errors(_DECODE)
    def special(self, token: int) -> tuple[str, str] | None:
        """Return the text and the name of a special token, None for another token."""
        if token not in self._texts.specials:
            return None
        return self._texts.text(token), self._texts.name(token) or ""

    @tokenizer_errors(_DECODE)
    def push(self, token: int) -> str:
        """Return the text that `token` completes, possibly none."""
        if token in self._texts.specials:
            self.ahead = ""
            return ""
        text = self._joiner.push(token)
        self.ahead = self._joiner.ahead
        return text

    @tokenizer_errors(_DECODE)
    def settled(self) -> str:
        """Return the text that is still held back, because text of another kind follows; more tokens may follow."""
        self.ahead = ""
        return self._joiner.flush()

    @tokenizer_errors(_DECODE)
    def finish(self) -> str:
        """Return the text that is still held back."""
        self.ahead = ""
        return self._joiner.finish()


class _Joiner(Protocol):
    """Joins tokens that are not special; see `TextStream`."""

    ahead: str

    def push(self, token: int) -> str: ...
    def settle(self) -> None:
        """Keep only what decides how the next text begins."""

    def flush(self) -> str:
        """Return the text that is held back; the next token does not begin a text."""

    def finish(self) -> str: ...


class _Bytes:
    """Joins tokens that spell bytes."""

    ahead = ""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._characters.decode(self._texts.bytes(token))

    def settle(self) -> None:
        pass

    def finish(self) -> str:
        text = self._characters.decode(b"", final=True)
        self._characters.reset()
        return text

    flush = finish


class _Pieces:
    """Joins tokens that are pieces of text, with runs of bytes among them."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._known: dict[str, tuple[str, str]] = {}
        self.ahead = ""
        self._is_first = True
        # What the newest token adds once another one follows.
        self._rest = ""
        # The run of bytes that the newest token is in; nothing of it is kept once it is broken.
        self._run: list[str] = []
        self._run_is_first = self._is_broken = False
        self._characters = codecs.getincrementaldecoder("utf-8")("strict")

    def push(self, token: int) -> str:
        self.ahead = ""
        name = self._texts.name(token)
        if name is None:
            return ""
        byte = _fallback_byte(name) if self._texts.has_fallback else None
        if byte is not None:
            return self._push_byte(name, byte)
        text = self._end_run() + self._rest
        is_first, self._is_first = self._is_first, False
        added, self._rest = self._added(name) if is_first or name not in self._known else self._known[name]
        if is_first:
            added = self._texts.added([name], is_first=True)
        return text + added

    def settle(self) -> None:
        tail = 0 if self._is_broken else len(self._characters.getstate()[0])
        self._run = self._run[len(self._run) - tail :]

    def flush(self) -> str:
        text, self._rest, self._is_first = self._end_run() + self._rest, "", False
        return text

    def finish(self) -> str:
        text = self._end_run()
        self.ahead, self._is_first, self._rest = "", True, ""
        return text

    def _added(self, name: str) -> tuple[str, str]:
        """Return what a token adds as the last one, and what more where another one follows."""
        text = self._texts.added([name])
        more = self._texts.added([name], is_last=False)[len(text) :] if self._texts.looks_ahead else ""
        self._known[name] = (text, more)
        return text, more

    def _push_byte(self, name: str, byte: bytes) -> str:
        if self._is_broken:
            return _REPLACEMENT
        text, self._rest = self._rest, ""
        if not self._run:
            self._run_is_first, self._is_first = self._is_first, False
        self._run.append(name)
        try:
            self.ahead = self._characters.decode(byte)
        except UnicodeDecodeError:
            # No byte mends it: what the run has so far can be given out, and each further byte at once.
            text += self._end_run()
            self._is_broken = True
        return text

    def _end_run(self) -> str:
        """Return the text of the run of bytes that was held back."""
        text = self._texts.added(self._run, self._run_is_first) if self._run else ""
        self._run = []
        self._run_is_first = self._is_broken = False
        self._characters.reset()
        return text


class _Windows:
    """Joins tokens of a tokenizer that can only be asked to decode them: windows of the newest ones are decoded."""

    def __init__(self, texts: TokenTexts, tail: Sequence[int]) -> None:
        self._texts = texts
        # Tokens given out last, then those held back: how a token reads may depend on the ones before it.
        self._context: list[int] = [*tail]
        self._held: list[int] = []
        self._characters = codecs.getincrementaldecoder("utf-8")("ignore")
        self.ahead = ""

    def push(self, token: int) -> str:
        self.ahead = ""
        self._held.append(token)
        byte = _fallback_byte(self._texts.name(token) or "")
        if byte is not None:
            self.ahead = self._characters.decode(byte)
            return ""
        self._characters.reset()
        held = len(self._held)
        # A window that cannot be cut is decoded each time it has doubled, so that the time of a token stays bounded.
        if held > _LONGEST_WINDOW and held & (held - 1):
            return ""
        piece = self._added(self._context, self._held)
        if piece and not piece.endswith(_REPLACEMENT):
            self._context, self._held = self._held[-_LONGEST_WINDOW:], []
            return piece
        return self._cut(piece) if held >= _LONGEST_WINDOW else ""

    def settle(self) -> None:
        pass

    def finish(self) -> str:
        piece = self._added(self._context, self._held) if self._held else ""
        self._context, self._held, self.ahead = [], [], ""
        self._characters.reset()
        return piece

    flush = finish

    def _cut(self, piece: str) -> str:
        """Return the text of all but the newest few tokens, if the newest read alike after a shorter context."""
        for kept in range(1, 5):
            first, rest = self._held[:-kept], self._held[-kept:]
            before = first[-_CONTEXT:]
            text = self._added(self._context, first)
            if piece == text + self._added(before, rest):
                self._context, self._held = before, rest
                return text
        return ""

    def _added(self, before: list[int], tokens: list[int]) -> str:
        return self._decode(before + tokens)[len(self._decode(before)) :]

    def _decode(self, tokens: list[int]) -> str:
        decode = self._texts.tokenizer.decode
        return str(decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def byte_level_bytes(name: str) -> bytes:
    """Return the bytes that a name of a byte-level vocabulary spells; another name, as added tokens have, is text."""
    table = _byte_level_table()
    if any(char not in table for char in name):
        return name.encode()
    return bytes(table[char] for char in name)


@cache
def _byte_level_table() -> dict[str, int]:
    """Return the byte of each character: printable Latin-1 is itself, other bytes are U+0100 and on (GPT 2)."""
    printable = [byte for byte in range(256) if 0x20 < byte < 0x7F or (byte > 0xA0 and byte != 0xAD)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def _fallback_byte(name: str) -> bytes | None:
    """Return the byte of a name such as `<0x0A>`, None for another name."""
    found = _FALLBACK.fullmatch(name)
    return bytes([int(found[1], 16)]) if found else None


def _steps_of(decoder: Any) -> list[dict[str, Any]] | None:
    """Return the steps of a decoder, or None if there are any whose text of a token depends on more than is known here.

    That is the case of decoders that other code defines, those that join repeated tokens, and those that replace
    something in the whole text.
    """
    try:
        fields = json.loads(decoder.__getstate__())
    except Exception:  # there is no decoder, or Python code is one
        return None
    steps, is_fused = _flattened(fields), False
    if any(step["type"] == "ByteLevel" for step in steps):
        return steps if all(step["type"] in ("ByteLevel", "Fuse") for step in steps) else None
    for step in steps:
        known = _KNOWN.get(step["type"])
        if known is None or not known(step, is_fused):
            return None
        is_fused = is_fused or step["type"] == "Fuse"
    return steps


def _flattened(fields: dict[str, Any]) -> list[dict[str, Any]]:
    if fields["type"] == "Sequence":
        return [step for part in fields["decoders"] for step in _flattened(part)]
    return [fields]


# True if the step of a decoder treats each token alone, except at both ends of the text. After a step that has joined
# all tokens, true if it treats only the beginning.
_KNOWN: dict[str, Callable[[dict[str, Any], bool], bool]] = {
    "Fuse": lambda step, is_fused: True,
    "ByteFallback": lambda step, is_fused: not is_fused,
    "Replace": lambda step, is_fused: "String" in step["pattern"] and not is_fused,
    "Strip": lambda step, is_fused: step["start"] <= 1 and step["stop"] == 0,
    "Metaspace": lambda step, is_fused: not is_fused,
    "WordPiece": lambda step, is_fused: not is_fused,
    "BPEDecoder": lambda step, is_fused: not is_fused,
}


class StopStrings:
    """Ends a text at the first of some strings, which is never given out, not even in part.

    `StopStrings(["END"])` gives "x" for "xE", nothing for "N", and "EN" back with "y" for "y"; on "D" instead it stops.
    The time of a push depends on the length of its text only, not on the number and length of the strings.

    Strings may include special tokens, which give no text. `hide` adds them: strings are searched in the text with
    special tokens and in the text without them.

    Args:
        strings: Any number of strings, none of them empty.

    Attributes:
        stopped: True once a string is complete.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = frozenset(strings)
        self._settled = _Reading(_Automaton(self._strings))
        # Reads on over text that may still change. None where there is none.
        self._ahead: _Reading | None = None
        self._held = ""
        self._unsettled: list[str] = []
        self._hidden_ahead: list[str] = []
        self.stopped = False

    def push(self, piece: str) -> str:
        """Return the text that may be given out now that `piece` follows; set `stopped` once a string is complete.

        The piece replaces all text passed to `look_ahead` since the last push.
        """
        if not self._strings:
            return piece
        self._held += piece
        self._ahead = None
        self._unsettled.clear()
        cut = self._settled.read(piece)
        while cut is None and self._hidden_ahead:
            cut = self._settled.read_hidden(self._hidden_ahead.pop(0))
        return self._give(cut)

    def look_ahead(self, text: str) -> str:
        """Stop where text that follows, but may still change, completes a string.

        Args:
            text: Text after that of the last push and of earlier calls since.

        Returns:
            The text in front of the string, or "" if there is none.
        """
        if not self._strings or not text:
            return ""
        self._unsettled.append(text)
        return self._stop_ahead(self._reading_ahead().read(text))

    def hide(self, text: str, name: str = "") -> str:
        """Take in the text of a special token, which is not given out.

        Args:
            text: The token's text.
            name: The token's name; a string that is equal to it is complete, however the text reads.

        Returns:
            The text in front of a string that this completes, or "" if there is none.
        """
        if not self._strings:
            return ""
        if name in self._strings:
            return self._stop_ahead((self._ahead or self._settled).shown)
        if not self._unsettled:
            cut = self._settled.read_hidden(text)
            return self._give(cut) if cut is not None else ""
        self._hidden_ahead.append(text)
        return self._stop_ahead(self._reading_ahead().read_hidden(text))

    def finish(self) -> str:
        """Return text that could have begun a string and did not."""
        text, self._held = self._held, ""
        return text

    def _reading_ahead(self) -> _Reading:
        if self._ahead is None:
            self._ahead = self._settled.copy()
        return self._ahead

    def _stop_ahead(self, cut: int | None) -> str:
        if cut is None:
            return ""
        first = self._settled.shown - len(self._held)
        text = self._held + "".join(self._unsettled)
        self.stopped, self._held = True, ""
        return text[: cut - first]

    def _give(self, cut: int | None) -> str:
        """Return the held text up to the index `cut` of a string, or else what can belong to none."""
        self.stopped = cut is not None
        first = self._settled.shown - len(self._held)
        size = (self._settled.least_kept if cut is None else cut) - first
        text = self._held[:size]
        self._held = "" if self.stopped else self._held[size:]
        return text


class _Automaton:
    """The automaton of Aho and Corasick (1975): after a text, its longest suffix that is a prefix of a string.

    Attributes:
        depths: Length of that suffix, by node.
        longest: Length of the longest string that ends there, by node, or 0.
        size: Length of the longest string.
    """

    def __init__(self, strings: frozenset[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._shorter = [0]
        self.depths, self.longest = [0], [0]
        for string in strings:
            node = 0
            for char in string:
                found = self._children[node].get(char)
                if found is None:
                    found = self._children[node][char] = len(self._children)
                    self._children.append({})
                    self._shorter.append(0)
                    self.depths.append(self.depths[node] + 1)
                    self.longest.append(0)
                node = found
            self.longest[node] = len(string)
        self.size = max(map(len, strings), default=0)
        nodes = deque(self._children[0].values())
        while nodes:
            node = nodes.popleft()
            for char, child in self._children[node].items():
                self._shorter[child] = self.next(self._shorter[node], char)
                nodes.append(child)
            self.longest[node] = self.longest[node] or self.longest[self._shorter[node]]

    def next(self, node: int, char: str) -> int:
        """Return the node after one more character."""
        while node and char not in self._children[node]:
            node = self._shorter[node]
        return self._children[node].get(char, 0)


class _Reading:
    """State of reading a text, with the text of special tokens and without it.

    Attributes:
        shown: Characters read, those of special tokens not counted. Indices below count the same.
    """

    def __init__(self, automaton: _Automaton) -> None:
        self._automaton = automaton
        self._plain = self._full = self.shown = 0
        # The index of each of the newest characters, special tokens' too. None as long as there were none of these.
        self._indices: deque[int] | None = None

    def copy(self) -> _Reading:
        """Return a copy of the state."""
        copied = _Reading(self._automaton)
        copied._plain, copied._full, copied.shown = self._plain, self._full, self.shown
        copied._indices = None if self._indices is None else self._indices.copy()
        return copied

    def read(self, text: str) -> int | None:
        """Read on, and return the least index at which a string that `text` completes begins, or None."""
        automaton, cut = self._automaton, None
        for char in text:
            self._plain = automaton.next(self._plain, char)
            self.shown += 1
            size = automaton.longest[self._plain]
            if size and (cut is None or self.shown - size < cut):
                cut = self.shown - size
            if self._indices is not None:
                cut = _least(cut, self._read_full(char, self.shown - 1))
        return cut

    def read_hidden(self, text: str) -> int | None:
        """Do the same with the text of a special token."""
        if self._indices is None:
            self._full = self._plain
            before = range(max(0, self.shown - self._automaton.size), self.shown)
            self._indices = deque(before, self._automaton.size)
        cut = None
        for char in text:
            cut = _least(cut, self._read_full(char, self.shown))
        return cut

    @property
    def least_kept(self) -> int:
        """Index from which on the text could begin a string."""
        kept = self.shown - self._automaton.depths[self._plain]
        depth = self._automaton.depths[self._full]
        return kept if self._indices is None or not depth else min(kept, self._indices[-depth])

    def _read_full(self, char: str, index: int) -> int | None:
        assert self._indices is not None
        self._indices.append(index)
        self._full = self._automaton.next(self._full, char)
        size = self._automaton.longest[self._full]
        return self._indices[-size] if size else None


def _least(first: int | None, second: int | None) -> int | None:
    return second if first is None else first if second is None else min(first, second)
