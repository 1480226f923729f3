"""Calls of the Python runner that print the lines of `OptionCalls.java`, in a process without torch.

Its arguments are the library, two bundles, a folder of adapters, token ids and a file to write.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from functools import partial

from exportable_cache_runner import Failure, Options, Session


def refused(call: Callable[[], object]) -> str:
    try:
        call()
        return "nothing was refused"
    except Failure as failure:
        return f"{failure.status.value} {failure}"


def bits(logits: list[float]) -> str:
    return " ".join(str(one) for one in struct.unpack(f"<{len(logits)}i", struct.pack(f"<{len(logits)}f", *logits)))


def logits(session: Session, prompt: list[int]) -> str:
    session.reset()
    return bits(session.prefill(prompt))


def continued(session: Session, prompt: list[int], **options: object) -> str:
    tokens, found = session.generate(prompt, Options(**{"max_new_tokens": 12, **options}))
    return " ".join(map(str, [*tokens, found.proposed_tokens, found.accepted_tokens]))


def generated(session: Session, prompt: list[int], **options: object) -> str:
    session.reset()
    return continued(session, prompt, **options)


def adapters(session: Session, prompt: list[int], folder: str, state: str) -> None:
    for name in ("one", "two"):
        session.load_adapter(f"{folder}/{name}.adapter", name)
    for name in (None, "one", "two", None):
        session.use_adapter(name)
        print(logits(session, prompt))
    session.use_adapter("one")
    print(refused(lambda: session.save_state(state)))
    session.unload_adapter("one")
    print(logits(session, prompt))
    print(refused(lambda: session.use_adapter("one")))
    print(refused(lambda: session.unload_adapter("one")))
    for bad in ("other.adapter", "rank.adapter", "nan.adapter", "cut.adapter", "missing.adapter", "peft",
                "peft/adapter_model.safetensors"):  # fmt: skip
        print(refused(partial(session.load_adapter, f"{folder}/{bad}", "bad")))
    print(refused(lambda: session.load_adapter(f"{folder}/one.adapter", "")))


def shifts(session: Session, prompt: list[int]) -> None:
    logits(session, prompt)
    session.shift(5, 4)
    length = session.length
    print(length, bits(session.prefill([7])))
    print(refused(lambda: session.shift(0, 0)))
    bias = {2: -100.0}
    print(generated(session, prompt, max_new_tokens=150, shift_when_full=True, protected_tokens=8, logit_bias=bias))


def options(session: Session, prompt: list[int]) -> None:
    def give(own: float, most: list[tuple[int, float]]) -> None:
        first, last = (struct.unpack("<q", struct.pack("<d", one))[0] for one in (own, most[2][1]))
        print(first, [token for token, _ in most], last)

    ask = partial(generated, session, prompt)
    print(ask())
    print(ask(temperature=4.0, min_p=0.3, seed=3))
    print(ask(temperature=4.0, seed=3))
    print(ask(repetition_penalty=3.0))
    print(ask(presence_penalty=4.0))
    print(ask(frequency_penalty=3.0, counted_tokens=[340, 340, 340, 335]))
    print(ask(logit_bias={7: 100.0}))
    session.reset()
    session.prefill(prompt[:30])
    found = continued(session, prompt, cached_tokens=30)
    print(found, session.length)
    print(ask(alternatives=3, on_logprobs=give))
    print(refused(lambda: session.render("[]")).split(" ")[0])
    print(refused(lambda: session.chat_messages("[]")).split(" ")[0])


def main(library: str, bundle: str, drafted: str, folder: str, ids: str, state: str) -> None:
    prompt = [int(one) for one in ids.split()]
    with Session(bundle, library, threads=1) as session:
        adapters(session, prompt, folder, state)
        shifts(session, prompt)
        options(session, prompt)
    prompt = [token % 100 for token in prompt]  # its vocabulary is smaller
    with Session(drafted, library) as session:
        print(generated(session, prompt))
        print(generated(session, prompt, draft_tokens=3))
        print(refused(lambda: session.load_adapter(f"{folder}/one.adapter", "one")).split(" ")[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
