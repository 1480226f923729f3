"""Running a program in this process, from the live model: eager or compiled."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from ..cache.attention.functions import ATTENTION
from ..cache.attention.implementation import borrow_attention
from ..common.compat import torch as private
from ..errors import InputError, UnsupportedModelError
from ..generation.choosing_steps import ChoosingSteps
from ..program.program import ResidentModule, front_module, program_methods
from ..program.read_lengths import shared_methods, slots_to_read
from ..program.spec import ProgramSpec
from ..program.tracing import told_by
from .background import BackgroundCompiler
from .compiling import StepCompiler, check_background, marked

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..generation.sampler import Sampler
    from ..models.cache_factory import ExportableCache
    from ..program.methods import ProgramMethod
    from .graph_cache import GraphCache

#: Prompts shorter than this may go token by token, where the model's code has no graph for them and longer ones in
#: common.
LONGEST_LEAST = 16
_GUARD = re.compile(r"satisfy the generated guard (\d+) <= L\[.*\] and L\[.*\] <= (\d+)")


class ModuleRunner:
    """Runs the resident form of a program over the cache's own tensors.

    The model's attention implementation is switched to ours until the runner is closed, or gone.

    Args:
        model: A transformers causal LM.
        cache: Its cache; its keys and values are written, its lengths are not.
        spec: Its methods and modalities.
        compiled: Compile the methods, each into one graph: decode for one token, prefill with a dynamic length, and
            those of several read lengths together. "background": in another process, and steps run as they are until
            their graph is there.
        mode: Of torch.compile; `reduce-overhead` (CUDA graphs) by default on a GPU.
        graph_cache: Folder in which compiled graphs are kept for later processes, see `GraphCache`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: ExportableCache,
        spec: ProgramSpec | None = None,
        *,
        compiled: bool | Literal["background"] = False,
        mode: str | None = None,
        graph_cache: str | Path | None = None,
    ) -> None:
        self._give_back = weakref.finalize(self, borrow_attention(model, ATTENTION))
        self._give_back.atexit = False
        spec = ProgramSpec() if spec is None else spec
        self.methods: dict[str, ProgramMethod] = program_methods(cache, spec)
        self.modules: dict[str, torch.nn.Module] = {
            name: ResidentModule(model, cache, method)
            if method.is_step
            else front_module(model, cache, method, spec.modalities)
            for name, method in self.methods.items()
        }
        self.state: Mapping[str, torch.Tensor] = cache.stored_state()
        self.background: BackgroundCompiler | None = None
        if compiled == "background":
            check_background(cache, mode)
            self.background = BackgroundCompiler(model, cache, spec, graph_cache)
        self.compiler: StepCompiler | None = None
        if compiled:
            self.compiler = (
                self.background.compiler if self.background else StepCompiler(model, cache, mode, graph_cache)
            )
        # CUDA graphs are recorded for each size.
        shares = compiled and cache.device.type == "cpu"
        self._shared = shared_methods(cache, self.methods) if shares else {}
        self._shared_modules = {method.name: ResidentModule(model, cache, method) for method in self._shared.values()}
        self._slots = torch.empty(max((one.kv_read_len for one in self._shared.values()), default=0), dtype=torch.bool)
        self._calls: dict[tuple, Callable[..., torch.Tensor]] = {}

    @property
    def graph_cache(self) -> GraphCache | None:
        """The compiled graphs on disk, None where none are kept."""
        return None if self.compiler is None else self.compiler.graph_cache

    @property
    def is_open(self) -> bool:
        """Whether it runs: it was not closed."""
        return self._give_back.alive

    def close(self) -> None:
        """Put back the attention that the model had; nothing runs afterwards. A second call does nothing."""
        self._give_back()
        if self.background is not None:
            self.background.close()

    @property
    def pending_graphs(self) -> int:
        """Graphs that are being compiled in the background."""
        return 0 if self.background is None else self.background.pending

    def waiting(self) -> AbstractContextManager[None]:
        """A block in which steps wait for their graph, where they are compiled in the background."""
        return nullcontext() if self.background is None else self.background.waiting()

    @torch.no_grad()
    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        return self._call((method,), inputs)

    @torch.no_grad()
    def run_and_choose(self, method: str, chooser: Sampler, *inputs: torch.Tensor, steps: int = 1) -> torch.Tensor:
        """Decode steps with the choice of the next tokens inside the graph: int64 [batch, steps].

        One graph serves all settings of a `Sampling`; greedy choice, the repetition penalty and every number of steps
        have graphs of their own.
        """
        greedy, penalised = chooser.sampling.is_greedy, chooser.seen is not None
        further: list[torch.Tensor] = [] if greedy else [chooser.uniform(inputs[0].shape[0], steps)]
        if penalised:
            further.append(chooser.seen)
        return self._call((method, greedy, penalised, steps), inputs, *further, *astuple(chooser.settings))

    def _call(self, key: tuple, inputs: Sequence[torch.Tensor], *further: torch.Tensor) -> Any:
        if not self.is_open:
            raise InputError("this session is closed, and its model has its own attention again; make another session")
        if self.compiler is None:
            return _choosing(self.modules[key[0]], key)(*inputs, *further)
        graph = self.graph(key, inputs, further)
        if graph is None:
            return _choosing(self.modules[key[0]], key)(*inputs, *further)
        call = self._calls.get(graph.key)
        if call is None and self.background is not None:
            call = self._from_background(graph, inputs, further)
            if (method := self.background.unshared(graph.key)) is not None:
                self.unshare(method)
                return self._call(key, inputs, *further)
            if call is None:
                return _choosing(self.modules[key[0]], key)(*inputs, *further)
            self._calls[graph.key] = call
        if call is not None:
            result = call(*graph.arguments)
        else:
            call = self.compiler.compile(graph.module, graph.method, graph.name, graph.arguments)
            try:
                result = call(*graph.arguments)
            except (private.dynamo_error(), ConstraintViolationError) as error:
                if graph.is_shared:
                    self.unshare(graph.method)
                    return self._call(key, inputs, *further)
                raised = self.methods[key[0]] = _raised(graph.method, error)
                enough = inputs[0].shape[1] >= raised.min_length
                return self._call(key, inputs, *further) if enough else self._token_by_token(raised, inputs)
            self._calls[graph.key] = call
        # CUDA graphs give out their own buffers, which the next step overwrites.
        return private.tree_map(lambda tensor: tensor.clone() if tensor.is_cuda else tensor, result)

    def _from_background(
        self, graph: Graph, inputs: Sequence[torch.Tensor], further: Sequence[torch.Tensor]
    ) -> Callable[..., torch.Tensor] | None:
        """A graph if another process has compiled it, and None while it does."""
        call = self.background.take(graph, [*inputs, *further])
        # Steps to come, of rows that are longer: the graphs behind a ring's first turn.
        for other in self.methods.values():
            if other.inputs == self.methods[graph.asked[0]].inputs and other.is_step:
                later = self.graph((other.name, *graph.asked[1:]), inputs, further)
                if later is not None and later.key != graph.key:
                    self.background.take(later, [*inputs, *further], ahead=True)
        return call

    def graph(self, key: tuple, inputs: Sequence[torch.Tensor], further: Sequence[torch.Tensor]) -> Graph | None:
        """What compiled graph serves a call, and with which arguments.

        None for a step that fills the cache to its last slot: that one runs as it is, instead of waiting for a graph of
        its own.
        """
        method = self.methods[key[0]]
        shared = self._shared.get(method.name)
        if shared is not None:
            size, steps = inputs[0].shape[1], 1 if len(key) == 1 else key[3]
            end = int(inputs[1].max()) + size + steps - 1
            slots = slots_to_read(shared, end, None if self._is_compiled(shared, key) else size)
            if slots is None:
                return None
            arguments, ones = marked(shared, [*inputs, self._slots[:slots]], self.background is None)
            module = self._shared_modules[shared.name]
            return Graph(shared, module, (shared.name, True, *key[1:], ones), [*arguments, *further], key)
        arguments, ones = marked(method, inputs, self.background is None)
        module = self.modules[method.name]
        return Graph(method, module, (method.name, False, *key[1:], ones), [*arguments, *further], key)

    def _is_compiled(self, shared: ProgramMethod, key: tuple) -> bool:
        return any(known[:-1] == (shared.name, True, *key[1:]) for known in self._calls)

    def unshare(self, shared: ProgramMethod) -> None:
        """The model's code asks how far the cache is read: a graph for each length, as for a phone."""
        self._shared = {name: method for name, method in self._shared.items() if method.name != shared.name}

    def _token_by_token(self, method: ProgramMethod, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Logits [batch, vocab] after the last token of a step that is too short for its method."""
        tokens, position, *more = inputs
        decode = next(
            one
            for one in self.methods.values()
            if one.serves(1, 1) and one.kv_read_len == method.kv_read_len and one.input_names == method.input_names
        )
        for index in range(tokens.shape[1]):
            logits = self._call((decode.name,), (tokens[:, index : index + 1], position + index, *more))
        return logits


@dataclass(frozen=True)
class Graph:
    """A call as a compiled graph takes it.

    Attributes:
        method: Of the graph.
        module: What it is compiled from, but for the choice of tokens.
        key: Tells it from the runner's other graphs: also by which of the dynamic sizes are 1, as TorchDynamo has no
            graph for those and others in common.
        arguments: Marked.
        asked: Method, and how tokens are chosen inside the graph if they are.
    """

    method: ProgramMethod
    step: torch.nn.Module
    key: tuple
    arguments: list[torch.Tensor]
    asked: tuple

    @property
    def module(self) -> torch.nn.Module:
        """What it is compiled from."""
        return _choosing(self.step, self.asked)

    @property
    def is_shared(self) -> bool:
        """Whether it serves several read lengths."""
        return self.key[1]

    @property
    def name(self) -> str:
        """Of the graph, among those of its method, in any process."""
        return f"{self.key[2:-1]} {sorted(self.key[-1])}"


def _choosing(module: torch.nn.Module, key: tuple) -> torch.nn.Module:
    return module if len(key) == 1 else ChoosingSteps(module, *key[1:])


def _raised(method: ProgramMethod, error: Exception) -> ProgramMethod:
    """The method with the `min_length` from which on the model's code is the same for all lengths.

    Some code compares the length with a kernel or a small constant, here as under `Program.export`. Shorter prompts go
    token by token then.

    Raises:
        UnsupportedModelError: If that is not why it could not be compiled.
    """
    found = _GUARD.search(str(error))
    if found is not None and method.takes_ids and method.is_step and not method.scores and method.min_length > 1:
        lowest, highest = int(found[1]), int(found[2])
        least = lowest if highest == method.max_length else highest + 1
        if method.min_length < least <= min(LONGEST_LEAST, method.max_length):
            return replace(method, min_length=least)
    raise UnsupportedModelError(
        f"{method.name} cannot be compiled into one graph ({told_by(error)}); run the session without compile=True"
    ) from error
