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
from ...common.progress import bytes_text
from ...errors import InputError
from .compile import CompileOptions, StepCompiler, check_background
from .graph_cache import GRAPH, Graph, GraphKey, import_loader
from .model_snapshot import snapshot
from .ops import NATIVE_OPERATORS, eager_operators
from .ops.linear import onednn_is_better

if TYPE_CHECKING:
    from ...models.cache_factory import ExportableCache
    from ...program.spec import ProgramSpec


log = logging.getLogger(__name__)

#: Bytes of a GPU's memory that a process needs before it allocates anything, rounded up.
_CONTEXT_BYTES = 10**9
_DIFFERENT = "the compiled graph cannot be loaded into this process"
#: Switch interval of the interpreter in seconds while a graph is loaded. It is short because an eager step releases and
#: takes the interpreter lock for each of its hundreds of operators.
_SWITCH_INTERVAL = 0.00005
_SWITCHING = ProcessSetting(sys.getswitchinterval, sys.setswitchinterval)
#: Seconds that closing a session waits for a graph that is being loaded, which takes two or three.
_LOADING_SECONDS = 20.0
#: The subprocess gets a process group, because this process handles keyboard interrupts. It gets no session, because
#: Linux may share processors among sessions first (autogroup): its niceness would then count only within its own.
#: Garbage collection starts after the imports, see `collect_seldom`.
_CHILD = """
import gc, os, sys
os.setpgrp()
gc.disable()
sys.path[:] = sys.argv[1:]
from exportable_cache.backends.live.background_process import main
main()
"""


@dataclass
class GraphStatus:
    """The graphs of one compiler, shared by its threads.

    Attributes:
        waiting: Graphs that were requested and are not ready, by request index.
        ready: Graphs that can be called.
        unshared: Methods that need a graph for each read length.
        failed: Reasons why a graph will not come.
        changed: Condition that is notified when any of these change.
        stop_reason: Reason why no more graphs will come, None while they may.
    """

    waiting: dict[int, Graph] = field(default_factory=dict)
    ready: dict[GraphKey, Callable[..., Any]] = field(default_factory=dict)
    unshared: dict[GraphKey, Any] = field(default_factory=dict)
    failed: dict[GraphKey, str] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    stop_reason: str | None = None


