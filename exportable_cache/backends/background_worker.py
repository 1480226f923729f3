"""The threads that bring graphs: from the folder, or from another process that compiles them into it.

That process gets the model without its weights. A process and not a thread, as a compiler in a thread would take turns
with every operator of a step.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

from ..common.compat.torch import inductor_config
from ..common.garbage import few_collections, put_off_full_collection
from ..common.process_setting import ProcessSetting
from .compiling import CompileOptions, StepCompiler
from .graph_cache import GRAPH, import_loader
from .graphs import Graph
from .throttle import STEPS

log = logging.getLogger(__name__)

_DIFFERENT = "what was compiled does not fit this process"
#: Seconds that a thread holds the interpreter while a graph is loaded. A step without a graph gives it back and takes
#: it again for each of its hundreds of operators.
_SWITCH_INTERVAL = 0.00005
_SWITCHING = ProcessSetting(sys.getswitchinterval, sys.setswitchinterval)
#: Longest time that the end of a session waits for a graph that is being loaded, which takes two or three.
_LOADING_SECONDS = 20.0
#: Garbage is looked for once everything is imported, see `collect_seldom`. It has a process group of its own, so that
#: an interrupt from the keyboard is this process's to handle, and no session of its own: where Linux shares the
#: processor among sessions first, its niceness would count within that only, and each operator of a compiled step would
#: wait for it.
_CHILD = """
import gc, os, sys
os.setpgrp()
gc.disable()
sys.path[:] = sys.argv[1:]
from exportable_cache.backends.background_process import main
main()
"""


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

    waiting: dict[int, Graph] = field(default_factory=dict)
    ready: dict[tuple, Callable[..., Any]] = field(default_factory=dict)
    unshared: dict[tuple, Any] = field(default_factory=dict)
    failed: dict[tuple, str] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    over: str | None = None


class GraphWorker:
    """Brings graphs into a `Mail`. Its threads and its process start with the first that is asked for.

    Args:
        compiler: Loads them.
        options: Folder of graphs, and who is told of each.
        skeleton: Of model, cache and spec.
        mail: Where they come.
    """

    def __init__(self, compiler: StepCompiler, options: CompileOptions, skeleton: bytes, mail: Mail) -> None:
        self._compiler, self._options, self._skeleton, self._mail = compiler, options, skeleton, mail
        self._folder = Path(str(options.graph_cache))
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._loading = threading.Lock()
        self._threads: list[threading.Thread] = []
        # torch's settings are those of a context, and a thread begins with an empty one.
        self._context = contextvars.copy_context()
        #: Of the process when this was made: steps use fewer while graphs are compiled.
        self.torch_threads = torch.get_num_threads()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    def ask(self, number: int, graph: Graph, inputs: list[torch.Tensor], ahead: bool) -> None:
        """Have a graph brought; `ahead` if others go first."""
        self._mail.waiting[number] = graph
        if not self._threads:
            self._start(self._serve, name="graphs asked for")
        self._requests.put((number, graph.asked, inputs, ahead))
        self._tell(graph, number + 1)

    def stop(self) -> None:
        """End the process and what it has started, and wait for a graph that is being loaded."""
        if os.getpid() != self._owner:  # a fork, which has none of the threads
            return
        with self._mail.changed:
            self._mail.over = self._mail.over or "the session is closed"
            self._mail.changed.notify_all()
        self._requests.put(None)
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            # It has its group only once it runs.
            self._process.kill()
            self._process.wait()
        # A thread that loads machine code while the interpreter ends takes the whole process down with it.
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_LOADING_SECONDS)

    def _start(self, work: Callable[..., None], *arguments: Any, name: str) -> None:
        def run() -> None:
            # Graphs are guarded by the number of threads. A new thread takes over the one that steps run with when it
            # first asks, even if another was set before.
            torch.get_num_threads()
            torch.set_num_threads(self.torch_threads)
            work(*arguments)

        thread = threading.Thread(target=self._context.copy().run, args=(run,), daemon=True, name=name)
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        """Take what is asked for from the folder, or hand it over. A pipe holds less than a model's skeleton, and the
        other process starts slowly.
        """
        while (item := self._requests.get()) is not None and self._mail.over is None:
            graph = self._mail.waiting[item[0]]
            call = None
            # Looking for one takes seconds the first time: what it is named by comes with the compiler's import.
            if any(self._folder.glob(f"*{GRAPH}")):
                try:
                    call = self._loaded(graph)
                except Exception as error:  # of a loader over files
                    log.info("%s cannot be loaded: %s", graph.method.name, error)
            if call is not None:
                self._deliver(item[0], graph, "loaded", call)
                continue
            # A process that is gone is noticed by the thread that reads from it.
            with contextlib.suppress(OSError):
                requests = self._started()
                if requests is not None:
                    pickle.dump(item, requests)
                    requests.flush()

    def _started(self) -> IO[bytes] | None:
        """Where the process takes requests, which starts if there is none; None if none is wanted any more."""
        with self._mail.changed:
            if self._mail.over is not None:
                return None
            if self._process is not None:
                return self._process.stdin
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CHILD, *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        requests, replies = self._process.stdin, self._process.stdout
        assert requests is not None and replies is not None
        self._start(self._receive, replies, name="graphs")
        pickle.dump((str(self._folder), self._options.graph_cache_mb, torch_settings(), self._skeleton), requests)
        self._skeleton = b""
        return requests

    def _receive(self, replies: IO[bytes]) -> None:
        """Take the other process's word that graphs are in the folder, and load them."""
        while self._mail.over is None:
            try:
                kind, number, reason = pickle.load(replies)
            except (EOFError, OSError, ValueError, pickle.UnpicklingError):
                break
            if kind == "begun":
                # What is wrong with it is told when a graph is loaded.
                with self._sparing(), contextlib.suppress(Exception):
                    import_loader()
                continue
            graph = self._mail.waiting.get(number)
            if graph is None:
                with self._mail.changed:
                    self._mail.over = reason
                break
            call = None
            if kind == "ready":
                try:
                    call = self._loaded(graph)
                except Exception as error:  # of a loader over files
                    reason = f"{type(error).__name__}: {error}"
            self._deliver(number, graph, kind, call, reason)
        with self._mail.changed:
            self._mail.over = self._mail.over or "the compiling process has ended"
            self._mail.changed.notify_all()

    def _deliver(self, number: int, graph: Graph, kind: str, call: Callable[..., Any] | None, reason: str = "") -> None:
        log.info("%s %s: %s", graph.method.name, kind, reason)
        with self._mail.changed:
            if call is not None:
                self._mail.ready[graph.key] = call
            elif kind == "unshare":
                self._mail.unshared[graph.key] = graph.method
            else:
                self._mail.failed[graph.key] = reason or _DIFFERENT
            del self._mail.waiting[number]
            self._mail.changed.notify_all()
        self._tell(graph, number + 1)

    def _tell(self, graph: Graph, least: int) -> None:
        mail = self._mail
        done = len(mail.ready) + len(mail.unshared) + len(mail.failed)
        self._options.progress(f"compiling {graph.method.name}", done, max(least, done + len(mail.waiting)))

    def _loaded(self, graph: Graph) -> Callable[..., Any] | None:
        with self._sparing(), torch.no_grad():
            call = self._compiler.load(graph.module, graph.method, graph.name, graph.arguments)
            put_off_full_collection()
            return call

    @contextlib.contextmanager
    def _sparing(self) -> Iterator[None]:
        """A block of one thread at a time, in which steps come to their turn."""
        with (
            self._loading,
            _SWITCHING.during(lambda found: min(found, _SWITCH_INTERVAL)),
            few_collections(),
            STEPS.throttled(),
        ):
            yield


def torch_settings() -> dict[str, Any]:
    """Settings of this process that decide what is compiled, as far as another can take them over."""
    return {
        "threads": torch.get_num_threads(),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "inductor": inductor_config(),
    }
