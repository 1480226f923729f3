"""Compile steps with torch.compile: choose dynamic sizes, the backend, and the folder of kept graphs."""

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
from .graph_cache import GraphCache, OutdatedGraph
from .ops import NATIVE_OPERATORS

if TYPE_CHECKING:
    from ...models.cache_factory import ExportableCache
    from .graph_cache import ChoiceMethod
    from .layered import LayeredBackend

Step = Callable[..., Any]
_STEPS = itertools.count()


@dataclass(frozen=True)
class CompileOptions:
    """Options of compilation.

    Attributes:
        compile: True to compile each method into one graph: decode for one token, prefill with a dynamic length, and
            methods that differ in their read length together. "background" compiles in a subprocess, and steps run
            eagerly until their graph is ready; "wait" compiles when a graph is needed; True means "background" where
            that is possible.
        mode: Mode of torch.compile. Without one, steps of one size become CUDA graphs on a GPU, see `CudaGraphs`.
            Prompts do not, because they would need one CUDA graph per length.
        graph_cache: Folder in which compiled graphs are kept for later processes, see `GraphCache`.
        graph_cache_mb: Size limit of that folder in megabytes.
        progress: Called from another thread for each graph that is compiled in the background.

    Raises:
        InputError: If a value is out of range, or `graph_cache` is set without `compile`.
    """

    compile: bool | Literal["background", "wait"] = False
    mode: str | None = None
    graph_cache: str | Path | None = None
    graph_cache_mb: int = setting(GRAPH_CACHE_MB, "Megabytes of compiled graphs kept.", kind=int, least=1)
    progress: Progress = silent

    def __post_init__(self) -> None:
        if self.compile not in (True, False, "background", "wait"):
            raise InputError(f"compile must be True, False, 'background' or 'wait', got {self.compile!r}")
        check_settings(self)
        if self.graph_cache is not None and not self.compile:
            raise InputError(
                f"graph_cache needs compile=True, got graph_cache={str(self.graph_cache)!r} without compile; set both"
            )


class StepCompiler:
    """Compiles the steps of one model over one cache.

    Args:
        model: In eval mode, with its attention implementation set.
        cache: The cache that the steps write.
        options: How to compile.

    Attributes:
        by_layers: True if one layer of each kind is compiled and called for each layer.
        graph_cache: The graphs on disk, None without a folder.
    """

    def __init__(self, model: torch.nn.Module, cache: ExportableCache, options: CompileOptions) -> None:
        self._model, self._cache = model, cache
        self._mode = options.mode
        self.by_layers = self._mode is None and generates_code(cache.device)
        self.graph_cache = None
        if options.graph_cache is not None:
            self.graph_cache = GraphCache(options.graph_cache, model, cache, options.graph_cache_mb)

    @functools.cached_property
    def layered(self) -> LayeredBackend | None:
        """The backend that compiles one layer of each kind, None if graphs are compiled whole."""
        if not self.by_layers:
            return None
        # Imported here because it imports the compiler, which takes seconds.
        from .clone_layers import EqualLayers
        from .layered import LayeredBackend

        for operators in NATIVE_OPERATORS:
            operators.begin()
        # Not with ranks or offloading, because their layers pass more than hidden states. Not without a graph cache,
        # because graphs that are not kept have guards on the layers' classes, which tracing only three changes.
        is_plain = self._cache.offloader is None and self._cache.ranks is None
        clones = is_plain and self.graph_cache is not None
        equal = EqualLayers(self._model, self._cache) if clones else None
        return LayeredBackend(equal)

    def chooses_separately(self, penalised: bool) -> bool:
        """Return True if tokens are chosen by a separate graph after that of the step.

        With the repetition penalty a CUDA graph cannot include the choice, because that writes to an input, of which a
        graph has a copy.
        """
        return self.by_layers or (penalised and self._cache.device.type == "cuda")

    def compile(
        self, module: torch.nn.Module, method: ProgramMethod | ChoiceMethod, key: str, inputs: Sequence[torch.Tensor]
    ) -> Step:
        """Return a compiled step: loaded from the folder, compiled now, or compiled at its first call.

        Args:
            module: The module to compile.
            method: The method, whose inputs say which sizes are dynamic.
            key: Name of the graph among those of this method.
            inputs: Example inputs, from `marked`.
        """
        dynamic = None if any(_is_dynamic(method, inputs)) else False
        backend: dict[str, Any] = {} if self.layered is None else {"backend": self.layered}
        step = _step_of(module)
        # A kept graph cannot have variants for other lengths.
        if self.graph_cache is not None and not has_graphs_by_length(method):
            options = private.mode_options(self._mode) if self._mode else None
            call = self.graph_cache.get(
                f"{method} {key}",
                step,
                {"module": module},
                inputs,
                dynamic=dynamic,
                options=options,
                **backend,
            )
            if call is not None:
                return _guarded(call)
        if self.layered is None:
            backend = _whole_backend(self._mode, dynamic)
        return torch.compile(step, fullgraph=True, dynamic=dynamic, **backend)

    def load(
        self, module: torch.nn.Module, method: ProgramMethod | ChoiceMethod, key: str, inputs: Sequence[torch.Tensor]
    ) -> Step | None:
        """Return a step from the folder, None if it is not there. See `compile`."""
        if self.graph_cache is None:
            return None
        call = self.graph_cache.load(f"{method} {key}", _step_of(module), {"module": module}, inputs)
        return None if call is None else _guarded(call)


