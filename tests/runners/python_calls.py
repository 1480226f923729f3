"""Calls of the Python runner, in a process of its own that has neither torch nor the Python session.

Its arguments are the library, a bundle, a folder to write to and what is asked. What came of each call is written as
JSON.
"""

from __future__ import annotations

import array
import dataclasses
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import exportable_cache_runner.library as library_file
import exportable_cache_runner.session as session_file
from exportable_cache_runner import Failure, Options, Session, Statistics


def outcome(call: Callable[[], object]) -> list[Any]:
    try:
        return ["gave", repr(call())]
    except Failure as failure:
        return [failure.status.name, str(failure)]
    except BaseException as error:
        return [type(error).__name__, str(error)]


def counted(statistics: Statistics) -> list[Any]:
    return [statistics.prompt_tokens, statistics.generated_tokens, statistics.stop.name]


def interrupt(_: object) -> None:
    raise KeyboardInterrupt("from the callback")


_NUMBERS = (
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "has_seed",
    "prompt_lookup",
    "min_p",
    "repetition_penalty",
    "cached_tokens",
    "alternatives",
    "from_checkpoint",
)


def fields(options: Options) -> dict[str, Any]:
    """Of the structure that the library is given, but functions and counts."""
    struct = options.struct(interrupt)
    found: dict[str, Any] = {name: getattr(struct, name) for name in _NUMBERS}
    found["stop_tokens"] = struct.stop_tokens[: struct.stop_token_count]
    found["stop_strings"] = [text.decode() for text in struct.stop_strings[: struct.stop_string_count]]
    return found


