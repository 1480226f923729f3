"""The compiling subprocess: it writes the graphs it is asked for to the graph folder, two at a time through a fork."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING, Any, Protocol

import torch

from ...common.process.garbage import collect_seldom
from ...generation.choosing_steps import Choice
from .graphs import CHOICE, choice_graph
from .model_snapshot import from_skeleton
from .ops.eager import OWN_OPERATORS

if TYPE_CHECKING:
    import torch


#: Number, what is asked for, inputs, and whether others go first.
Request = tuple[int, tuple, "list[torch.Tensor]", bool]
#: What has become of it, its number, and why.
Reply = tuple[str, int, str]
#: Serves a request, told of the methods whose read lengths need a graph each, to which it may add one.
Serve = Callable[[Request, set[str]], Reply]


class Queue(Protocol):
    """Where requests wait."""

    def next(self) -> Request:
        """The one to serve now; waits for one."""

    def put(self, request: Request) -> None:
        """Have one served."""


def can_fork() -> bool:
    """Whether a second process would have a core, and a fork holds what it needs. On macOS it does not."""
    return sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1


class Twin:
    """A fork of this process that serves requests as this one does. To be made before there is any thread.

    Args:
        serve: What a request is given to there.
        closed: Open files that the fork must not hold: their other ends wait for their end.
    """

    def __init__(self, serve: Serve, closed: Sequence[int] = ()) -> None:
        (requests, ours), (replies, theirs) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                for file in (ours, replies, *closed):
                    os.close(file)
                _serve(serve, requests, theirs)
            finally:
                os._exit(1)
        os.close(requests)
        os.close(theirs)
        self._requests, self._replies = os.fdopen(ours, "wb"), os.fdopen(replies, "rb")

    def serve(self, requests: Queue, unshared: set[str], reply: Callable[..., None]) -> None:
        """Hand requests over as long as the fork is there; the one that it ends with goes back.

        Args:
            requests: Where they come from.
            unshared: See `Serve`.
            reply: Told of each.
        """
        while True:
            request = requests.next()
            try:
                pickle.dump((request, unshared), self._requests)
                self._requests.flush()
                answer, found = pickle.load(self._replies)
            except (EOFError, OSError, pickle.UnpicklingError):
                requests.put(request)
                return
            unshared |= found
            reply(*answer)

    def close(self) -> None:
        """End the fork, once it has served what it was given."""
        with contextlib.suppress(OSError):
            self._requests.close()
        os.waitpid(self.pid, 0)


def _serve(serve: Serve, requests: int, replies: int) -> None:
    """Serve until the process at the other end is gone, and go then, whatever is being compiled."""
    waiting: queue.SimpleQueue[tuple[Request, set[str]]] = queue.SimpleQueue()

    def read() -> None:
        with os.fdopen(requests, "rb") as source:
            while True:
                try:
                    waiting.put(pickle.load(source))
                except Exception:
                    os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    with os.fdopen(replies, "wb") as target:
        while True:
            request, unshared = waiting.get()
            pickle.dump((serve(request, unshared), unshared), target)
            target.flush()


#: The steps that wait for the processor are the user's.
_NICENESS = 14


class _Requests:
    """What was asked for and not begun: the oldest first, as the step behind a prompt is asked for before the prompt,
    and there are more of those; and last what is needed later.
    """

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        self._waiting: list[Request] = []
        self._changed = threading.Condition()

    def read(self) -> None:
        """Take requests until the process that sends them is gone, and go then."""
        while True:
            try:
                request = pickle.load(self._source)
            except Exception:
                os._exit(0)
            self.put(request)

    def put(self, request: Request) -> None:
        """Have one served."""
        with self._changed:
            self._waiting.append(request)
            self._changed.notify()

    def next(self) -> Request:
        """The one to serve now; waits for one."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            return self._waiting.pop(next((at for at, request in enumerate(self._waiting) if not request[3]), 0))


