"""A program and its position."""

from __future__ import annotations

import ctypes
import math
import os
import threading
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_float, c_int64, c_size_t, c_void_p
from typing import Any

from .failures import Failure, Status
from .library import OnText, OnToken, StatisticsStruct, load_library
from .options import Options, Statistics, encoded

_FLOAT32 = 0
#: Tokens that a text may have in addition to its bytes before a second call is needed.
MORE_TOKENS = 8
#: Buffer formats of `memoryview`, and bytes -> `ec_dtype`.
_DTYPES = {("f", 4): _FLOAT32, ("q", 8): 1, ("l", 8): 1}


class Session:
    """An open bundle of the target `executorch`, and its cache.

    It has one sequence, and is used by one thread at a time, except for `cancel`.

    A callback that returns False ends the generation; any other value, and None, continues it. An exception of a
    callback ends it, and the call raises the exception. So does `KeyboardInterrupt`, at the next token.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        library: str | os.PathLike[str] | None = None,
        threads: int | None = None,
    ) -> None:
        """Open a bundle's folder, at position 0.

        Args:
            folder: Folder with `manifest.json` and the program.
            library: Path of the runner's library; see `load_library`.
            threads: Compute threads of all sessions in this process; None leaves them unchanged, initially the number
                of cores.

        Raises:
            Failure: If the bundle is missing, damaged or not supported, or `threads` differs from that of open
                sessions.
        """
        self._library = load_library(library)
        self._busy, self._ending = threading.Lock(), threading.Lock()
        if threads is not None:
            # Values out of an integer's range would be truncated in C, which checks the limit.
            if not -(2**63) <= threads < 2**63:
                raise Failure(Status.INPUT, f"threads must be an integer of 64 bits, got {threads}")
            self._check(self._library.ec_set_threads(threads))
        handle = c_void_p()
        self._check(self._library.ec_open(encoded(os.fspath(folder)), byref(handle)))
        self._handle: c_void_p | None = handle
        self._closed = weakref.finalize(self, self._library.ec_close, handle)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the session's memory; a second call does nothing."""
        with self._alone(closes=True), self._ending:
            self._handle = None
            self._closed()

    def prefill(self, tokens: Sequence[int]) -> array[float]:
        """Feed tokens after the cached ones, and return the logits of the last one, [vocabulary], float32.

        Raises:
            Failure: If there are none, one is outside the vocabulary, or they do not fit.
        """
        logits, vocabulary = ctypes.POINTER(c_float)(), c_size_t()
        with self._alone() as handle:
            self._check(self._library.ec_prefill(handle, _ids(tokens), len(tokens), byref(logits), byref(vocabulary)))
            # A copy, because the library's logits are invalid after its next call.
            return array("f", ctypes.string_at(logits, vocabulary.value * ctypes.sizeof(c_float)))

    def encode_input(self, values: Any) -> None:
        """Encode an encoder-decoder's input; the decoder starts again.

        Args:
            values: Token ids, or the float32 array that a speech model's processor makes, last dimension innermost.
        """
        dtype, data, shape = _values("values", values)
        count = math.prod(shape)
        with self._alone() as handle:
            if dtype == _FLOAT32:
                self._check(self._library.ec_encode_values(handle, (c_float * count).from_buffer(data), count))
            else:
                self._check(self._library.ec_encode_tokens(handle, (c_int64 * count).from_buffer(data), count))

    def add_input(self, name: str, values: Any) -> None:
        """Add an image, video or audio for the next prompt.

        The prompt has the placeholder once per embedding.

        Args:
            name: Name of the tensor in the model's processor, such as `"pixel_values"`.
            values: An array of float32 or int64, such as numpy's.
        """
        dtype, data, shape = _values(name, values)
        with self._alone() as handle:
            given = (ctypes.c_char * len(data)).from_buffer(data)
            self._check(self._library.ec_add_input(handle, encoded(name), given, dtype, _ids(shape), len(shape)))

    def rewind(self, tokens: int) -> None:
        """Roll back the newest tokens."""
        with self._alone() as handle:
            self._check(self._library.ec_rewind(handle, tokens))

    def shift(self, count: int, first: int = 0) -> None:
        """Drop `count` tokens from position `first` on; later tokens move to lower positions.

        Raises:
            Failure: If a number is out of range, or the program or the library has no such method.
        """
        if not hasattr(self._library, "ec_shift"):
            raise Failure(
                Status.BUNDLE, "the runner's library has no ec_shift; build it with the release of this module"
            )
        with self._alone() as handle:
            self._check(self._library.ec_shift(handle, count, first))

    def reset(self) -> None:
        """Start again at position 0."""
        with self._alone() as handle:
            self._check(self._library.ec_reset(handle))

    @property
    def length(self) -> int:
        """Number of cached tokens."""
        return self._lengths()[0]

    @property
    def max_length(self) -> int | None:
        """The limit of cached tokens; None for no limit."""
        most = self._lengths()[1]
        return None if most < 0 else most

    def tokenize(self, text: str, *, starts: bool = True) -> list[int]:
        """Return the token ids of a text, which are not fed; `starts` if it begins a sequence."""
        count, known = c_size_t(), encoded(text)
        with self._alone() as handle:
            capacity = len(known) + MORE_TOKENS
            while True:
                found = (c_int64 * capacity)()
                self._check(self._library.ec_tokenize(handle, known, int(starts), found, capacity, byref(count)))
                if count.value <= capacity:
                    return found[: count.value]
                capacity = count.value

    def generate(
        self,
        prompt: Sequence[int],
        options: Options | None = None,
        on_token: Callable[[int], object] | None = None,
    ) -> tuple[list[int], Statistics]:
        """Generate tokens after a prompt.

        Raises:
            Failure: If the prompt or an option is out of range, or the prompt does not fit.
        """
        tokens: list[int] = []

        def call(handle: c_void_p, how: Any, take: Callable[..., int], statistics: Any) -> int:
            taker = OnToken(lambda token, user: take(token, tokens, on_token))
            return self._library.ec_generate(handle, _ids(prompt), len(prompt), how, taker, None, statistics)

        return tokens, self._generated(options, call)

    def generate_text(
        self,
        prompt: str,
        options: Options | None = None,
        on_text: Callable[[str], object] | None = None,
    ) -> tuple[str, Statistics]:
        """Generate text after a text, which continues the cached tokens; a piece never ends inside a character."""
        return self._text([encoded(prompt)], self._library.ec_generate_text, options, on_text)

    def chat(
        self,
        question: str,
        system: str = "",
        options: Options | None = None,
        on_text: Callable[[str], object] | None = None,
    ) -> tuple[str, Statistics]:
        """Respond to a question with the model's chat template; `system` comes before the first question."""
        return self._text([encoded(question), encoded(system)], self._library.ec_chat, options, on_text)

    def chat_messages(
        self,
        request: str,
        options: Options | None = None,
        on_text: Callable[[str], object] | None = None,
    ) -> tuple[str, Statistics]:
        """Respond to a conversation, see `render`; cached tokens of an earlier one are not fed again."""
        return self._text([encoded(request)], self._function("ec_chat_messages"), options, on_text)

    def render(self, request: str) -> str:
        """Return the model's chat template over messages.

        Args:
            request: JSON: the messages, or an object with `messages`, `tools` and other variables of the template.

        Raises:
            Failure: If the template refuses the messages, or the library was built without templates.
        """
        pieces: list[str] = []
        taker = OnText(lambda piece, size, user: pieces.append(ctypes.string_at(piece, size).decode()) or 1)
        with self._alone() as handle:
            self._check(self._function("ec_render")(handle, encoded(request), taker, None))
        return "".join(pieces)

    def load_adapter(self, path: str | os.PathLike[str], name: str) -> None:
        """Load a LoRA adapter that `exportable-cache adapter` wrote into a slot of the program.

        Raises:
            Failure: If the program has no free slot, or the file is not an adapter for it.
        """
        with self._alone() as handle:
            self._check(self._function("ec_load_adapter")(handle, encoded(os.fspath(path)), encoded(name)))

    def unload_adapter(self, name: str) -> None:
        """Free the slot of an adapter; if it is in use, the model continues without one."""
        with self._alone() as handle:
            self._check(self._function("ec_unload_adapter")(handle, encoded(name)))

    def use_adapter(self, name: str | None) -> None:
        """Run the next steps with an adapter, or with the model itself for None."""
        with self._alone() as handle:
            self._check(self._function("ec_use_adapter")(handle, None if name is None else encoded(name)))

    def cancel(self) -> None:
        """End the running generation, from any thread."""
        with self._ending:
            if self._handle is not None:
                self._library.ec_cancel(self._handle)

    def save_state(self, path: str | os.PathLike[str]) -> None:
        """Save the session's state to a file."""
        with self._alone() as handle:
            self._check(self._library.ec_save_state(handle, encoded(os.fspath(path))))

    def load_state(self, path: str | os.PathLike[str]) -> None:
        """Load a saved state of this bundle."""
        with self._alone() as handle:
            self._check(self._library.ec_load_state(handle, encoded(os.fspath(path))))

    def _lengths(self) -> tuple[int, int]:
        held, most = c_int64(), c_int64()
        with self._alone() as handle:
            self._check(self._library.ec_length(handle, byref(held), byref(most)))
        return held.value, most.value

    def _text(
        self,
        texts: list[bytes],
        function: Callable[..., int],
        options: Options | None,
        on_text: Callable[[str], object] | None,
    ) -> tuple[str, Statistics]:
        pieces: list[str] = []

        def call(handle: c_void_p, how: Any, take: Callable[..., int], statistics: Any) -> int:
            taker = OnText(lambda piece, size, user: take(ctypes.string_at(piece, size).decode(), pieces, on_text))
            return function(handle, *texts, how, taker, None, statistics)

        statistics = self._generated(options, call)
        return "".join(pieces), statistics

    def _generated(self, options: Options | None, call: Callable[..., int]) -> Statistics:
        """Run one of the generating functions, and raise a callback's exception after it."""
        raised: list[BaseException] = []

        def take(value: Any, values: list[Any], callback: Callable[[Any], object] | None) -> int:
            values.append(value)
            try:
                return int((callback is None or callback(value) is not False) and not raised)
            except BaseException as error:
                raised.append(error)
                return 0

        statistics = StatisticsStruct()
        statistics.size = ctypes.sizeof(statistics)
        how = (options or Options()).struct(raised.append)
        with self._alone() as handle:
            status = call(handle, byref(how), take, byref(statistics))
            if raised:
                raise raised[0]
            self._check(status)
        return Statistics.of(statistics)

    @contextmanager
    def _alone(self, closes: bool = False) -> Iterator[c_void_p]:
        """Yield the handle, while no other call uses it.

        Raises:
            Failure: If another thread or the call of this callback uses it, or the session is closed.
        """
        if not self._busy.acquire(blocking=False):
            raise Failure(
                Status.INPUT, "the session is in use, by another thread or by the call of this callback; wait"
            )
        try:
            if self._handle is None and not closes:
                raise Failure(Status.INPUT, "the session is closed; open another")
            yield self._handle  # type: ignore[misc]
        finally:
            self._busy.release()

    def _function(self, name: str) -> Callable[..., int]:
        """Return a function of a later minor version of the interface.

        Raises:
            Failure: If the library is older.
        """
        found = getattr(self._library, name, None)
        if found is None:
            raise Failure(
                Status.RUNTIME, f"the library has no {name}; build it again with `exportable-cache native build`"
            )
        return found  # type: ignore[no-any-return]

    def _check(self, status: int) -> None:
        if status:
            raise Failure(Status(status), self._library.ec_error().decode(errors="replace"))


def _ids(tokens: Sequence[int]) -> Any:
    """Return token ids as a C array.

    Raises:
        Failure: If one is not an integer of 64 bits, because C would truncate it.
    """
    for index, token in enumerate(tokens):
        if not -(2**63) <= token < 2**63:
            raise Failure(Status.INPUT, f"tokens[{index}] is {token}, which is outside 64 bits")
    return (c_int64 * len(tokens))(*tokens)


def _values(name: str, values: Any) -> tuple[int, bytearray, tuple[int, ...]]:
    """Return the `ec_dtype` of an array or a list of integers, its values, and its sizes."""
    if isinstance(values, (list, tuple, range)):
        values = _ids(values)
    try:
        view = memoryview(values)
    except TypeError:
        raise Failure(
            Status.INPUT, f"{name} is a {type(values).__name__}; pass an array of float32 or int64, as numpy's"
        ) from None
    dtype = _DTYPES.get((view.format.lstrip("@<="), view.itemsize))
    if dtype is None:
        raise Failure(Status.INPUT, f"{name} is an array of {view.format!r}; pass one of float32 or int64")
    return dtype, bytearray(view.tobytes()), view.shape or ()
