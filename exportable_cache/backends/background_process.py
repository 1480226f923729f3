"""The other process of `background`: it compiles what it is asked for into a folder of graphs."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from typing import IO, Any

import torch

from ..generation.choosing_steps import Choice
from .graphs import CHOICE, choice_graph
from .skeleton import from_skeleton

#: The steps that wait for the processor are the user's.
_NICENESS = 10


class _Requests:
    """What was asked for and not begun: the newest first, as a prompt was asked for before the steps behind it, of
    which there are more; and last what is needed later.
    """

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        self._waiting: list[tuple[int, tuple, list[torch.Tensor], bool]] = []
        self._changed = threading.Condition()

    def read(self) -> None:
        """Take requests until the process that sends them is gone, and go then."""
        while True:
            try:
                request = pickle.load(self._source)
            except Exception:
                os._exit(0)
            with self._changed:
                self._waiting.append(request)
                self._changed.notify()

    def next(self) -> tuple[int, tuple, list[torch.Tensor], bool]:
        """The one to serve now; waits for one."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            soon = [request for request in self._waiting if not request[3]]
            chosen = soon[-1] if soon else self._waiting[0]
            self._waiting.remove(chosen)
            return chosen


def main() -> None:
    """Serve the process at the other end of the standard streams."""
    replies = os.fdopen(os.dup(1), "wb")
    # What a model prints is no reply.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.nice(_NICENESS)
    requests = _Requests(sys.stdin.buffer)
    start = pickle.load(sys.stdin.buffer)
    threading.Thread(target=requests.read, daemon=True).start()

    def reply(kind: str, number: int | None, reason: str = "") -> None:
        pickle.dump((kind, number, reason), replies)
        replies.flush()

    try:
        runner = _runner(*start)
    except Exception as error:
        reply("failed", None, f"{type(error).__name__}: {error}")
        return
    while True:
        number, asked, inputs, _ = requests.next()
        try:
            reply(*_compiled(runner, number, asked, inputs))
        except Exception as error:
            reply("failed", number, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")


def _runner(folder: str, limit: int, settings: dict[str, Any], written: bytes) -> Any:
    from ..cache.attention.functions import register_attention
    from ..common.compat.torch import set_inductor_config
    from .compiling import CompileOptions
    from .module import ModuleRunner

    torch.set_num_threads(settings["threads"])
    torch.set_float32_matmul_precision(settings["precision"])
    torch.use_deterministic_algorithms(settings["deterministic"])
    set_inductor_config(settings["inductor"])
    register_attention()
    model, cache, spec = from_skeleton(written)
    return ModuleRunner(model, cache, spec, CompileOptions("wait", graph_cache=folder, graph_cache_mb=limit))


@torch.no_grad()
def _compiled(runner: Any, number: int, asked: tuple, inputs: list[torch.Tensor]) -> tuple[str, int, str]:
    if asked[0] == CHOICE:
        graph = choice_graph(Choice(*asked[1:]), inputs)
    else:
        method = runner.methods[asked[0]]
        graph = runner.graph(asked, inputs[: len(method.inputs)], inputs[len(method.inputs) :])
    cache = runner.graph_cache
    before = cache.loaded + cache.compiled
    runner.compiler.compile(graph.module, graph.method, graph.name, graph.arguments)
    if cache.loaded + cache.compiled > before and not cache.last_error:
        return "ready", number, ""
    if graph.is_shared:
        runner.unshare(graph.method)
        return "unshare", number, cache.last_error
    return "failed", number, cache.last_error
