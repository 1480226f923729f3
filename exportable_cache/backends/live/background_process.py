"""The compiling subprocess: it writes the graphs it is asked for to the graph folder."""

from __future__ import annotations

import gc
import os
import pickle
import sys
import threading
from typing import IO, Any

import torch

from ...common.process.tuning import collect_seldom
from ...generation.loop import Choice
from .graph_cache import CHOICE, StepKey, choice_graph
from .model_snapshot import from_snapshot
from .ops import NATIVE_OPERATORS

#: Index, call, inputs, and True if others are served first.
Request = tuple[int, StepKey, "list[torch.Tensor]", bool]
#: Outcome ("ready", "unshare" or "failed"), index of the request, and reason.
Reply = tuple[str, int, str]

#: Lower priority, because the user's steps need the processor.
_NICENESS = 14


class _Requests:
    """A queue of requests, oldest first, followed by those that are needed later.

    The oldest go first because a prompt's decode step is requested before the prompt, and there are more of those.
    """

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        self._waiting: list[Request] = []
        self._changed = threading.Condition()

    def read(self) -> None:
        """Read requests until the parent process ends, then exit."""
        while True:
            try:
                request = pickle.load(self._source)
            except Exception:
                os._exit(0)
            self.put(request)

    def put(self, request: Request) -> None:
        """Add a request."""
        with self._changed:
            self._waiting.append(request)
            self._changed.notify()

    def next(self) -> Request:
        """Wait for a request and return the one to serve next."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            return self._waiting.pop(next((at for at, request in enumerate(self._waiting) if not request[3]), 0))


def main() -> None:
    """Serve the process at the other end of the standard streams."""
    replies = os.fdopen(os.dup(1), "wb")
    # Replies have a separate stream, because a model may print.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.nice(_NICENESS)
    requests, replying = _Requests(sys.stdin.buffer), threading.Lock()
    start = pickle.load(sys.stdin.buffer)
    if start[2]["device"].type == "cpu":
        for operators in NATIVE_OPERATORS:
            # Start now, because compiling them takes as long as the imports and the first trace.
            operators.begin()

    def reply(kind: str, index: int | None, reason: str = "") -> None:
        with replying:
            pickle.dump((kind, index, reason), replies)
            replies.flush()

    try:
        runner = _runner(*start)
    except Exception as error:
        reply("failed", None, f"{type(error).__name__}: {error}")
        return
    #: Methods that need a graph for each read length.
    unshared: set[str] = set()
    gc.freeze()
    gc.enable()
    collect_seldom()
    # The parent may import the loader now. Earlier that would have slowed the first prompt down.
    reply("begun", None)
    threading.Thread(target=requests.read, daemon=True).start()
    while True:
        reply(*_served(runner, requests.next(), unshared))


def _served(runner: Any, request: Request, unshared: set[str]) -> Reply:
    index, step, inputs, _ = request
    for name in unshared:
        runner.unshare(name)
    try:
        kind, name, reason = _compiled(runner, step, inputs)
    except Exception as error:
        return "failed", index, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if kind == "unshare":
        unshared.add(name)
    return kind, index, reason


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
    model, cache, spec = from_snapshot(written)
    options = CompileOptions("wait", graph_cache=folder, graph_cache_mb=limit)
    return ModuleRunner(model, cache, spec, options)


@torch.no_grad()
def _compiled(runner: Any, step: StepKey, inputs: list[torch.Tensor]) -> tuple[str, str, str]:
    """Compile a graph and return the outcome, the name of its method, and the reason."""
    if step.method == CHOICE:
        graph = choice_graph(Choice(bool(step.greedy), bool(step.penalised)), inputs)
    else:
        method = runner.methods[step.method]
        graph = runner.graph(step, inputs[: len(method.inputs)], inputs[len(method.inputs) :])
    cache = runner.graph_cache
    before = cache.loaded + cache.compiled
    runner.compiler.compile(graph.module, graph.method, graph.name, graph.arguments)
    if cache.loaded + cache.compiled > before and not cache.last_error:
        return "ready", graph.method.name, ""
    if graph.key.is_shared:
        runner.unshare(graph.method.name)
        return "unshare", graph.method.name, cache.last_error
    return "failed", graph.method.name, cache.last_error
