"""Where a session is in its sequences, and how it gets elsewhere: lengths, going back, states saved and forked."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..backends.fork import ForkedRunner
from ..cache.layers import CacheLayer
from ..errors import InputError
from ..models.cache_factory import ExportableCache
from .inputs.image_places import PlacedImages
from .persistence import load_state, runner_state, save_state

if TYPE_CHECKING:
    from .session import Session

# High-water mark of a cache whose history is unknown: as if every slot had been overwritten.
_UNKNOWN = 2**62


class Position:
    """The part of `Session` that knows how many tokens each row holds; see there for its attributes."""

    @property
    def length(self) -> torch.Tensor:
        """Tokens seen per row, int64 [batch] on the host."""
        return self._length.clone()

    @property
    def max_length(self) -> int | None:
        """Tokens a row can hold in all, or None where only rings keep state."""
        return min((layer.max_length for layer in self.layers if layer.max_length is not None), default=None)

    @property
    def room(self) -> int | None:
        """Tokens that every row still has room for, or None for any number."""
        return None if self.max_length is None else self.max_length - int(self._length.max())

    @property
    def cache(self) -> ExportableCache:
        """The cache given to `from_model`, brought up to date: its lengths, and whether cross-attention was computed.

        Raises:
            InputError: If the session runs a bundle, whose cache is inside the program, or is a fork.
        """
        if self._cache is None and self.target in ("eager", "compiled"):
            raise InputError(
                "a fork has no cache object of its own: its tensors take turns in that of the session it was forked from; "
                "save_state() writes what it holds"
            )
        if self._cache is None:
            raise InputError(
                f"a session over a {self.target!r} bundle has no cache object; its program keeps the tensors"
            )
        if isinstance(self.runner, ForkedRunner):
            self.runner.take_turn()
        high_water = int(self._high_water.max())
        for layer in self._cache.layers:
            if layer.follows_decoder and not layer.is_dummy:
                layer.cumulative_length.copy_(self._length)
            layer._high_water = None if high_water >= _UNKNOWN else high_water
        if self._encoder is not None:
            self._encoder.update_cache(self._cache, bool(self._length.any()))
        return self._cache

    def reset(self) -> None:
        """Start anew at position 0; the next step is the first of a sequence.

        The buffers are zeroed, except by runtimes that do not give them out (executorch). Those keep their contents, which
        no query sees; only if a sequence has left infinities or not-a-number in them, load the bundle again, as zero times
        those is not zero.
        """
        self._length.zero_()
        self._pending = None
        self._images = PlacedImages.none(self.batch_size)
        self._high_water.zero_()
        self.moves += 1
        for tensor in (getattr(self.runner, "state", None) or {}).values():
            tensor.zero_()

    def save_state(self, path: str | Path) -> None:
        """Write what the cache holds (safetensors, atomically), to go on from in another session of the same model.

        Raises:
            InputError: If the runtime does not give out its cache.
        """
        save_state(self, Path(path))

    def load_state(self, path: str | Path) -> None:
        """Go on from what `save_state` wrote, on this or another target; nothing changes if it is refused.

        Raises:
            BundleError: If the file is missing, damaged or not a saved state.
            InputError: If it is of another model, other layers, another batch size or dtype, or does not fit.
        """
        load_state(self, Path(path))

    def fork(self) -> Session:
        """A second session that goes on from here by itself, over the same weights and compiled graphs.

        Each keeps a cache of its own; whenever another one's turn comes, the cache in place is exchanged, at the cost of a
        copy. The session that was forked goes on unchanged.

        Raises:
            InputError: If the runtime does not give out its cache.
        """
        runner_state(self)
        self.runner, runner = ForkedRunner.of(self.runner)
        forked = copy.copy(self)
        forked.runner = runner
        forked._length, forked._high_water = self._length.clone(), self._high_water.clone()
        forked._cache = None
        if self._encoder is not None:
            self._encoder.runner = self.runner
            forked._encoder = self._encoder.fork(runner)
        return forked

    def rewind(self, tokens: int) -> None:
        """Take back the newest tokens of every row, so that others can follow in their place.

        A generated token that was given out and not fed yet is dropped as well, and not counted: `rewind(0)` drops it alone.

        Args:
            tokens: How many, 0 or more.

        Raises:
            InputError: If a row holds fewer, a ring has overwritten one that would be needed again, a layer keeps a state, or
                part of an image would stay whose tokens belong together.
        """
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0:
            raise InputError(f"cannot rewind {tokens!r} tokens; pass an int of at least 0")
        lengths = self._length.tolist()
        if tokens > min(lengths):
            raise InputError(f"cannot rewind {tokens} tokens, rows hold {lengths}; rewind at most {min(lengths)}")
        # A row that is left with no token starts anew, whatever its layers keep.
        kept = [row for row in zip(lengths, self._high_water.tolist(), strict=True) if row[0] != tokens]
        found = ((layer.max_rollback(*row), layer.forgetting) for layer in self.layers for row in kept)
        allowed, reason = min(found, default=(tokens, ""))
        if tokens > allowed:
            raise InputError(
                f"cannot rewind {tokens} tokens at a length of {lengths}: {reason}, "
                f"at most {allowed} can be taken back; reset() and prefill the tokens to keep"
            )
        self._images = self._images.up_to(self._length - tokens)
        self.shift(-tokens)
        self._pending = None
        self.moves += 1

    def set_length(self, row: int, length: int) -> None:
        """Say how many tokens a row holds, for loops that write a row's state themselves (continuous batching)."""
        self._length[row] = length
        self._high_water[row] = length
        self.moves += 1

    def shift(self, tokens: int) -> None:
        """For decoding loops: go back over tokens that were fed, or, where positive, on over tokens that the cache still holds.

        `rewind` without its checks: a token that was given out and not fed stays so.
        """
        self._length += tokens


def known_high_water(layers: Sequence[CacheLayer], length: torch.Tensor) -> int:
    """The most tokens a row of these layers may ever have held."""
    if not bool(length.any()):
        return 0
    known = [layer._high_water for layer in layers]
    return _UNKNOWN if any(mark is None for mark in known) else max(known)