def main() -> None:
    """Serve the process at the other end of the standard streams."""
    replies = os.fdopen(os.dup(1), "wb")
    # What a model prints is no reply.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.nice(_NICENESS)
    for operators in OWN_OPERATORS:
        # It takes as long as the imports and the first trace.
        operators.begin()
    requests, replying = _Requests(sys.stdin.buffer), threading.Lock()
    start = pickle.load(sys.stdin.buffer)

    def reply(kind: str, number: int | None, reason: str = "") -> None:
        with replying:
            pickle.dump((kind, number, reason), replies)
            replies.flush()

    try:
        runner = _runner(*start)
    except Exception as error:
        reply("failed", None, f"{type(error).__name__}: {error}")
        return
    #: Methods whose read lengths need a graph each: what one process has found holds for both.
    unshared: set[str] = set()
    twin = None
    if can_fork():
        _warm(runner)
    # What is there stays, and is shared with a fork as long as nobody writes to it.
    gc.freeze()
    gc.enable()
    collect_seldom()
    if can_fork():
        twin = Twin(lambda request, names: _served(runner, request, names), [0, replies.fileno()])
        os.setpriority(os.PRIO_PROCESS, twin.pid, _NICENESS + 5)
    # The first prompt, which whoever loads graphs would hold up, is read by now.
    reply("begun", None)
    threading.Thread(target=requests.read, daemon=True).start()
    # This process takes the first, and the fork, which waits for it where they share a core, what is left.
    request = requests.next()
    if twin is not None:
        threading.Thread(target=twin.serve, args=(requests, unshared, reply), daemon=True).start()
    while True:
        answer = _served(runner, request, unshared)
        reply(*answer)
        request = requests.next()


def _served(runner: Any, request: Request, unshared: set[str]) -> Reply:
    number, asked, inputs, _ = request
    for name in unshared:
        runner.unshare(name)
    try:
        kind, name, reason = _compiled(runner, asked, inputs)
    except Exception as error:
        return "failed", number, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if kind == "unshare":
        unshared.add(name)
    return kind, number, reason


def _runner(folder: str, limit: int, settings: dict[str, Any], written: bytes) -> Any:
    from ...cache.attention.functions import register_attention
    from ...common.compat.torch import set_inductor_config
    from .compile import CompileOptions
    from .runner import ModuleRunner

    torch.set_num_threads(settings["threads"])
    torch.set_float32_matmul_precision(settings["precision"])
    torch.use_deterministic_algorithms(settings["deterministic"])
    set_inductor_config(settings["inductor"])
    register_attention()
    model, cache, spec = from_skeleton(written)
    return ModuleRunner(model, cache, spec, CompileOptions("wait", graph_cache=folder, graph_cache_mb=limit))


@torch.no_grad()
def _warm(runner: Any) -> None:
    """Have what the compiler imports and makes once in this process before there are two of it.

    A product has no kernel of its own: for one the compiler would start threads, which a fork lacks.
    """
    backend = runner.compiler.layered
    if backend is not None:
        square = torch.zeros(2, 2)
        torch.compile(lambda x: x @ x, fullgraph=True, backend=backend)(square)


@torch.no_grad()
def _compiled(runner: Any, asked: tuple, inputs: list[torch.Tensor]) -> tuple[str, str, str]:
    """What has become of a graph, the name of its method, and why."""
    if asked[0] == CHOICE:
        graph = choice_graph(Choice(*asked[1:]), inputs)
    else:
        method = runner.methods[asked[0]]
        graph = runner.graph(asked, inputs[: len(method.inputs)], inputs[len(method.inputs) :])
    cache = runner.graph_cache
    before = cache.loaded + cache.compiled
    runner.compiler.compile(graph.module, graph.method, graph.name, graph.arguments)
    if cache.loaded + cache.compiled > before and not cache.last_error:
        return "ready", graph.method.name, ""
    if graph.is_shared:
        runner.unshare(graph.method.name)
        return "unshare", graph.method.name, cache.last_error
    return "failed", graph.method.name, cache.last_error