def _whole_backend(mode: str | None, dynamic: bool | None) -> dict[str, Any]:
    """Return the arguments of torch.compile for a whole graph. A backend that the user has set stays."""
    if private.default_backend() != "inductor":
        return {"mode": mode}
    # Imported here because it imports the compiler, which takes seconds.
    from ...common.compat.torch_compile import InductorByRanges

    return {"backend": InductorByRanges(mode, dynamic)}


def generates_code(device: torch.device) -> bool:
    """Return True if steps are compiled to C++. CUDA graphs need a step as one graph."""
    return device.type == "cpu" and private.default_backend() == "inductor"


def generates_cuda(device: torch.device, mode: str | None) -> bool:
    """Return True if steps are compiled for a CUDA GPU with Inductor's defaults, over which this package captures."""
    return device.type == "cuda" and mode is None and private.default_backend() == "inductor"


def check_background(device: torch.device, mode: str | None) -> None:
    """Check that graphs can be compiled in a subprocess.

    Args:
        device: The cache's device.
        mode: Mode of torch.compile.

    Raises:
        InputError: If steps run on another device than a CPU or a CUDA GPU, or torch.compile has another mode or
            backend than its defaults.
    """
    if device.type not in ("cpu", "cuda"):
        reason = f"the cache is on {device}"
    elif mode is not None:
        reason = f"mode is {mode!r}"
    elif private.default_backend() != "inductor":
        reason = f"torch.compile's backend is {private.default_backend()!r}"
    else:
        return
    raise InputError(
        f"compile='background' needs a cache on a CPU or a CUDA GPU and Inductor's default mode, but {reason}; pass "
        'compile=True, or "wait"'
    )


def marked(
    method: ProgramMethod,
    inputs: Sequence[torch.Tensor],
    compiles: bool = True,
    slots: torch.Tensor | None = None,
) -> tuple[list[torch.Tensor], frozenset[str]]:
    """Return copies of the inputs with their dynamic sizes marked, and the names of the dynamic sizes that are 1.

    Copies are contiguous, because guards check strides and a slice of a longer prompt has other ones.

    Args:
        method: The method that the inputs are of.
        inputs: Its inputs, in the order of `ProgramMethod.inputs`.
        compiles: True if this process compiles. A subprocess marks its own copies.
        slots: An earlier copy of `KV_SLOTS`, reused if it has the same length, because only its length is read.
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
            elif size in sizes and has_graphs_by_length(method):
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


def has_graphs_by_length(method: ProgramMethod | ChoiceMethod) -> bool:
    """Return True for encoders, whose convolutions add guards on the length: each range of lengths gets a graph."""
    return isinstance(method, ProgramMethod) and not method.is_step and (not method.takes_ids or method.pads)


def _guarded(call: Any) -> Step:
    """Return a kept graph as a step that raises `OutdatedGraph` before it computes anything if a guard fails."""
    call.disable_guard_check()

    def step(*inputs: torch.Tensor) -> Any:
        # Detached copies carry no marks, and the guards are on unmarked inputs.
        unmarked = [tensor.detach() for tensor in inputs]
        if not call.guard_check(*unmarked):
            raise OutdatedGraph
        return call(*unmarked)

    return step


def _step_of(module: torch.nn.Module) -> Step:
    """Return a function that calls `module`, with a separate code object and name.

    TorchDynamo keeps compiled graphs per code object: methods that shared one would count as recompilations of each
    other and reach the recompile limit. It also turns values that change between functions of one name into inputs.
    """

    def step(*inputs: torch.Tensor) -> torch.Tensor:
        return module(*inputs)

    code = step.__code__.replace(co_name=f"step_{next(_STEPS)}")
    return FunctionType(code, step.__globals__, "step", None, step.__closure__)
