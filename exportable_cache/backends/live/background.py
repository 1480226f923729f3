"""Compile graphs in a subprocess while steps run eagerly, and load them in worker threads."""

from __future__ import annotations

import contextlib
import contextvars
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch

from ...common.compat.torch import inductor_config
from ...common.process.tuning import ProcessSetting, few_collections, postpone_full_collection, torch_threads
from ...errors import InputError
from .compile import CompileOptions, StepCompiler, check_background
from .graph_cache import GRAPH, import_loader
from .graphs import Graph
from .model_snapshot import skeleton
from .ops import OWN_OPERATORS, eager_operators
from .ops.linear import onednn_is_better

if TYPE_CHECKING:
    from ...models.cache_factory import ExportableCache
    from ...program.spec import ProgramSpec


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
from exportable_cache.backends.live.background_process import main
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
            postpone_full_collection()
            return call

    @contextlib.contextmanager
    def _sparing(self) -> Iterator[None]:
        """A block of one thread at a time that gives the interpreter to steps often."""
        with (
            self._loading,
            _SWITCHING.during(lambda found: min(found, _SWITCH_INTERVAL)),
            few_collections(),
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


class BackgroundCompiler:
    """Hands out graphs once they are there, and has them compiled where they are not.

    Args:
        model: In eval mode, its attention chosen.
        cache: What its steps write.
        spec: Of the program.
        options: How. Graphs are handed over in a folder: `graph_cache`, or a private one that goes with this object.

    Raises:
        InputError: If the model cannot be handed to another process.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        cache: ExportableCache,
        spec: ProgramSpec,
        options: CompileOptions,
    ) -> None:
        try:
            written = skeleton((model, cache, spec))
        except Exception as error:  # of whatever part of the model cannot be pickled
            raise InputError(
                f"this model cannot be compiled in the background, as it cannot be pickled ({error}); "
                'pass compile="wait", which compiles when a graph is needed'
            ) from error
        if options.graph_cache is None:
            options = replace(options, graph_cache=_private_folder(self))
        #: Loads what was compiled.
        self.compiler = StepCompiler(model, cache, options)
        self._mail = Mail()
        self._worker = GraphWorker(self.compiler, options, written, self._mail)
        # Finalizers of one object run newest first: the process that writes to the folder ends before that goes.
        self._end = weakref.finalize(self, self._worker.stop)
        self._asked: dict[tuple, int] = {}
        self._waits = False
        self._by_onednn = onednn_is_better()
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

    @contextlib.contextmanager
    def meanwhile(self) -> Iterator[None]:
        """Run a step that has no graph yet with this package's operators once they are compiled, or with oneDNN's."""
        rows, queries = (operators.load(compiles=False) for operators in OWN_OPERATORS)
        with torch_threads(self._worker.torch_threads), eager_operators(rows, queries, self._by_onednn):
            yield

    def take(self, graph: Graph, inputs: Sequence[torch.Tensor], ahead: bool = False) -> Callable[..., Any] | None:
        """A graph if it can be called; None if it is being compiled, which it is from now on, or cannot be.

        Args:
            graph: Which.
            inputs: The call's arguments, before they were marked.
            ahead: Whether it is for a later step, and others go first.
        """
        if graph.key not in self._asked and self._mail.over is None:
            number = self._asked[graph.key] = len(self._asked)
            # Copies: a chooser's own tensors change while they wait.
            self._worker.ask(number, graph, [tensor.clone() for tensor in inputs], ahead)
        if self._waits and not ahead:
            with self._mail.changed:
                self._mail.changed.wait_for(lambda: self._has_come(graph.key) or self._is_lost(graph.key))
        if self._is_lost(graph.key):
            self._warn(self._mail.failed.get(graph.key, self._mail.over))
        return self._mail.ready.get(graph.key)

    def lose(self, key: tuple, reason: str) -> None:
        """Hand a graph out no more."""
        with self._mail.changed:
            del self._mail.ready[key]
            self._mail.failed[key] = reason

    def unshared(self, key: tuple) -> Any | None:
        """The method of a graph, if it has to be compiled for each read length."""
        return self._mail.unshared.get(key)

    def close(self) -> None:
        """End the other process. A second call does nothing."""
        self._end()

    def _has_come(self, key: tuple) -> bool:
        return key in self._mail.ready or key in self._mail.unshared

    def _is_lost(self, key: tuple) -> bool:
        return not self._has_come(key) and (key in self._mail.failed or self._mail.over is not None)

    def _warn(self, reason: str | None) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"compiling in the background failed, and steps go on without compiled graphs: {reason}; "
                'compile="wait" compiles in this process',
                RuntimeWarning,
                stacklevel=2,
            )


def background_compiler(
    model: torch.nn.Module, cache: ExportableCache, spec: ProgramSpec, options: CompileOptions
) -> BackgroundCompiler | None:
    """One, or None where graphs are compiled when they are needed.

    Raises:
        InputError: If it is asked for by name, and graphs cannot come from another process.
    """
    if options.compile not in (True, "background"):
        return None
    try:
        if cache.ranks is not None:
            raise InputError(
                f"the model is split over {cache.ranks.size} processes, and another one would have none of its sums; "
                'pass compile=True, or "wait"'
            )
        if cache.residence is not None:
            raise InputError('layers are offloaded, which another process cannot share; pass compile=True, or "wait"')
        check_background(cache, options.mode)
        return BackgroundCompiler(model, cache, spec, options)
    except InputError as error:
        if options.compile == "background":
            raise
        log.info("graphs are compiled when they are needed: %s", error)
        return None


def _private_folder(owner: object) -> Path:
    """A folder of this user's own that goes with an object."""
    folder = Path(tempfile.mkdtemp(prefix="exportable-cache-graphs-"))
    weakref.finalize(owner, _remove, folder, os.getpid())
    return folder


def _remove(folder: Path, owner: int) -> None:
    # Not when a fork of this process ends.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
