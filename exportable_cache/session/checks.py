"""Checks of a session's use: arguments before anything runs, and one thread and one generator at a time.

None of it is in traced code. A call takes the lock once, and each token costs one comparison of the state.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..errors import CacheFullError, InputError

if TYPE_CHECKING:
    from types import TracebackType

    import torch

#: Limits of stop strings, because the text of each token is searched for all of them.
MOST_STOPS, MOST_STOP_CHARACTERS = 64, 1024
#: First tokens that a shift keeps by default, because models put much of their attention there.
PROTECTED = 4


def check_protected(protected: int, most: int) -> None:
    """Check the number of first tokens that shifts keep.

    Args:
        protected: The number.
        most: The limit of tokens of the cache.

    Raises:
        InputError: If these tokens fill more than half of the cache.
    """
    is_int = isinstance(protected, int) and not isinstance(protected, bool)
    if not is_int or not 0 <= protected <= most // 2:
        raise InputError(
            f"protected must be from 0 to {most // 2}, half of a cache of {most} tokens, got {protected!r}; shorten "
            "the system prompt, use a larger max_cache_len, or another on_full"
        )


@dataclass(frozen=True)
class ProgramLimits:
    """Limits of a program's inputs.

    Attributes:
        batch_size: Number of rows.
        vocab_size: Token ids run from 0 to vocab_size - 1.
        device: Device of the inputs.
        codebooks: Number of ids in each token; None for one.
    """

    batch_size: int
    vocab_size: int
    device: torch.device
    codebooks: int | None = None


def check_no_autocast(device: torch.device) -> None:
    """Check that a program runs in the dtypes that it was made with.

    Raises:
        InputError: Under `torch.autocast`.
    """
    import torch

    if torch.is_autocast_enabled(device.type):
        raise InputError(
            "torch.autocast must be off, because a session computes in the dtypes that its program was made with; "
            f"leave the autocast block, and load or export the model in {torch.get_autocast_dtype(device.type)} instead"
        )


def check_rows_may_differ(equal_rows: bool, found: str) -> None:
    """Check that the model allows rows of different length.

    Args:
        equal_rows: True if it takes one length for all rows, see `program.lengths`.
        found: The cause of different lengths, for the message.

    Raises:
        InputError: If it does not.
    """
    if equal_rows:
        raise InputError(
            f"{found}, but this model's own code asks for one length of all rows; feed rows of equal length, or "
            "one row at a time (batch_size=1)"
        )


def check_chunks(sizes: Sequence[int]) -> None:
    """Check that no chunk of a prompt has one token, for models that end the prompt at such a step (Unlimited OCR).

    Args:
        sizes: Number of tokens in each step.

    Raises:
        InputError: If one of several chunks has one token.
    """
    if len(sizes) > 1 and 1 in sizes:
        raise InputError(
            f"the prompt would be fed in steps of {list(sizes)} tokens, and this model ends its prompt at a step of "
            "one token; use a larger prefill_chunk, or another text around the images"
        )


def check_ids(name: str, ids: torch.Tensor, dims: tuple[str, ...], limits: ProgramLimits) -> None:
    """Check token ids.

    Args:
        name: Name of the argument, for messages.
        ids: The argument, which must be int64 with these dimensions, followed by one of ids if a token has several.
        dims: `("batch", "length")`, `("batch",)` or `("length",)`.
        limits: Limits of the program.

    Raises:
        InputError: If the type, shape, dtype or device is wrong, there is no token, or an id is outside the vocabulary.
    """
    import torch

    batch_size, vocab_size, device = limits.batch_size, limits.vocab_size, limits.device
    dims = dims if limits.codebooks is None else (*dims, "codebooks")
    shape = f"[{', '.join(dims)}]"
    if not isinstance(ids, torch.Tensor):
        raise InputError(
            f"{name} must be an int64 tensor {shape}, got a {type(ids).__name__}; convert a list with torch.tensor"
        )
    if ids.dim() != len(dims):
        rows = f" with batch {batch_size}" if "batch" in dims else ""
        raise InputError(f"{name} must have shape {shape}{rows}, got {list(ids.shape)}")
    if "batch" in dims and ids.shape[0] != batch_size:
        raise InputError(
            f"{name} must have {batch_size} rows, got {ids.shape[0]}; pass {batch_size} rows, or allocate or export "
            f"with batch_size={ids.shape[0]}"
        )
    if "codebooks" in dims and ids.shape[-1] != limits.codebooks:
        raise InputError(f"{name} must have {limits.codebooks} ids for each token, got {ids.shape[-1]}; pass {shape}")
    if ids.dtype != torch.int64:
        raise InputError(f"{name} must be torch.int64, got {ids.dtype}; pass {name}.to(torch.int64)")
    if ids.layout is not torch.strided:
        raise InputError(f"{name} must be dense, got {ids.layout}; pass {name}.to_dense()")
    if ids.device != device:
        raise InputError(f"{name} must be on {device}, got {ids.device}; pass {name}.to({str(device)!r})")
    if ids.numel() == 0:
        raise InputError(
            f"{name} must have at least one token per row, got shape {list(ids.shape)}: the prompt is empty"
        )
    wrong = (ids < 0) | (ids >= vocab_size)
    if bool(wrong.any()):
        where = wrong.nonzero()[0].tolist()
        raise InputError(
            f"{name}{where} must be a token id from 0 to {vocab_size - 1}, got {int(ids[tuple(where)])}; tokenize with "
            "the model's own tokenizer"
        )


def check_one_id_a_token(codebooks: int | None) -> None:
    """Check that each token is one id, because others cannot be chosen here.

    Raises:
        InputError: If a token has several ids.
    """
    if codebooks is not None:
        raise InputError(
            f"a token of this model is {codebooks} ids, one per codebook, and their order depends on the model; feed "
            "rows of ids with prefill and decode, and choose from the logits of each codebook"
        )


def check_max_new_tokens(max_new_tokens: int | None) -> None:
    """Check a limit of new tokens.

    Raises:
        InputError: If it is neither a positive int nor None.
    """
    if max_new_tokens is None:
        return
    if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
        raise InputError(
            f"max_new_tokens must be an int of at least 1, or None for as many as fit, got {max_new_tokens!r}"
        )


def check_room(held: int, limit: int | None, tokens: int, max_new_tokens: int | None = None) -> None:
    """Check that there are slots for tokens.

    Args:
        held: Number of tokens in the fullest row.
        limit: Tokens that a row can hold, or None for any number.
        tokens: Number of tokens to feed to every row.
        max_new_tokens: Number of tokens to generate after them; None if no number was given.

    Raises:
        CacheFullError: If they do not fit.
    """
    if limit is None:
        return
    room = limit - held
    holds = f"the cache holds {held} of at most {limit} tokens"
    if tokens > room:
        remedy = "reset() the session, rewind() it, or allocate or export with a larger max_cache_len"
        if tokens > limit:
            remedy = f"shorten the prompt, or allocate or export with max_cache_len of at least {held + tokens}"
        raise CacheFullError(f"{holds}, {tokens} more do not fit; {remedy}")
    # The last new token needs no slot, because it is not fed back.
    if max_new_tokens is not None and tokens + max_new_tokens - 1 > room:
        raise CacheFullError(
            f"{holds}: after a prompt of {tokens} tokens max_new_tokens may be at most {room - tokens + 1}, "
            f"got {max_new_tokens}; lower it, leave it out to stop when the cache is full, "
            "or allocate or export with a larger max_cache_len"
        )


def check_stops(strings: Sequence[str]) -> None:
    """Check stop strings.

    Raises:
        InputError: If one is empty, too long or not text, or there are too many.
    """
    if isinstance(strings, str) or any(not isinstance(text, str) or not text for text in strings):
        raise InputError(f"stop must be texts of at least one character, got {strings!r:.80}; leave out what is empty")
    if len(strings) > MOST_STOPS:
        raise InputError(f"stop must be at most {MOST_STOPS} texts, got {len(strings)}; leave some out")
    longest = max(map(len, strings), default=0)
    if longest > MOST_STOP_CHARACTERS:
        raise InputError(
            f"stop must be texts of at most {MOST_STOP_CHARACTERS} characters, got one of {longest}; shorten it"
        )


def split_stops(stop: int | str | Sequence[int | str] | None, vocab_size: int) -> tuple[list[int], list[str]]:
    """Return the stop tokens and the stop strings of an argument that may be None, one of either, or several.

    Raises:
        InputError: If one is neither a token id of the vocabulary nor a string that `check_stops` allows.
    """
    given = [] if stop is None else [stop] if isinstance(stop, str) or not isinstance(stop, Iterable) else list(stop)
    tokens, strings = [], []
    for item in given:
        if isinstance(item, str) and item:
            strings.append(item)
        elif isinstance(item, int) and not isinstance(item, bool) and 0 <= item < vocab_size:
            tokens.append(item)
        else:
            raise InputError(
                f"stop must be token ids from 0 to {vocab_size - 1}, or strings of at least one character, got {item!r}"
            )
    check_stops(strings)
    return tokens, strings


Tokens = TypeVar("Tokens")


class StepGuard:
    """Lets one thread at a time run steps (`with guard: ...`), and remembers a step that did not finish.

    Args:
        lock: Lock of the program. Forks run the same program, so they share it.

    Attributes:
        is_broken: True if an interrupted step may have overwritten what cannot be taken back.
        last_thread: Thread that ran something last.
    """

    def __init__(self, lock: threading.RLock | None = None) -> None:
        self.lock = lock or threading.RLock()
        self.is_broken = False
        self.last_thread = threading.get_ident()
        self._generation: weakref.ref[Generation] | None = None

    def forked(self) -> StepGuard:
        """Return the guard of another session over the same program, whose cache is a copy."""
        fork = StepGuard(self.lock)
        fork.is_broken = self.is_broken
        return fork

    def __enter__(self) -> StepGuard:
        if not self.lock.acquire(blocking=False):
            raise InputError(
                "this session, or a fork of it, is running a step already, in another thread; a session is for one "
                "thread at a time: give each thread a session of its own"
            )
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.last_thread = threading.get_ident()
        self.lock.release()

    def check_whole(self) -> None:
        """Check that no step has left the cache half-written.

        Raises:
            InputError: If one has.
        """
        if self.is_broken:
            raise InputError(
                "a step of this session did not finish, so its cache is half-written, and a layer cannot take that "
                "back; reset() and feed the sequence again, or load_state() what was saved before"
            )

    def begin(self, generation: Generation) -> None:
        """Make a generation the current one.

        Raises:
            InputError: If another one is not finished.
        """
        other = self._generation() if self._generation is not None else None
        if other is not None and not other.has_ended and other.is_current:
            raise InputError(
                "this session is generating: another generator has not finished; take all of its tokens, close() it, "
                "or reset() the session to drop it"
            )
        self._generation = weakref.ref(generation)


class Guarded(Protocol):
    """The part of a `ProgramStepper` that a generation looks at."""

    state: Any
    moves: int
    guard: StepGuard


class Generation:
    """A generator's use of a session. It continues only if the session is where the generator left it.

    Args:
        stepper: The stepper of the session, at the time of the call.

    Attributes:
        has_ended: True if it gives no more tokens. A traceback may keep the object alive after its end.
    """

    def __init__(self, stepper: Guarded) -> None:
        self._stepper = stepper
        self.has_ended = False
        self._left: tuple[Any, int] = (stepper.state, stepper.moves)

    @property
    def is_current(self) -> bool:
        """True if the session is where this generation left it."""
        state, moves = self._left
        return self._stepper.state is state and self._stepper.moves == moves

    def steps(self, begin: Callable[[], Generator[Tokens]]) -> Generator[Tokens]:
        """Yield the items of the generator that `begin` makes, each computed under the session's lock.

        Raises:
            InputError: If the session was used or moved since the last item, or another generation is not finished.
        """
        stepper, guard, steps = self._stepper, self._stepper.guard, None
        try:
            while True:
                with guard:
                    # This thread may move the session between the call and the first token. A move by another thread
                    # is a mistake.
                    may_differ = steps is None and guard.last_thread == threading.get_ident()
                    if not may_differ and not self.is_current:
                        raise InputError(
                            "the session was reset, moved or used otherwise since this generator gave out its last "
                            "token, so it cannot continue; start another one, and use fork() for several at a time"
                        )
                    if steps is None:
                        guard.begin(self)
                        steps = begin()
                    try:
                        tokens = next(steps)
                    except StopIteration:
                        return
                    self._left = stepper.state, stepper.moves
                yield tokens
        finally:
            self.has_ended = True
            if steps is not None:
                # Closed under the lock, because closing may take tokens back while another thread runs a step.
                with guard.lock:
                    steps.close()
