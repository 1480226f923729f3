"""The process that `LimitedProcess` starts: it does one piece of work after another, within limits of the system's.

It imports the standard library and the module that does the work, nothing else of this package. What comes back from it
is JSON and bytes, never a pickle, because the library that works in it may be broken by what it is given.
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

#: Work on a request and its bytes: the reply and its bytes.
Handler = Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes]]

#: Key of a reply that is an error's text.
ERROR = "error"
#: Key of an error that had no memory.
NO_MEMORY = "no_memory"
#: Key of a request: seconds after which the system ends this process.
SECONDS = "seconds"
#: Sizes of a message's JSON and of its bytes.
_SIZES = struct.Struct("<QQ")
#: Seconds between two looks at whether the other process still lives.
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
        file: Where it comes from.
        most_bytes: The largest size of either part.

    Raises:
        EOFError: If the other process is gone, or amid a message.
        ValueError: If this is not a message, or one that is too long.
    """
    text_size, data_size = _SIZES.unpack(_exactly(file, _SIZES.size))
    if max(text_size, data_size) > most_bytes:
        raise ValueError(f"a message of {max(text_size, data_size)} bytes")
    message = json.loads(_exactly(file, text_size))
    if not isinstance(message, dict):
        raise ValueError("a message that is no object")
    return message, _exactly(file, data_size)


def main() -> None:
    """Serve the process at the other end of the standard streams until it is gone."""
    # Ctrl-C in a terminal reaches every process of the group. The other process decides what it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = json.loads(sys.argv[1])
    requests, replies = os.fdopen(os.dup(0), "rb", buffering=0), os.fdopen(os.dup(1), "wb")
    # What a library prints is no reply.
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    handler: Handler = import_module(settings["module"]).handle
    _limit_this_process(settings["memory"])
    while _waits(requests, settings["parent"]):
        try:
            request, data = receive(requests, sys.maxsize)
        except (EOFError, ValueError):
            return
        _end_after(request[SECONDS])
        try:
            reply, out = handler(request, data)
        except MemoryError:
            reply, out = {ERROR: "it ran out of memory", NO_MEMORY: True}, b""
        except BaseException as error:  # a panic of a library in Rust is no Exception
            reply, out = {ERROR: _first_line(error)}, b""
        _end_after(0)
        send(replies, reply, out)


def _limit_this_process(memory: int) -> None:
    try:
        import resource
    except ImportError:  # Windows, where the other process alone watches the time
        return
    for limit, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CORE, 0),
        # It has no file to write.
        (resource.RLIMIT_FSIZE, 0),
    ):
        _, hard = resource.getrlimit(limit)
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        try:
            resource.setrlimit(limit, (most, most))
        except (OSError, ValueError):  # macOS does not limit the address space
            pass
    # The system's own action, which needs no line of Python to run.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})


def _end_after(seconds: float) -> None:
    """Have the system end this process after some seconds, also if the other one is gone by then; 0 takes it back."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _waits(requests: IO[bytes], parent: int) -> bool:
    """Wait for a request. False if the other process is gone: a fork of it may hold the stream open."""
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