class GraphWorker:
    """Loads or compiles requested graphs. Its threads and its subprocess start with the first request.

    Args:
        compiler: The compiler that loads graphs.
        options: The folder of graphs, and the progress callback.
        snapshot: Snapshot of model, cache and spec for the subprocess.
        status: Where results are reported.
        device: Device of the steps.
    """

    def __init__(
        self,
        compiler: StepCompiler,
        options: CompileOptions,
        snapshot: bytes,
        status: GraphStatus,
        device: torch.device,
    ) -> None:
        self._compiler, self._options, self._snapshot, self._status = compiler, options, snapshot, status
        self._folder = Path(str(options.graph_cache))
        self._device = device
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._loading = threading.Lock()
        self._threads: list[threading.Thread] = []
        # Threads run in a copy of this context, because torch keeps settings in it.
        self._context = contextvars.copy_context()
        #: Number of threads that graphs are compiled for.
        self.torch_threads = torch.get_num_threads()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    def request(self, index: int, graph: Graph, inputs: list[torch.Tensor], ahead: bool) -> None:
        """Request a graph. Requests with `ahead` are served last."""
        self._status.waiting[index] = graph
        if not self._threads:
            self._start(self._serve, name="graph requests")
        self._requests.put((index, graph.requested, inputs, ahead))
        self._report(graph, index + 1)

    def stop(self) -> None:
        """End the subprocess and its children, and wait for a graph that is being loaded."""
        if os.getpid() != self._owner:  # a forked process has none of the threads
            return
        with self._status.changed:
            self._status.stop_reason = self._status.stop_reason or "the session is closed"
            self._status.changed.notify_all()
        self._requests.put(None)
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            # Also kill it by its id, because it sets its process group only after it has started.
            self._process.kill()
            self._process.wait()
        # Wait, because a thread that loads machine code while the interpreter shuts down crashes the process.
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_LOADING_SECONDS)

    def _start(self, work: Callable[..., None], *arguments: Any, name: str) -> None:
        def run() -> None:
            # Read the thread count before it is set, because the first read in a thread overwrites an earlier setting.
            # Graphs have a guard on it.
            torch.get_num_threads()
            torch.set_num_threads(self.torch_threads)
            work(*arguments)

        thread = threading.Thread(target=self._context.copy().run, args=(run,), daemon=True, name=name)
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        """Load requested graphs from the folder, and pass other requests to the subprocess.

        This is a thread because writing to a full pipe blocks until the subprocess has started.
        """
        while (item := self._requests.get()) is not None and self._status.stop_reason is None:
            graph = self._status.waiting[item[0]]
            call = None
            # Skip empty folders, because naming the first graph imports the compiler, which takes seconds.
            if any(self._folder.glob(f"*{GRAPH}")):
                try:
                    call = self._loaded(graph)
                except Exception as error:  # any error of unpickling a file
                    log.info("%s cannot be loaded: %s", graph.method.name, error)
            if call is not None:
                self._deliver(item[0], graph, "loaded", call)
                continue
            # The thread that reads the replies notices a subprocess that has ended.
            with contextlib.suppress(OSError):
                requests = self._started()
                if requests is not None:
                    pickle.dump(item, requests)
                    requests.flush()

    def _started(self) -> IO[bytes] | None:
        """Return the request stream of the subprocess, which is started if needed; None after `stop`."""
        with self._status.changed:
            if self._status.stop_reason is not None:
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
        settings = {**torch_settings(), "device": self._device}
        pickle.dump((str(self._folder), self._options.graph_cache_mb, settings, self._snapshot), requests)
        self._snapshot = b""
        return requests

    def _receive(self, replies: IO[bytes]) -> None:
        """Read replies of the subprocess and load the graphs that it has written."""
        while self._status.stop_reason is None:
            try:
                kind, index, reason = pickle.load(replies)
            except (EOFError, OSError, ValueError, pickle.UnpicklingError):
                break
            if kind == "begun":
                # Ignore errors, because loading a graph raises them again.
                with self._yielding(), contextlib.suppress(Exception):
                    import_loader()
                continue
            graph = self._status.waiting.get(index)
            if graph is None:
                with self._status.changed:
                    self._status.stop_reason = reason
                break
            call = None
            if kind == "ready":
                try:
                    call = self._loaded(graph)
                except Exception as error:  # any error of unpickling a file
                    reason = f"{type(error).__name__}: {error}"
            self._deliver(index, graph, kind, call, reason)
        with self._status.changed:
            self._status.stop_reason = self._status.stop_reason or "the compiling process has ended"
            self._status.changed.notify_all()

    def _deliver(self, index: int, graph: Graph, kind: str, call: Callable[..., Any] | None, reason: str = "") -> None:
        log.info("%s %s: %s", graph.method.name, kind, reason)
        with self._status.changed:
            if call is not None:
                self._status.ready[graph.key] = call
            elif kind == "unshare":
                self._status.unshared[graph.key] = graph.method
            else:
                self._status.failed[graph.key] = reason or _DIFFERENT
            del self._status.waiting[index]
            self._status.changed.notify_all()
        self._report(graph, index + 1)

    def _report(self, graph: Graph, least: int) -> None:
        status = self._status
        done = len(status.ready) + len(status.unshared) + len(status.failed)
        self._options.progress(f"compiling {graph.method.name}", done, max(least, done + len(status.waiting)))

    def _loaded(self, graph: Graph) -> Callable[..., Any] | None:
        with self._yielding(), torch.no_grad():
            call = self._compiler.load(graph.module, graph.method, graph.name, graph.arguments)
            postpone_full_collection()
            return call

    @contextlib.contextmanager
    def _yielding(self) -> Iterator[None]:
        """Release the interpreter lock to steps often. One thread at a time is in such a block."""
        with (
            self._loading,
            _SWITCHING.during(lambda found: min(found, _SWITCH_INTERVAL)),
            few_collections(),
        ):
            yield


def torch_settings() -> dict[str, Any]:
    """Return this process's settings that affect compilation, for the subprocess."""
    return {
        "threads": torch.get_num_threads(),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "inductor": inductor_config(),
    }


