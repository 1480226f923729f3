"""Subprocess of `native_runner.py`: it feeds tokens to the native runner, and saves its state. It imports no torch."""

from __future__ import annotations

import os
import sys

from exportable_cache_runner import Failure, Session

from ..common.process.limited_child import ERROR, receive, send

#: Largest request: more token ids than any step takes.
_MOST_BYTES = 1 << 28


def main() -> None:
    """Open the bundle that the last argument names, and serve the parent process until it ends."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # What libraries print must not be read as a reply.
    os.dup2(2, 1)
    try:
        session = Session(sys.argv[-1])
    except Failure as error:
        send(replies, {ERROR: str(error)})
        return
    send(replies, {})
    while True:
        try:
            request, data = receive(requests, _MOST_BYTES)
        except EOFError:
            return
        try:
            if "save" in request:
                session.save_state(request["save"])
                send(replies, {})
            else:
                send(replies, {}, _step(session, request["position"], list(memoryview(data).cast("q"))))
        except Failure as error:
            send(replies, {ERROR: str(error)})


def _step(session: Session, position: int, tokens: list[int]) -> bytes:
    """Feed tokens at a position, and return the logits of the last one, float32."""
    if position == 0:
        session.reset()
    elif position < session.length:
        session.rewind(session.length - position)
    return session.prefill(tokens).tobytes()
