"""Calls of the C interface from another language, in a process of its own.

Its arguments are the library, a bundle, a folder to write to and what is asked. What came of each call is written as
JSON.

The process that runs the tests may have ExecuTorch's Python bindings loaded, whose kernels the library brings again.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

from exportable_cache_runner.library import OnText, OnToken
from exportable_cache_runner.library import OptionsStruct as Options
from exportable_cache_runner.library import StatisticsStruct as Statistics


class LaterOptions(ctypes.Structure):
    """As a caller knows them that was compiled with a later header."""

    _fields_ = [("known", Options), ("later", c_int64)]


class Library:
    """The functions, with the session as first argument."""

    def __init__(self, path: str) -> None:
        self.c = ctypes.CDLL(path)
        self.c.ec_error.restype = c_char_p
        self.c.ec_abi_version.restype = ctypes.c_uint32
        self.c.ec_open.argtypes = [c_char_p, POINTER(c_void_p)]
        self.c.ec_close.argtypes = self.c.ec_cancel.argtypes = [c_void_p]
        self.c.ec_close.restype = self.c.ec_cancel.restype = self.c.ec_options_init.restype = None
        self.c.ec_options_init.argtypes = [c_void_p, c_size_t]
        self.c.ec_prefill.argtypes = [
            c_void_p, POINTER(c_int64), c_size_t, POINTER(POINTER(c_float)), POINTER(c_size_t)
        ]  # fmt: skip
        self.c.ec_rewind.argtypes = [c_void_p, c_int64]
        self.c.ec_reset.argtypes = [c_void_p]
        self.c.ec_length.argtypes = [c_void_p, POINTER(c_int64), POINTER(c_int64)]
        self.c.ec_generate.argtypes = [
            c_void_p, POINTER(c_int64), c_size_t, c_void_p, OnToken, c_void_p, POINTER(Statistics)
        ]  # fmt: skip
        self.c.ec_generate_text.argtypes = [c_void_p, c_char_p, c_void_p, OnText, c_void_p, POINTER(Statistics)]
        self.c.ec_chat.argtypes = [c_void_p, c_char_p, c_char_p, c_void_p, OnText, c_void_p, POINTER(Statistics)]
        self.c.ec_tokenize.argtypes = [c_void_p, c_char_p, c_int, POINTER(c_int64), c_size_t, POINTER(c_size_t)]
        self.c.ec_encode_tokens.argtypes = [c_void_p, POINTER(c_int64), c_size_t]
        self.c.ec_encode_values.argtypes = [c_void_p, POINTER(c_float), c_size_t]
        self.c.ec_add_input.argtypes = [c_void_p, c_char_p, c_void_p, c_int, POINTER(c_int64), c_size_t]
        self.c.ec_save_state.argtypes = self.c.ec_load_state.argtypes = [c_void_p, c_char_p]

    def outcome(self, status: int) -> tuple[int, str]:
        return status, self.c.ec_error().decode() if status else ""

    def open(self, folder: str) -> tuple[c_void_p, tuple[int, str]]:
        session = c_void_p()
        status = self.c.ec_open(folder.encode(), byref(session))
        return session, self.outcome(status)

    def options(self, kind: Any = Options, **fields: Any) -> Any:
        found = kind()
        self.c.ec_options_init(byref(found), ctypes.sizeof(found))
        for name, value in fields.items():
            setattr(found, name, value)
        return found

    def generate(self, session: c_void_p, prompt: list[int], options: Any = None, stop_at: int = 0) -> dict[str, Any]:
        tokens: list[int] = []

        def on_token(token: int, user: int | None) -> int:
            tokens.append(token)
            return int(len(tokens) != stop_at)

        statistics = Statistics(size=ctypes.sizeof(Statistics))
        ids = (c_int64 * len(prompt))(*prompt)
        given = None if options is None else byref(options)
        status = self.c.ec_generate(session, ids, len(prompt), given, OnToken(on_token), None, byref(statistics))
        return {"outcome": self.outcome(status), "tokens": tokens, "stop": statistics.stop,
                "counted": [statistics.prompt_tokens, statistics.generated_tokens]}  # fmt: skip

    def text(self, session: c_void_p, prompt: str, options: Any = None) -> dict[str, Any]:
        pieces: list[bytes] = []

        def on_text(piece: int, size: int, user: int | None) -> int:
            pieces.append(ctypes.string_at(piece, size))
            return 1

        given = None if options is None else byref(options)
        status = self.c.ec_generate_text(session, prompt.encode(), given, OnText(on_text), None, None)
        return {"outcome": self.outcome(status), "text": b"".join(pieces).decode()}

    def chat(self, session: c_void_p, question: str) -> dict[str, Any]:
        pieces: list[bytes] = []
        taker = OnText(lambda piece, size, user: pieces.append(ctypes.string_at(piece, size)) or 1)
        status = self.c.ec_chat(session, question.encode(), None, None, taker, None, None)
        return {"outcome": self.outcome(status), "text": b"".join(pieces).decode()}

    def prefill(self, session: c_void_p, tokens: list[int]) -> dict[str, Any]:
        logits, vocab = POINTER(c_float)(), c_size_t()
        ids = (c_int64 * len(tokens))(*tokens)
        status = self.c.ec_prefill(session, ids, len(tokens), byref(logits), byref(vocab))
        return {"outcome": self.outcome(status), "logits": logits[: vocab.value] if status == 0 else []}

    def add_input(self, session: c_void_p, dtype: int, shape: list[int]) -> tuple[int, str]:
        """Four values, whatever the shape says."""
        sizes = (c_int64 * len(shape))(*shape)
        data = (c_float * 4)(1, 2, 3, 4)
        return self.outcome(self.c.ec_add_input(session, b"pixel_values", data, dtype, sizes, len(shape)))

    def threads(self, count: int) -> tuple[int, str]:
        return self.outcome(self.c.ec_set_threads(c_int64(count)))

    def length(self, session: c_void_p) -> list[int]:
        held, most = c_int64(), c_int64()
        assert self.c.ec_length(session, byref(held), byref(most)) == 0
        return [held.value, most.value]


def calls(library: Library, bundle: str, folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"abi": library.c.ec_abi_version(), "no error": library.c.ec_error().decode()}
    found["sizes"] = {"ec_options": ctypes.sizeof(Options), "ec_statistics": ctypes.sizeof(Statistics)}
    found["threads"] = [[library.threads(count), len(os.listdir("/proc/self/task"))] for count in (1, 3, 1)]
    session, found["open"] = library.open(bundle)
    found["the same threads"] = library.threads(1)
    prompt, question = asked["prompt"], asked["question"]

    found["prefill"] = library.prefill(session, prompt)
    found["length"] = library.length(session)
    state = str(folder / "c.state").encode()
    found["save"] = library.outcome(library.c.ec_save_state(session, state))
    found["next"] = library.prefill(session, [7])
    found["rewind"] = [library.outcome(library.c.ec_rewind(session, 1)), library.length(session)]
    other, _ = library.open(bundle)
    found["load"] = library.outcome(library.c.ec_load_state(other, state))
    found["next of other"] = library.prefill(other, [7])
    library.c.ec_close(other)

    library.c.ec_reset(session)
    found["generate"] = library.generate(session, prompt, library.options(max_new_tokens=8))
    library.c.ec_reset(session)
    found["without options"] = library.generate(session, prompt, None, stop_at=3)
    library.c.ec_reset(session)
    found["later options"] = library.generate(session, prompt, library.options(LaterOptions), stop_at=3)
    later = library.options(LaterOptions)
    later.later = 1
    found["unknown options"] = library.generate(session, prompt, later)
    library.c.ec_reset(session)
    stops = (c_char_p * 1)(asked["stop"].encode())
    found["text"] = library.text(session, question)
    library.c.ec_reset(session)
    found["chat"] = library.chat(session, question)
    library.c.ec_reset(session)
    found["stopped text"] = library.text(session, question, library.options(stop_strings=stops, stop_string_count=1))
    drawn = {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "seed": 5, "has_seed": 1, "max_new_tokens": 8}
    found["drawn"] = []
    for _ in range(2):
        library.c.ec_reset(session)
        found["drawn"].append(library.generate(session, prompt, library.options(**drawn))["tokens"])
    count = c_size_t()
    ids = (c_int64 * 3)()
    status = library.c.ec_tokenize(session, question.encode(), 1, ids, 3, byref(count))
    found["encode"] = [library.outcome(status), list(ids), count.value]

    library.c.ec_reset(session)
    given: list[int] = []

    def cancels(token: int, user: int | None) -> int:
        given.append(token)
        if len(given) == 3:
            other_thread = threading.Thread(target=library.c.ec_cancel, args=[session])
            other_thread.start()
            other_thread.join()
        return 1

    statistics = Statistics(size=ctypes.sizeof(Statistics))
    ids = (c_int64 * len(prompt))(*prompt)
    status = library.c.ec_generate(session, ids, len(prompt), None, OnToken(cancels), None, byref(statistics))
    found["cancelled"] = [library.outcome(status), statistics.stop, given]

    library.c.ec_reset(session)
    null = c_void_p()
    found["refused"] = [
        library.open(str(folder / "nothing"))[1],
        library.prefill(session, [10**9])["outcome"],
        library.prefill(session, [5] * 600)["outcome"],
        library.generate(session, prompt, library.options(max_new_tokens=-1))["outcome"],
        library.generate(session, prompt, library.options(top_p=3.0, temperature=1.0))["outcome"],
        library.generate(session, prompt, Options())["outcome"],
        library.generate(null, prompt)["outcome"],
        library.outcome(library.c.ec_prefill(session, None, 3, None, None)),
        library.outcome(library.c.ec_load_state(session, None)),
        library.outcome(library.c.ec_encode_tokens(session, (c_int64 * 2)(5, 6), 2)),
        library.outcome(library.c.ec_encode_values(session, None, 2)),
        library.outcome(library.c.ec_tokenize(session, b"x", 1, None, 4, byref(count))),
        *(
            library.add_input(session, dtype, shape)
            for dtype, shape in ((0, [2, 2]), (0, [2, 0]), (0, [2, 2**62]), (7, [2, 2]))
        ),
        library.outcome(library.c.ec_add_input(session, b"pixel_values", None, 0, None, 0)),
        *(library.threads(count) for count in (0, 513, 3)),
    ]
    found["after refusals"] = library.prefill(session, prompt)
    library.c.ec_close(session)
    library.c.ec_close(null)
    library.c.ec_cancel(null)
    return found


if __name__ == "__main__":
    path, bundle, folder, asked = sys.argv[1:]
    print(json.dumps(calls(Library(path), bundle, Path(folder), json.loads(asked))))
