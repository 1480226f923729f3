"""Steps through torch.compile: what is dynamic in each, by which backend, and from which folder."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal

import torch

from ...common.compat import torch as private
from ...common.progress import Progress, silent
from ...common.settings import check_settings, setting
from ...errors import InputError
from ...program.methods import KV_SLOTS, ProgramMethod
from ..base import GRAPH_CACHE_MB
from .graph_cache import GraphCache
from .graphs import OutdatedGraph
from .ops import OWN_OPERATORS

if TYPE_CHECKING:
    from ...models.cache_factory import ExportableCache
    from .graphs import ChoiceMethod
    from .layered import LayeredBackend

Step = Callable[..., Any]
_STEPS = itertools.count()


@dataclass(frozen=True)
class CompileOptions:
    """Whether and how steps are compiled.

    Attributes:
        compile: Each method into one graph: decode for one token, prefill with a dynamic length, and those of several
            read lengths together. "background": in another process, and steps run as they are until their graph is
            there; "wait": when a graph is needed; True: in the background where that holds.
        mode: Of torch.compile; by default on a GPU `reduce-overhead` (CUDA graphs) for steps of one size, whose work is
            less than launching it. Of a prompt's there would be one for each length.
        graph_cache: Folder in which compiled graphs are kept for later processes, see `GraphCache`.
        graph_cache_mb: How large it may grow.
        progress: Told of graphs that are compiled in the background, from another thread.

    Raises:
        InputError: If one is out of range, or there is a folder and nothing to keep there.
    """

    compile: bool | Literal["background", "wait"] = False
    mode: str | None = None
    graph_cache: str | Path | None = None
    graph_cache_mb: int = setting(GRAPH_CACHE_MB, "Megabytes of compiled graphs kept.", kind=int, least=1)
    progress: Progress = silent

    def __post_init__(self) -> None:
        if self.compile not in (True, False, "background", "wait"):
            raise InputError(f"compile is {self.compile!r}; it must be True, False, 'background' or 'wait'")
        check_settings(self)
        if self.graph_cache is not None and not self.compile:
            raise InputError(
                f"graph_cache is {str(self.graph_cache)!r}, but there are no compiled graphs to keep without "
                "compile=True"
            )


class StepCompiler:
    """Compiles the steps of one model over one cache.

    Args:
        model: In eval mode, its attention chosen.
        cache: What the steps write.
        options: How.

    Attributes:
        by_layers: Whether one layer of each kind is compiled. A graph is a series of calls then.
        graph_cache: The graphs on disk, None without a folder.
    """

    def __init__(self, model: torch.nn.Module, cache: ExportableCache, options: CompileOptions) -> None:
        self._model, self._cache = model, cache
        self._mode = options.mode
        self._records = options.mode is None and cache.device.type == "cuda"
        self.by_layers = self._mode is None and generates_code(cache.device)
        self.graph_cache = None
        if options.graph_cache is not None:
            self.graph_cache = GraphCache(options.graph_cache, model, cache, options.graph_cache_mb)

    @functools.cached_property
    def layered(self) -> LayeredBackend | None:
        """What compiles one layer of each kind, None where graphs are compiled whole."""
        if not self.by_layers:
            return None
        # Here, as it imports the compiler, which takes long.
        from .clone_layers import EqualLayers
        from .layered import LayeredBackend

        for operators in OWN_OPERATORS:
            operators.begin()
        # Layers of other models hand each other more than hidden states, and graphs that are not kept have guards on
        # the classes of layers, which tracing three of them changes.
        is_plain = self._cache.residence is None and self._cache.ranks is None
        stamps = is_plain and self.graph_cache is not None
        equal = EqualLayers(self._model, self._cache) if stamps else None
        return LayeredBackend(equal)

    def chooses_apart(self, penalised: bool) -> bool:
        """Whether the choice of tokens is a graph by itself, behind that of the step.

        A CUDA graph cannot hold the tokens seen, an input that a choice with the repetition penalty writes to.
        """
        return self.by_layers or (penalised and self._cache.device.type == "cuda")

    def compile(
        self, module: torch.nn.Module, method: ProgramMethod | ChoiceMethod, key: str, inputs: Sequence[torch.Tensor]
    ) -> Step:
        """A compiled step, from the folder where there is one; compiled now, or when it is first called.

        Args:
            module: To call.
            method: Whose sizes say what is dynamic.
            key: Tells it from others of this method.
            inputs: Examples, from `marked`.
        """
        dynamic = None if any(_is_dynamic(method, inputs)) else False
        chosen = "reduce-overhead" if self._records and dynamic is False else self._mode
        backend: dict[str, Any] = {} if self.layered is None else {"backend": self.layered}
        step = _step_of(module)
        # A graph from disk has no others beside it.
        if self.graph_cache is not None and not _has_graphs_by_length(method):
            options = private.mode_options(chosen) if chosen else None
            call = self.graph_cache.get(
                f"{method} {key}", step, {"module": module}, inputs, dynamic=dynamic, options=options, **backend
            )
            if call is not None:
                return _guarded(call)
        if self.layered is None:
            backend = _whole_backend(chosen, dynamic)
        return torch.compile(step, fullgraph=True, dynamic=dynamic, **backend)

    def load(
        self, module: torch.nn.Module, method: ProgramMethod | ChoiceMethod, key: str, inputs: Sequence[torch.Tensor]
    ) -> Step | None:
        """A step from the folder, None if it is not there. See `compile`."""
        if self.graph_cache is None:
            return None
        call = self.graph_cache.load(f"{method} {key}", _step_of(module), {"module": module}, inputs)
        return None if call is None else _guarded(call)


def _whole_backend(mode: str | None, dynamic: bool | None) -> dict[str, Any]:
    """How torch.compile is told to compile a whole graph: with its own backend as it is where that is another one."""
    if torch.compiler.get_default_backend() != "inductor":
        return {"mode": mode}
    # Here, as it imports the compiler, which takes long.
    from ...common.compat.torch_compile import InductorByRanges

    return {"backend": InductorByRanges(mode, dynamic)}


def generates_code(device: torch.device) -> bool:
    """Whether steps are compiled to C++. CUDA graphs want a step as one graph."""
    return device.type == "cpu" and torch.compiler.get_default_backend() == "inductor"


def check_background(cache: ExportableCache, mode: str | None) -> None:
    """Refuse to compile in another process what cannot be handed over from there.

    Raises:
        InputError: If steps run on a GPU, or torch.compile is to do something else than usual.
    """
    if mode is None and generates_code(cache.device):
        return
    reason = f"the cache is on {cache.device}" if cache.device.type != "cpu" else f"mode is {mode!r}"
    if mode is None and cache.device.type == "cpu":
        reason = f"torch.compile's backend is {torch.compiler.get_default_backend()!r}"
    raise InputError(
        f"compile is 'background', but {reason}; graphs come from another process for Inductor's own mode on a CPU "
        'only: pass compile=True, or "wait"'
    )


def marked(
    method: ProgramMethod,
    inputs: Sequence[torch.Tensor],
    compiles: bool = True,
    slots: torch.Tensor | None = None,
) -> tuple[list[torch.Tensor], frozenset[str]]:
    """Copies of the inputs that say which of their sizes are dynamic, and the names of dynamic sizes that are 1 here.

    Guards look at strides, which a slice of a longer prompt carries along, and dynamic sizes are marked on the tensor.

    Args:
        compiles: Whether this process compiles; another one marks its own copies.
        slots: A copy of `KV_SLOTS`, whose values nobody reads, that will do if it is as long.
    """
    sizes, copies, ones = method.dynamic_sizes, [], set()
    for spec, tensor in zip(method.inputs, inputs, strict=True):
        if slots is not None and spec is KV_SLOTS and slots.shape == tensor.shape:
            copies.append(slots)
            continue
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        for index, size in enumerate(spec.shape):
            if size in sizes and tensor.shape[index] == 1:
                ones.add(size)
            elif not compiles:
                continue
            elif size in sizes and _has_graphs_by_length(method):
                private.maybe_mark_dynamic(tensor, index)
            elif size in sizes:
                private.mark_dynamic(tensor, index, max(2, sizes[size][0]), sizes[size][1])
        copies.append(tensor)
    return copies, frozenset(ones)


def _is_dynamic(method: ProgramMethod | ChoiceMethod, inputs: Sequence[torch.Tensor]) -> list[bool]:
    sizes = method.dynamic_sizes
    return [
        size in sizes and tensor.shape[index] != 1
        for spec, tensor in zip(method.inputs, inputs)
        for index, size in enumerate(spec.shape)
    ]


def _has_graphs_by_length(method: ProgramMethod | ChoiceMethod) -> bool:
    """Encoders of sound shorten it by convolutions, whose guards split the lengths: there is a graph for each range of
    them.

    That a length is a multiple is such a guard, too.
    """
    return isinstance(method, ProgramMethod) and not method.is_step and (not method.takes_ids or method.pads)


def _guarded(call: Any) -> Step:
    """A graph that was kept, or is now; it raises `OutdatedGraph` before it does anything, or runs."""
    call.disable_guard_check()

    def step(*inputs: torch.Tensor) -> Any:
        # Its guards are those of unmarked inputs.
        unmarked = [tensor.detach() for tensor in inputs]
        if not call.guard_check(*unmarked):
            raise OutdatedGraph
        return call(*unmarked)

    return step


def _step_of(module: torch.nn.Module) -> Step:
    """A function that calls `module`, with a code object and a name of its own.

    TorchDynamo keeps compiled graphs per code object: methods, and runners, that shared one would count as
    recompilations of each other and together run into the recompile limit. And it remembers by name what has changed
    between two of them, and makes that an input: a model's number, which graphs are compiled for.
    """

    def step(*inputs: torch.Tensor) -> torch.Tensor:
        return module(*inputs)

    code = step.__code__.replace(co_name=f"step_{next(_STEPS)}")
    return FunctionType(code, step.__globals__, "step", None, step.__closure__)
