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
from ...generation.choosing_steps import Choice
from .graphs import CHOICE, choice_graph
from .model_snapshot import from_skeleton
from .ops import OWN_OPERATORS

#: Number, what is asked for, inputs, and whether others go first.
Request = tuple[int, tuple, "list[torch.Tensor]", bool]
#: What has become of it, its number, and why.
Reply = tuple[str, int, str]

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
    #: Methods whose read lengths need a graph each.
    unshared: set[str] = set()
    gc.freeze()
    gc.enable()
    collect_seldom()
    # The first prompt, which loading graphs would hold up, is read by now.
    reply("begun", None)
    threading.Thread(target=requests.read, daemon=True).start()
    while True:
        reply(*_served(runner, requests.next(), unshared))


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
