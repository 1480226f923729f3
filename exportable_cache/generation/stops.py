"""Stop strings: a text ends at the first of them, and no part of it is given out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """Ends a text at the first of some strings, which is never given out, not even in part.

    `StopStrings(["END"])` gives "x" for "xE", nothing for "N", and "EN" back with "y" for "y"; on "D" instead it stops.
    A push costs time by the length of its text, whatever the number and the length of the strings.

    A string may also name special tokens, which give no text. `hide` says where they are: the strings are looked for in
    the text with them and in the text without them.

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

        What `look_ahead` was told since the last push is replaced by the piece.
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
    """The automaton of Aho and Corasick (1975): after any text, the longest end of it that begins one of the strings.

    Attributes:
        depths: Length of that end, by node.
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
    """How far a text was read, with the text of special tokens and without it.

    Attributes:
        shown: Characters read, those of special tokens not counted. Indices below count the same.
    """

    def __init__(self, automaton: _Automaton) -> None:
        self._automaton = automaton
        self._plain = self._full = self.shown = 0
        # The index of each of the newest characters, special tokens' too. None as long as there were none of these.
        self._indices: deque[int] | None = None

    def copy(self) -> _Reading:
        """Return another reading at the same place."""
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
