"""Graphs compiled in another process, while steps run as they are: nobody waits for a graph."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..common.threads import threads_of_torch
from ..errors import InputError
from .background_worker import GraphWorker, Mail
from .compiling import CompileOptions, StepCompiler, check_background
from .eager_operators import OWN_OPERATORS, eager_operators
from .graphs import Graph
from .onednn_linears import onednn_is_better
from .skeleton import skeleton
from .throttle import STEPS

if TYPE_CHECKING:
    from ..models.cache_factory import ExportableCache
    from ..program.spec import ProgramSpec

log = logging.getLogger(__name__)

#: From so many on, one core is left to each of the two processes that compile.
_CORES_FOR_TWO = 4
#: Seconds of a step from which on it leaves none, and steps of which none was shorter.
_LONG_STEP, _TIMED = 0.12, 3
#: Steps of more tokens spend their time in operators, and the interpreter is free meanwhile.
_FEW_TOKENS = 16


class CoresLeft:
    """Cores that steps without a graph leave to what compiles.

    Compilers are done sooner with a core of their own, and it costs a short step nothing that anybody notices. One that
    has gigabytes of weights to read is a wait of its own: it has all cores, of which compilers get what is left.
    """

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_TIMED)
        self._is_long = False

    def while_pending(self, threads: int) -> int:
        """How many of the cores, one for each of a step's threads."""
        return 0 if self._is_long else 2 if threads >= _CORES_FOR_TWO else 1

    def took(self, seconds: float) -> None:
        """Of a step of one token that left some."""
        self._seconds.append(seconds)
        # The first ones load this and that, and others wait for a moment.
        self._is_long = len(self._seconds) == _TIMED and min(self._seconds) > _LONG_STEP


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
        self._cores_left = CoresLeft()

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

    def step(self, size: int) -> AbstractContextManager[None]:
        """A block around a step of `size` tokens a row, in which no graphs are loaded where that would hold it up."""
        return nullcontext() if self._waits or size > _FEW_TOKENS else STEPS.step()

    @contextlib.contextmanager
    def meanwhile(self, size: int) -> Iterator[None]:
        """A block for a step of `size` tokens without a graph: fewer threads while graphs are compiled, and the kernels
        of this package, once they are there, and oneDNN's linear layers where those are better.
        """
        threads = self._worker.torch_threads
        left = self._cores_left.while_pending(threads) if self.pending else 0
        rows, queries = (operators.load(compiles=False) for operators in OWN_OPERATORS)
        start = time.perf_counter()
        with threads_of_torch(max(1, threads - left)), eager_operators(rows, queries, self._by_onednn):
            yield
        if left and size == 1:
            self._cores_left.took(time.perf_counter() - start)

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
