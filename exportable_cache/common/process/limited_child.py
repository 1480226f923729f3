"""The subprocess that `LimitedProcess` starts: it serves one request after another, within system limits.

It imports only the standard library and the module that does the work. Replies are JSON and bytes, never a pickle,
because the input may have compromised the library that works on it.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
from collections.abc import Callable
from importlib import import_module
from typing import IO, Any

#: A function from a request and its bytes to a reply and its bytes.
Handler = Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes]]

#: Key of an error's text in a reply.
ERROR = "error"
#: Key of a reply that reports a lack of memory.
NO_MEMORY = "no_memory"
#: Key of the time limit in a request: seconds until the system ends this process.
SECONDS = "seconds"
#: Header of a message: the sizes of its JSON and of its bytes.
_SIZES = struct.Struct("<QQ")
#: Seconds between checks that the parent process is alive.
_LOOK = 2.0


def send(file: IO[bytes], message: dict[str, Any], data: bytes = b"") -> None:
    """Write one message."""
    text = json.dumps(message, separators=(",", ":")).encode("ascii")
    file.write(_SIZES.pack(len(text), len(data)) + text)
    file.write(data)
    file.flush()


def receive(file: IO[bytes], most_bytes: int) -> tuple[dict[str, Any], bytes]:
    """Read one message.

    Args:
        file: Stream to read.
        most_bytes: Largest size of either part.

    Raises:
        EOFError: If the other process has ended, also during a message.
        ValueError: If the message is malformed or too long.
    """
    text_size, data_size = _SIZES.unpack(_exactly(file, _SIZES.size))
    if max(text_size, data_size) > most_bytes:
        raise ValueError(f"a message must have at most {most_bytes} bytes, got {max(text_size, data_size)}")
    message = json.loads(_exactly(file, text_size))
    if not isinstance(message, dict):
        raise ValueError("a message must be a JSON object")
    return message, _exactly(file, data_size)


def main() -> None:
    """Serve the parent process over the standard streams until it ends."""
    # Ctrl-C in a terminal reaches every process of the group, but the parent decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = json.loads(sys.argv[1])
    requests, replies = os.fdopen(os.dup(0), "rb", buffering=0), os.fdopen(os.dup(1), "wb")
    # Discard what libraries print, because stdout carries replies.
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    handler: Handler = import_module(settings["module"]).handle
    _limit_this_process(settings["memory"])
    while _wait_for_request(requests, settings["parent"]):
        try:
            request, data = receive(requests, sys.maxsize)
        except (EOFError, ValueError):
            return
        _set_time_limit(request[SECONDS])
        try:
            reply, out = handler(request, data)
        except MemoryError:
            reply, out = {ERROR: "it ran out of memory", NO_MEMORY: True}, b""
        except BaseException as error:  # a panic of a Rust library is not an Exception
            reply, out = {ERROR: _first_line(error)}, b""
        _set_time_limit(0)
        send(replies, reply, out)


def _limit_this_process(memory: int) -> None:
    try:
        import resource
    except ImportError:  # Windows, where only the parent watches the time
        return
    for limit, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CORE, 0),
        # It writes no files.
        (resource.RLIMIT_FSIZE, 0),
    ):
        _, hard = resource.getrlimit(limit)
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        try:
            resource.setrlimit(limit, (most, most))
        except (OSError, ValueError):  # macOS does not limit the address space
            pass
    # The default action ends the process without running Python code.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})


def _set_time_limit(seconds: float) -> None:
    """Set a timer of the system that ends this process after some seconds, even without its parent; 0 cancels it."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _wait_for_request(requests: IO[bytes], parent: int) -> bool:
    """Wait for a request. Return False if the parent has ended; its fork may hold the stream open."""
    if os.name == "nt":
        return True
    from select import select

    while not select([requests], [], [], _LOOK)[0]:
        if os.getppid() != parent:
            return False
    return True


def _exactly(file: IO[bytes], size: int) -> bytes:
    parts: list[bytes] = []
    left = size
    while left:
        part = file.read(left)
        if not part:
            raise EOFError
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:1000]
