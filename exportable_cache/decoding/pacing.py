"""Choose how many tokens of waiting prompts are fed between two steps that decode the running responses."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Longest time between two tokens of a response while prompts are fed, in seconds.
GAP_SECONDS = 0.2
#: Lengths of a chunk, the one that is measured first, and the part of the gap that the longest chunk may take at first.
_SIZES, _FIRST, _PART = (4, 8, 16, 32, 64, 128, 256), 16, 0.5
LONGEST_CHUNK = _SIZES[-1]
#: Part of the gap that a chunk and a step may take together. The rest is for chunks that take longer than the one
#: before, because a longer cache is read.
_TARGET = 0.75
#: Part of the gap in which a further chunk may begin, so that responses get most of the time.
_MORE = 0.25


class Pacing:
    """Chooses the length of chunks by the time that chunks and steps take.

    Without `measure` chunks have any length, and only the number of chunks between two steps is limited.

    Args:
        clock: Returns the time in seconds.

    Attributes:
        gap: Longest time in seconds between two tokens of a response.
        limit: Longest chunk at present, in tokens; None for any length.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.gap = GAP_SECONDS
        self.limit: int | None = None
        self.clock = clock
        self._longest = 0
        # Seconds of the newest step, and of the newest chunk with its tokens.
        self._step = self._chunk = 0.0
        self._begun = clock()

    def measure(self, chunk: Callable[[int], object], most: int, gap: float) -> int:
        """Measure chunks of several lengths, set the longest chunk, and return it.

        Args:
            chunk: Feeds a chunk of so many tokens, and waits for its end.
            most: Longest chunk that is possible.
            gap: Longest time in seconds between two tokens of a response.
        """
        self.gap = gap
        fits = [size for size in _SIZES if size <= most] or [most]
        chosen, first = fits[0], min(_SIZES.index(_FIRST), len(fits) - 1)
        for size in fits[first:]:
            took = []
            # The first one may load or compile something.
            for _ in range(2):
                start = self.clock()
                chunk(size)
                took.append(self.clock() - start)
            if min(took) > _PART * gap:
                if size == fits[first]:
                    # Shorter ones are not measured, because most chunks take time in proportion to their length.
                    rate = min(took) / size
                    # If not even the shortest one fits the gap, it would only make prompts slower.
                    least = fits[0] if fits[0] * rate <= gap else size
                    chosen = max((one for one in fits[:first] if one * rate <= _PART * gap), default=least)
                break
            chosen = size
        self.limit = self._longest = chosen
        return chosen

    def begin(self) -> None:
        """Note the end of a step: chunks may follow."""
        self._begun = self.clock()

    def has_time(self) -> bool:
        """Return True if another chunk may be fed before the next step."""
        spent = self.clock() - self._begun
        if spent >= _MORE * self.gap:
            return False
        return self.limit is None or spent + self._chunk + self._step <= _TARGET * self.gap

    def note_step(self, seconds: float) -> None:
        """Note the time of a step."""
        self._step = seconds

    def note_chunk(self, seconds: float, tokens: int) -> None:
        """Note the time of a chunk, and choose the length of the next ones.

        Args:
            seconds: Time that it took.
            tokens: Number of tokens that it had.
        """
        self._chunk = seconds
        if self.limit is None:
            return
        room, shorter = self._room(), [size for size in _SIZES if size < self.limit]
        longer = [size for size in _SIZES if self.limit < size <= self._longest]
        if seconds > room and shorter:
            rate = seconds / tokens
            self.limit = max((size for size in shorter if size * rate <= room), default=shorter[0])
        elif tokens == self.limit and longer and seconds * longer[0] / tokens <= room:
            self.limit = longer[0]

    def _room(self) -> float:
        """Return the seconds that a chunk may take next to a step."""
        room, least = _TARGET * self.gap - self._step, _MORE * self.gap
        if room >= least:
            return room
        # Steps that fill the gap alone do so without chunks, too. Shorter ones would only make prompts endless.
        return least if self._step + least <= self.gap else 2 * self._step
