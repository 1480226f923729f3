"""Untrusted work in a subprocess: input can crash the library that does it, make it hang, or fill the memory.

A deadline within this process would have to wait until the library returns to Python, and a crash ends everything. So a
subprocess does the work. The system limits its memory and time, and it is killed at a deadline. It starts without torch
and transformers, and serves one call after another.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import IO, Any

from .limited_child import ERROR, NO_MEMORY, SECONDS, receive, send

#: The path is that of this process, because the child reads neither the environment nor start-up files.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from exportable_cache.common.process.limited_child import main; main()"
)
#: Of this process's environment, what the system needs and what clocks show. Keys and tokens stay here.
_ENVIRONMENT = ("PATH", "TZ", "TZDIR", "LANG", "LC_ALL", "LC_TIME", "LD_LIBRARY_PATH", "SYSTEMROOT", "TMPDIR")
#: Address space is limited, so threads get no reserve of their own of it, and few are enough.
_SETTINGS = {"MALLOC_ARENA_MAX": "2", "RAYON_NUM_THREADS": "2", "RUST_BACKTRACE": "0"}
#: Seconds that the process may take to start and import, on a busy computer.
_STARTING = 60.0
#: Seconds that the system may take to end a process that was killed.
_KILLING = 5.0
#: Between the deadline here and the system's own, which is for when this process is gone.
_LATER = 1.0


class WorkFailed(Exception):
    """The work ended with an error, whose text this is."""


class WorkEnded(WorkFailed):
    """The process of the work was ended: by a limit, a deadline, or a crash."""


class LimitedProcess:
    """A child process for one kind of work, started by the first call and again by the next one after it was ended.

    Threads may share it: calls run one after another. A fork of this process starts its own. It ends with this process.

    Args:
        module: The full name of a module with `handle(request, data) -> (reply, data)`, see `limited_child.Handler`.
        memory: The largest address space in bytes.
        most_bytes: The largest reply in bytes.
    """

    def __init__(self, module: str, memory: int, most_bytes: int) -> None:
        self._module, self._memory, self._most_bytes = module, memory, most_bytes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: Any = None
        #: Number of processes started, so that a caller can notice a new one without state.
        self.starts = 0
        _ALL.add(self)

    @property
    def is_alive(self) -> bool:
        """True if the current process is running and keeps its state."""
        return self._process is not None and self._process.poll() is None

    def call(self, seconds: float, request: dict[str, Any], data: bytes = b"") -> tuple[dict[str, Any], bytes]:
        """Have one piece of work done.

        Args:
            seconds: The longest time it may take.
            request: JSON.
            data: Bytes that go along.

        Returns:
            The reply and its bytes.

        Raises:
            WorkFailed: If the work raises an error.
            WorkEnded: If the process took too long, took too much memory or crashed. The next call starts another.
        """
        with self._lock:
            fresh = not self.is_alive
            if fresh:
                self._start()
            assert self._process is not None
            requests, replies = self._process.stdin, self._process.stdout
            assert requests is not None and replies is not None
            watch = _Watch(self._process, replies, seconds + (_STARTING if fresh else 0))
            try:
                with watch:
                    send(requests, {**request, SECONDS: seconds + _LATER}, data)
                    watch.wait()
                    reply, out = receive(replies, self._most_bytes)
            except (OSError, EOFError, ValueError) as error:
                raise WorkEnded(self._ended(watch, seconds, error)) from None
            except BaseException:
                # Interrupted during a message: the next call would read the rest of it.
                self._stop()
                raise
        if ERROR in reply:
            if NO_MEMORY in reply:
                # The remaining memory may be too little for the next call.
                self.stop()
            raise WorkFailed(str(reply[ERROR]))
        return reply, out

    def stop(self) -> None:
        """End the process; a call that waits for it ends with `WorkEnded`, and the next one starts another."""
        process = self._process
        if process is not None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                process.kill()
                process.wait(_KILLING)

    def _start(self) -> None:
        self._stop()
        settings = {"module": self._module, "memory": self._memory, "parent": os.getpid()}
        # The folder of the package first, for installations that find it by a hook and not by the path.
        package = Path(str(sys.modules[__name__.partition(".")[0]].__file__))
        path = [str(package.resolve().parents[1]), *(os.path.abspath(entry) for entry in sys.path)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-c", _START, json.dumps(settings), json.dumps(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**_SETTINGS, **{name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}},
            )
        except OSError as error:
            raise WorkEnded(f"a process for it cannot be started: {error.strerror or error}") from error
        self._finalizer = weakref.finalize(self, _end, self._process, os.getpid())
        self.starts += 1

    def _stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process, self._finalizer = None, None

    def _ended(self, watch: _Watch, seconds: float, error: Exception) -> str:
        process = self._process
        assert process is not None
        if not watch.is_late and isinstance(error, ValueError):
            reason = f"it gives more than {self._most_bytes} bytes"
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILLING)
            name = _signal(process.returncode)
            late = watch.is_late or name == "SIGALRM"
            reason = f"it runs longer than {seconds:g} s" if late else f"its process was ended by {name}"
        self._stop()
        return reason

    def _forked(self) -> None:
        """Forget, in a fork, the process that belongs to the other one."""
        self._lock = threading.Lock()
        process, self._process = self._process, None
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None
        if process is not None:
            process.returncode = 0  # a child of the other process, which waits for it
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    # Not by `close`, which would flush what the other process is writing.
                    with contextlib.suppress(OSError):
                        os.close(stream.fileno())
                    _KEPT.append(stream)


class _Watch:
    """A deadline for a block over a process, which is killed at it.

    Attributes:
        is_late: True if the deadline has passed.
    """

    def __init__(self, process: subprocess.Popen[bytes], replies: IO[bytes], seconds: float) -> None:
        self._process, self._replies = process, replies
        self._end = time.monotonic() + seconds
        self.is_late = False
        # Windows cannot wait for a pipe with a deadline. Elsewhere a thread a call would take longer than the call.
        self._timer = threading.Timer(seconds, self._late) if os.name == "nt" else None

    def __enter__(self) -> None:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def wait(self) -> None:
        """Wait for the reply to begin.

        Raises:
            EOFError: If there is none by then.
        """
        if self._timer is None:
            # `poll` and not `select`, which takes no descriptor past 1023.
            ready = select.poll()
            ready.register(self._replies, select.POLLIN)
            if not ready.poll(max(0.0, self._end - time.monotonic()) * 1000):
                self._late()
                raise EOFError

    def _late(self) -> None:
        self.is_late = True
        self._process.kill()


def _signal(status: int | None) -> str:
    """Return the name of the signal that ended a process."""
    if status is None or status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """End a process of this one, when its owner goes or the interpreter ends."""
    if os.getpid() != owner:
        return
    with contextlib.suppress(OSError):
        process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


_ALL: weakref.WeakSet[LimitedProcess] = weakref.WeakSet()
#: Streams of a fork's other process, whose descriptors are closed: their objects must not close another's.
_KEPT: list[IO[bytes]] = []


def _after_fork() -> None:
    for process in list(_ALL):
        process._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
