"""Graphs compiled in another process, while steps run as they are: nobody waits for a graph.

The other process gets the model without its weights, compiles what is asked for into a folder of graphs, and says so; a
thread of this one then loads it. A process and not a thread, as a compiler in a thread would take turns with every
operator of a step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import torch

from ..errors import InputError
from .compiling import StepCompiler
from .skeleton import skeleton

if TYPE_CHECKING:
    from ..models.cache_factory import ExportableCache
    from ..program.spec import ProgramSpec

log = logging.getLogger(__name__)

_DIFFERENT = "what was compiled does not fit this process"
#: Seconds that a thread holds the interpreter while a graph is loaded, so that steps go on meanwhile.
_SWITCH_INTERVAL = 0.0005


class Asked(Protocol):
    """A graph that a step would run, see `module.Graph`."""

    key: tuple
    asked: tuple
    method: Any
    arguments: list[torch.Tensor]

    @property
    def module(self) -> torch.nn.Module: ...
    @property
    def name(self) -> str: ...


@dataclass
class Mail:
    """What the threads of one compiler share.

    Attributes:
        waiting: Graphs asked for and not there yet, by their number.
        ready: Graphs that can be called, by key.
        unshared: Methods whose read lengths need a graph each, by key.
        failed: Why a graph is never coming, by key.
        changed: Notified with every one that comes.
        over: Why no more come, None as long as some may.
    """

    waiting: dict[int, Asked] = field(default_factory=dict)
    ready: dict[tuple, Callable[..., Any]] = field(default_factory=dict)
    unshared: dict[tuple, Any] = field(default_factory=dict)
    failed: dict[tuple, str] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    over: str | None = None


class BackgroundCompiler:
    """Has graphs compiled by another process, which starts with the first that is asked for.

    Args:
        model: In eval mode, its attention chosen.
        cache: What its steps write.
        spec: Of the program.
        graph_cache: Folder of graphs, the hand-over; None for a private one that goes with this object.

    Raises:
        InputError: If the model cannot be handed to another process.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        cache: ExportableCache,
        spec: ProgramSpec,
        graph_cache: str | Path | None,
    ) -> None:
        try:
            self._skeleton = skeleton((model, cache, spec))
        except Exception as error:  # of whatever part of the model cannot be pickled
            raise InputError(
                f"this model cannot be compiled in the background, as it cannot be pickled ({error}); "
                "pass compile=True, which compiles when a graph is needed"
            ) from error
        self._folder = private_folder(self) if graph_cache is None else Path(graph_cache)
        #: Loads what was compiled.
        self.compiler = StepCompiler(model, cache, None, self._folder)
        self._mail = Mail()
        self._out: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._asked: dict[tuple, int] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize | None = None
        self._waits = False
        self._has_warned = False

    @property
    def pending(self) -> int:
        """Graphs that were asked for and are not there yet."""
        return len(self._mail.waiting)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A block in which `take` waits for its graph."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def take(self, graph: Asked, inputs: Sequence[torch.Tensor], ahead: bool = False) -> Callable[..., Any] | None:
        """A graph if it can be called; None if it is being compiled, which it is from now on, or cannot be.

        Args:
            graph: Which.
            inputs: The call's arguments, before they were marked.
            ahead: Whether it is for a later step, and others go first.
        """
        if graph.key not in self._asked and self._mail.over is None:
            self._ask(graph, inputs, ahead)
        if self._waits and not ahead:
            with self._mail.changed:
                self._mail.changed.wait_for(lambda: self._has_come(graph.key) or self._is_lost(graph.key))
        if self._is_lost(graph.key):
            self._warn(self._mail.failed.get(graph.key, self._mail.over))
        return self._mail.ready.get(graph.key)

    def unshared(self, key: tuple) -> Any | None:
        """The method of a graph, if it has to be compiled for each read length."""
        return self._mail.unshared.get(key)

    def close(self) -> None:
        """End the other process. A second call does nothing."""
        if self._end is not None:
            self._end()

    def _has_come(self, key: tuple) -> bool:
        return key in self._mail.ready or key in self._mail.unshared

    def _is_lost(self, key: tuple) -> bool:
        return not self._has_come(key) and (key in self._mail.failed or self._mail.over is not None)

    def _warn(self, reason: str | None) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"compiling in the background failed, and steps go on without compiled graphs: {reason}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _ask(self, graph: Asked, inputs: Sequence[torch.Tensor], ahead: bool) -> None:
        number = self._asked[graph.key] = len(self._asked)
        self._mail.waiting[number] = graph
        if self._process is None:
            self._start()
        # Copies: a chooser's own tensors change while they wait.
        self._out.put((number, graph.asked, [tensor.clone() for tensor in inputs], ahead))

    def _start(self) -> None:
        folder = self._folder
        folder.mkdir(parents=True, exist_ok=True)
        # Its own session, so that an interrupt from the keyboard is this process's to handle.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._end = weakref.finalize(self, _stop, self._process, self._mail, self._out)
        self._out.put((str(folder), torch_settings(), self._skeleton))
        self._skeleton = b""
        loading = (self._process.stdout, self._mail, self.compiler)
        threading.Thread(target=_load_all, args=loading, daemon=True, name="graphs").start()
        threading.Thread(target=_send_all, args=(self._process.stdin, self._out), daemon=True, name="asked").start()