class BackgroundCompiler:
    """Returns compiled graphs, and has missing ones compiled in a subprocess.

    Args:
        model: In eval mode, with its attention implementation set.
        cache: The cache that the steps write.
        spec: The program.
        options: How to compile. Graphs pass through a folder: `graph_cache`, or a private one that is deleted with this
            object.

    Raises:
        InputError: If the model cannot be pickled.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        cache: ExportableCache,
        spec: ProgramSpec,
        options: CompileOptions,
    ) -> None:
        try:
            written = snapshot((model, cache, spec), cache.stored_state().values())
        except Exception as error:  # any error of pickling a part of the model
            raise InputError(
                f"this model cannot be compiled in the background, because it cannot be pickled ({error}); "
                'pass compile="wait", which compiles when a graph is needed'
            ) from error
        if options.graph_cache is None:
            options = replace(options, graph_cache=_private_folder(self))
        self.compiler = StepCompiler(model, cache, options)
        self._status = GraphStatus()
        self._worker = GraphWorker(self.compiler, options, written, self._status, cache.device)
        # Registered after the folder's finalizer, because finalizers run newest first and the subprocess writes there.
        self._end = weakref.finalize(self, self._worker.stop)
        self._requested: set[GraphKey] = set()
        self._waits = False
        self._device = cache.device
        self._by_onednn = self._device.type == "cpu" and onednn_is_better()
        self._has_warned = False

    @property
    def pending(self) -> int:
        """Number of requested graphs that are not ready."""
        return len(self._status.waiting)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Make `get` wait for its graph in this block."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    @contextlib.contextmanager
    def eager_step(self) -> Iterator[None]:
        """Use the native operators, once they are compiled, or oneDNN's in a step that runs eagerly on a CPU."""
        if self._device.type != "cpu":
            yield
            return
        rows, queries = (operators.load(compiles=False) for operators in NATIVE_OPERATORS)
        with torch_threads(self._worker.torch_threads), eager_operators(rows, queries, self._by_onednn):
            yield

    def get(self, graph: Graph, inputs: Sequence[torch.Tensor], ahead: bool = False) -> Callable[..., Any] | None:
        """Return a graph that is ready; request it and return None if it is not.

        Args:
            graph: The graph.
            inputs: The call's arguments without marks.
            ahead: True for a later step, whose graph is compiled last.
        """
        if graph.key not in self._requested and self._status.stop_reason is None:
            index = len(self._requested)
            self._requested.add(graph.key)
            # Copy the inputs, because the sampler's tensors change while they are in the queue.
            self._worker.request(index, graph, [tensor.clone() for tensor in inputs], ahead)
        if self._waits and not ahead:
            with self._status.changed:
                self._status.changed.wait_for(lambda: self._has_come(graph.key) or self._is_lost(graph.key))
        if self._is_lost(graph.key):
            self._warn(self._status.failed.get(graph.key, self._status.stop_reason))
        return self._status.ready.get(graph.key)

    def gave_up(self, method: str) -> bool:
        """Return True if graphs of a method are to be compiled in this process, because the subprocess could not.

        This holds on a GPU, where eager steps are several times slower than compiled ones. On a CPU steps continue
        eagerly.
        """
        if self._device.type == "cpu":
            return False
        status = self._status
        return status.stop_reason is not None or any(key.step.method == method for key in list(status.failed))

    def discard(self, key: GraphKey, reason: str) -> None:
        """Stop returning a graph."""
        with self._status.changed:
            self._status.ready.pop(key, None)
            self._status.failed[key] = reason

    def unshared(self, key: GraphKey) -> Any | None:
        """Return the method of a graph that must be compiled for each read length, None for other graphs."""
        return self._status.unshared.get(key)

    def close(self) -> None:
        """End the subprocess. Calling it again has no effect."""
        self._end()

    def _has_come(self, key: GraphKey) -> bool:
        return key in self._status.ready or key in self._status.unshared

    def _is_lost(self, key: GraphKey) -> bool:
        return not self._has_come(key) and (key in self._status.failed or self._status.stop_reason is not None)

    def _warn(self, reason: str | None) -> None:
        if not self._has_warned:
            self._has_warned = True
            instead = "without compiled graphs" if self._device.type == "cpu" else "once this process has compiled them"
            warnings.warn(
                f"compiling in the background failed, and steps continue {instead}: {reason}; "
                'compile="wait" compiles in this process',
                RuntimeWarning,
                stacklevel=2,
            )


def background_compiler(
    model: torch.nn.Module, cache: ExportableCache, spec: ProgramSpec, options: CompileOptions
) -> BackgroundCompiler | None:
    """Return a background compiler, or None if graphs are compiled when they are needed.

    Raises:
        InputError: If `options.compile` is "background" and graphs cannot be compiled in a subprocess.
    """
    if options.compile not in (True, "background"):
        return None
    try:
        if cache.ranks is not None:
            raise InputError(
                f'compile="background" is not supported for a model that is split over {cache.ranks.size} processes, '
                'because the compiler process is not part of the process group; pass compile=True, or "wait"'
            )
        if cache.offloader is not None:
            raise InputError('compile="background" is not supported for offloaded layers; pass compile=True, or "wait"')
        check_background(cache.device, options.mode)
        _check_memory(cache)
        return BackgroundCompiler(model, cache, spec, options)
    except InputError as error:
        if options.compile == "background":
            raise
        log.info("graphs are compiled when they are needed: %s", error)
        return None


def _check_memory(cache: ExportableCache) -> None:
    """Check that a GPU has memory for the subprocess, which allocates another cache.

    Raises:
        InputError: If it does not.
    """
    if cache.device.type != "cuda":
        return
    needed, free = 2 * cache.resident_nbytes + _CONTEXT_BYTES, torch.cuda.mem_get_info(cache.device)[0]
    if free < needed:
        raise InputError(
            f'compile="background" needs {bytes_text(needed)} of free memory on {cache.device}, because the compiling '
            f'process has another cache, and {bytes_text(free)} are free; pass compile=True, or "wait"'
        )


def _private_folder(owner: object) -> Path:
    """Create a private folder that is deleted with `owner`."""
    folder = Path(tempfile.mkdtemp(prefix="exportable-cache-graphs-"))
    weakref.finalize(owner, _remove, folder, os.getpid())
    return folder


def _remove(folder: Path, owner: int) -> None:
    # Keep the folder when a fork of this process ends.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