def masks(session: Session, prompt: list[int], last: int) -> dict[str, Any]:
    """Answers that the caller bounds."""

    def only(token: int, count: int) -> Callable[[list[int], Any], bool]:
        def allow(tokens: list[int], mask: Any) -> bool:
            mask[token // 32] = 1 << token % 32
            return len(tokens) < count

        return allow

    tokens, statistics = session.generate(prompt, Options(allowed_tokens=only(last, 3)))
    session.reset()
    none = outcome(lambda: session.generate(prompt, Options(allowed_tokens=lambda tokens, mask: True)))
    session.reset()
    fails = outcome(lambda: session.generate(prompt, Options(allowed_tokens=lambda tokens, mask: mask[10**9])))
    session.reset()
    return {"only": [tokens, *counted(statistics)], "none": none, "fails": fails}


@contextmanager
def recorded(library: str) -> Iterator[list[int]]:
    """A block whose sessions note what they say of the start of a text."""
    load, known, starts = session_file.load_library, session_file.load_library(library), []
    tokenize = known.ec_tokenize

    def noting(*given: Any) -> int:
        starts.append(given[2])
        return tokenize(*given)

    known.ec_tokenize = noting
    session_file.load_library = lambda path: known
    try:
        yield starts
    finally:
        session_file.load_library = load


def elsewhere(session: Session, prompt: list[int]) -> dict[str, Any]:
    """What another thread may do while one generates."""
    seen: list[Any] = []

    def from_there(token: int) -> None:
        def use() -> None:
            seen.append(outcome(session.reset))
            session.cancel()

        thread = threading.Thread(target=use)
        thread.start()
        thread.join()

    tokens, statistics = session.generate(prompt, None, from_there)
    session.reset()
    return {"cancelled": [tokens, *counted(statistics)], "seen": seen}


def calls(library: str, bundle: str, folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    prompt, question = asked["prompt"], asked["question"]
    found: dict[str, Any] = {}
    with Session(bundle, library, threads=1) as session:
        found["prefill"] = list(session.prefill(prompt))
        found["length"] = [session.length, session.max_length]
        session.save_state(folder / "python.state")
        found["next"] = list(session.prefill([7]))
        session.rewind(1)
        found["after rewind"] = session.length
        with Session(bundle, library) as other:
            other.load_state(folder / "python.state")
            found["next of other"] = list(other.prefill([7]))
        session.reset()
        given: list[int] = []
        tokens, statistics = session.generate(array.array("q", prompt), Options(max_new_tokens=8), given.append)
        found["generate"] = [tokens, given, *counted(statistics)]
        session.reset()
        found["likely"] = []
        session.reset()
        noted = Options(max_new_tokens=3, on_logprobs=lambda *given: found["likely"].append(given), alternatives=2)
        session.generate(prompt, noted)
        # All but the prompt's last five tokens are cached, and one more that is not wanted.
        held = prompt[:-5]
        session.reset()
        session.prefill([*held, 7])
        again = session.generate(prompt, Options(max_new_tokens=8, cached_tokens=len(held)))
        found["cached"] = [again[0], *counted(again[1]), session.length]
        penalised = Options(max_new_tokens=8, repetition_penalty=1.3)
        session.reset()
        whole = session.generate(prompt, penalised)[0]
        session.reset()
        session.prefill(held)
        rest = session.generate(prompt, dataclasses.replace(penalised, cached_tokens=len(held)))[0]
        found["penalised"] = [whole, rest]
        session.reset()
        raising = Options(on_logprobs=lambda *given: given[2])
        found["failing logprobs"] = outcome(lambda: session.generate(prompt, raising))
        session.reset()
        tokens, statistics = session.generate(prompt, on_token=lambda token: False)
        found["callback"] = [tokens, *counted(statistics)]
        session.reset()
        pieces: list[str] = []
        text, _ = session.generate_text(question, on_text=pieces.append)
        found["text"] = [text, "".join(pieces), len(pieces)]
        session.reset()
        found["chat"] = session.chat(question)[0]
        session.reset()
        found["system"] = counted(session.chat(question, "S", Options(max_new_tokens=1))[1])[0]
        session.reset()
        stop = text[len(text) // 2]
        found["stopped"] = [stop, session.generate_text(question, Options(stop_strings=[stop]))[0]]
        drawn = Options(max_new_tokens=8, temperature=1.2, top_k=20, top_p=0.9, seed=5)
        found["drawn"] = []
        for _ in range(2):
            session.reset()
            found["drawn"].append(session.generate(prompt, drawn)[0])
        with recorded(library) as starts, Session(bundle, library) as other:
            found["tokens"] = [other.tokenize(question), other.tokenize("a", starts=False)]
            found["starts"] = starts
        # As if a text had more tokens than there is room for at first.
        session_file.MORE_TOKENS = -len(question.encode())
        found["tokens"].append(session.tokenize(question))
        session.reset()
        found |= masks(session, prompt, len(found["prefill"]) - 1) | elsewhere(session, prompt)
        refusals: dict[str, Callable[[], object]] = {
            "no bundle": lambda: Session(folder / "nothing", library),
            "no library": lambda: Session(bundle, folder / "nothing.so"),
            "another library": lambda: Session(bundle, asked["another"]),
            "threads": lambda: Session(bundle, library, threads=3),
            "many threads": lambda: Session(bundle, library, threads=513),
            "no threads": lambda: Session(bundle, library, threads=-1),
            "more than 64 bits": lambda: Session(bundle, library, threads=2**64 + 1),
            "an id": lambda: session.prefill([10**9]),
            "a large id": lambda: session.generate([5, 2**63]),
            "no tokens": lambda: session.prefill([]),
            "no room": lambda: session.prefill([5] * 600),
            "zero": lambda: session.generate_text("a\0b"),
            "half": lambda: session.chat("a\ud800"),
            "new": lambda: session.generate(prompt, Options(max_new_tokens=0)),
            "seed": lambda: session.generate(prompt, Options(temperature=1.0, seed=-1)),
            "stop": lambda: session.generate(prompt, Options(stop_tokens=[5, -1])),
            "cached": lambda: session.generate(prompt, Options(cached_tokens=1)),
            "cached whole": lambda: (session.prefill(prompt), session.generate(prompt, Options(cached_tokens=40))),
            "alternatives": lambda: session.generate(prompt, Options(alternatives=-1)),
            "top_p": lambda: session.generate(prompt, Options(temperature=1.0, top_p=3.0)),
            "no encoder": lambda: session.encode_input([5, 6]),
            "no speech": lambda: session.encode_input(array.array("f", [1.0, 2.0])),
            "an input": lambda: session.add_input("pixel_values", array.array("f", [1.0])),
            "no array": lambda: session.add_input("pixel_values", 1.0),
            "doubles": lambda: session.add_input("pixel_values", array.array("d", [1.0])),
            "inside": lambda: session.generate(prompt, None, lambda token: session.reset()),
            "interrupted": lambda: session.generate_text(question, on_text=interrupt),
        }
        found["refused"] = {}
        for name, call in refusals.items():
            session.reset()
            found["refused"][name] = outcome(call)
        session.reset()
        found["after refusals"] = list(session.prefill(prompt))
    session.close()
    session.cancel()
    found["closed"] = outcome(session.reset)
    every = {"max_new_tokens": 3, "temperature": 0.5, "top_k": 4, "top_p": 0.25, "seed": 2**64 - 1}
    every |= {
        "stop_tokens": [5, 6],
        "stop_strings": ["a", "é"],
        "prompt_lookup": 7,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "cached_tokens": 3,
        "alternatives": 4,
        "from_checkpoint": True,
    }
    found["options"] = [every, fields(Options(**every)), fields(Options())]
    library_file.ABI += 1
    found["another interface"] = outcome(lambda: Session(bundle, library))
    sys.modules["executorch.extension.pybindings._portable_lib"] = sys
    found["beside the bindings"] = outcome(lambda: Session(bundle, library))
    found["loaded"] = [name for name in ("torch", "numpy", "exportable_cache") if name in sys.modules]
    return found


if __name__ == "__main__":
    library, bundle, folder, asked = sys.argv[1:]
    print(json.dumps(calls(library, bundle, Path(folder), json.loads(asked))))