_CHILD = "import sys; sys.path[:] = sys.argv[1:]; from exportable_cache.backends.background_process import main; main()"


def private_folder(owner: object) -> Path:
    """A folder of this user's own that goes with an object."""
    folder = Path(tempfile.mkdtemp(prefix="exportable-cache-graphs-"))
    # Finalizers of one object run newest first: the process that writes here has ended by then.
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    return folder


def torch_settings() -> dict[str, Any]:
    """Settings of this process that decide what is compiled, as far as another can take them over."""
    return {
        "threads": torch.get_num_threads(),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _stop(process: subprocess.Popen[bytes], mail: Mail, out: queue.SimpleQueue[Any]) -> None:
    mail.over = mail.over or "the session is closed"
    out.put(None)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        # With the compilers that it started.
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _send_all(requests: IO[bytes], out: queue.SimpleQueue[Any]) -> None:
    """Hand over what is asked for. A pipe holds less than a model's skeleton, and the other process starts slowly."""
    # One that is gone is noticed by the thread that reads from it.
    with contextlib.suppress(OSError):
        while (item := out.get()) is not None:
            pickle.dump(item, requests)
            requests.flush()


def _load_all(replies: IO[bytes], mail: Mail, compiler: StepCompiler) -> None:
    """Take the other process's word that graphs are in the folder, and load them."""
    while mail.over is None:
        try:
            kind, number, reason = pickle.load(replies)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):
            break
        graph = mail.waiting.get(number)
        call = None
        if kind == "ready" and graph is not None:
            try:
                call = _loaded(graph, compiler)
            except Exception as error:  # of a loader over files
                reason = f"{type(error).__name__}: {error}"
        log.info("%s %s: %s", graph.method.name if graph else "", kind, reason)
        with mail.changed:
            mail.waiting.pop(number, None)
            if graph is None:
                mail.over = reason
            elif call is not None:
                mail.ready[graph.key] = call
            else:
                known = mail.unshared if kind == "unshare" else mail.failed
                known[graph.key] = graph.method if kind == "unshare" else reason or _DIFFERENT
            mail.changed.notify_all()
    with mail.changed:
        mail.over = mail.over or "the compiling process has ended"
        mail.changed.notify_all()


def _loaded(graph: Asked, compiler: StepCompiler) -> Callable[..., Any] | None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _SWITCH_INTERVAL))
    try:
        with torch.no_grad():
            return compiler.load(graph.module, graph.method, graph.name, graph.arguments)
    finally:
        sys.setswitchinterval(before)
